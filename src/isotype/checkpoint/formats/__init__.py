"""What the files of a checkpoint say: safetensors, GGUF and PyTorch headers, config.json, the hub's copies."""

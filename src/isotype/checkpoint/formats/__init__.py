"""Files of a checkpoint: safetensors, GGUF and PyTorch headers, config.json, the hub's copies."""

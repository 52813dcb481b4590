"""Reads the files of a checkpoint: headers of safetensors, GGUF and PyTorch files, config.json, copies on the hub."""

"""Readers of a checkpoint's files (safetensors, GGUF, PyTorch files, config.json), on a disk or on the hub."""

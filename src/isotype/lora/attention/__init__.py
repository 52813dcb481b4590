"""Attention for training: on a CPU by compiled loops whose data fit into the caches, on NVIDIA GPUs by sequence lengths."""

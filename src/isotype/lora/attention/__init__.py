"""Attention for training: compiled loops on a CPU, and kernels for concatenated rows on NVIDIA GPUs."""

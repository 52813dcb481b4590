"""Attention for training on a CPU: kernels whose data fit into the caches, and a choice of the fastest by measurement."""

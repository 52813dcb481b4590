"""Attention for training on a CPU: kernels whose data fit into the caches. The fastest measured kernel is used."""

"""Attention for training on a CPU: kernels whose data fit into the caches, and a choice between them by measured times."""

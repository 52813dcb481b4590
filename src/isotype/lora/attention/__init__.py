"""Attention for training on a CPU: kernels that work in the caches, and a measured choice among them."""

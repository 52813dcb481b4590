"""Attention for training on a CPU: block by block in what the caches hold, and the choice of a kernel by measurement."""

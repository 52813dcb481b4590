"""Measures the values of a training step: the largest magnitudes, and the first non-finite value."""

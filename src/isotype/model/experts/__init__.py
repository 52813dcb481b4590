"""Experts stacked in one parameter: quantized storage and computation."""

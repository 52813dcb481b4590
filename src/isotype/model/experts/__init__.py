"""Experts whose weights are stacked in one parameter: quantized storage, and the forward with adapters."""

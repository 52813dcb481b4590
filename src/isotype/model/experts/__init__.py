"""Experts whose weights lie stacked in one parameter: how they are stored quantized, and how they are computed."""

"""Quantizes experts whose weights are stacked in one parameter, and computes them together with their adapters."""

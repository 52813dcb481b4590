"""Measured values of a step: largest magnitudes, and the first non-finite value."""

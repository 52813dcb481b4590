"""Runs a step again to find its first operator with a non-finite result."""

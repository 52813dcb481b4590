"""Finds the sources of a model's tensors in a checkpoint, and checks names, shapes and completeness."""

"""Damage to a model's output from storing linear layers in fewer bits, block by block."""

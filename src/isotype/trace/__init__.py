"""Traces of one training step."""

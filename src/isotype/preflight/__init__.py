"""Checks one training step of a model, a trainer, a function or a script: traces it, reports findings, and tries fixes."""

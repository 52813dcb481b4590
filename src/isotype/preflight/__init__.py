"""Checks of one training step of a model, a trainer, a function or a script: trace, findings, and trials of fixes."""

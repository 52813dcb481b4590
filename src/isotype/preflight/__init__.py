"""Checks of one training step: traced, judged, fixes tried; from a model, a trainer, a function or a script."""

"""Measures, on a small copy of the model, which inputs affect each output."""

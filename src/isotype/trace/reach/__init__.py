"""Measurement of the inputs that reach each output, on a small copy of the model."""

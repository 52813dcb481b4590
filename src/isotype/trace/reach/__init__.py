"""Measurement of which inputs reach which outputs, on a small copy of the model."""

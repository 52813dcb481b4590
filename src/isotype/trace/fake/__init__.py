"""Runs a step on fake tensors: a copy of the model without values (the twin), a simulated device, an operator recorder."""

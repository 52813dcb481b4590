"""A step on fake tensors: a model's copy without values (its twin), a simulated device, and the recorder of the
operators."""

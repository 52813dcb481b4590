"""A step on fake tensors: the twin (a copy of the model without values), a simulated device, and the recorder."""

"""A step on fake tensors: the weightless twin, a simulated device, and the recorder that judges every operator."""

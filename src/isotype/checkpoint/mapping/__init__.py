"""Which tensors of a checkpoint a model's are made of: names, shapes, and whether all are there."""

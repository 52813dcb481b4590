"""Sources of a model's tensors in a checkpoint: names, shapes and completeness."""

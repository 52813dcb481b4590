"""What storing linear layers in fewer bits does to a model's output, block by block."""

"""Export a model to another program's format."""

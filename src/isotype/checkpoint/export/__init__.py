"""A model written in another program's format."""

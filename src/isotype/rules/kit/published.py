"""Where the code of published models lies: many have trained with it, so what looks like a slip there is known to work."""

TRANSFORMERS = "/transformers/models/"
"""In the path of every model of transformers."""

LIBRARIES = (TRANSFORMERS, "/diffusers/")
"""Libraries of models."""

"""SEE: one training step as data."""

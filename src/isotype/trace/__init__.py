"""Records one training step as data: a trace."""

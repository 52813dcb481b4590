"""The recording of one training step as data: a trace."""

"""The commands that look before anything runs: their arguments, and what they call."""

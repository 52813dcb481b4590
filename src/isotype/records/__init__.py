"""Frozen data that both wings share: what a step is asked for, what was traced of it, what was found."""

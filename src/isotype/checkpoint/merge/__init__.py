"""Merge an adapter into its base model: block by block, rounded once, written and opened again."""

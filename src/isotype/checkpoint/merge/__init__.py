"""Merges an adapter into its base model block by block, rounds once, writes the result, and opens it again."""

"""Merge an adapter into its base model block by block, round once, write the result, and open it again."""

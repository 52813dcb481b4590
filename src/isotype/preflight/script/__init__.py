"""A script of the user's own under isotype run: its imports, processes, steps, and what is said of them."""

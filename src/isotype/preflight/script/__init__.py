"""Scripts under `isotype run`: the watch over their imports, processes and steps, and the output about them."""

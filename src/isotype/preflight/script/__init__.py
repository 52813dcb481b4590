"""Scripts under `isotype run`: their imports, processes and steps, and the output about them."""

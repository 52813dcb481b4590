"""Scripts under `isotype run`: how isotype watches their imports, processes and steps, and what it prints about them."""

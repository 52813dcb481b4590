"""Scripts under `isotype run`: isotype watches their imports, processes and steps, and prints what it finds."""

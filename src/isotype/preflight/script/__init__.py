"""Scripts under `isotype run`: isotype records their imports, processes and steps, and prints its findings."""

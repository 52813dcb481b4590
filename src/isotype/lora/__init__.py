"""Fast LoRA products, loss and attention."""

"""COMPUTE: LoRA products, loss and attention at the speed of the arithmetic."""

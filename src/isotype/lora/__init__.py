"""Computes LoRA layers, the loss and attention fast."""

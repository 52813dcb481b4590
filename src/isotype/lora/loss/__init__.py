"""Computes log-probabilities chunk by chunk, without the full logits; also replaces the head in TRL's forward."""

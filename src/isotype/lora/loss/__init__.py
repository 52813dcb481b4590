"""Computes log-probabilities chunk by chunk, without the full logits. Also replaces the head in TRL's forward."""

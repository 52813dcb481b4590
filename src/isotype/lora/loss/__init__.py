"""Log-probabilities of a language model instead of its logits: head and softmax in chunks, and TRL's forward."""

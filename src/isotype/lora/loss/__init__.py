"""Log-probabilities of a language model without its logits: head and softmax run in chunks, also in TRL's forward."""

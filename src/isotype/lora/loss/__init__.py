"""Log-probabilities of a language model without the full logits: head and softmax run in chunks, also in TRL's forward."""

"""Log-probabilities of a language model in the place of its logits: the head and softmax in chunks, and the forward that TRL calls for them."""

"""A step on real tensors: the recorder under a running script, and the hooks that find its steps."""

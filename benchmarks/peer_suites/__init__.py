"""The three parts of `benchmarks/peers.py`."""

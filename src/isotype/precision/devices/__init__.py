"""Device profiles: what a device computes natively, its memory and rates; this machine's, measured."""

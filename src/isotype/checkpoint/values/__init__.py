"""Values of weights that are stored quantized or in blocks, and whether they are finite."""

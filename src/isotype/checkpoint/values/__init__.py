"""Values of weights that are stored quantized or in blocks, and checks that they are finite."""

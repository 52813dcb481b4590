"""Code that several rules use: dtype mismatches by cause, sets of weights, costs, and phrases for findings."""

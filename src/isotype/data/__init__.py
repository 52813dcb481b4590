"""DATA: reading and validating training data, and the data sets that ship in the package."""

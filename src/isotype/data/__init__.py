"""Training data: reading, checks and conversion of data sets, and the data sets of the package."""

"""Training data: reading, checking and converting data sets, and the data sets that the package contains."""

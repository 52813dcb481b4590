"""The lowest layer: dtypes, errors, names, units, command-line parsing, atomic writes. It imports no other room."""

"""The ground floor: dtypes, errors, names, units, command-line parsing, atomic writes. It knows nothing of the rooms above."""

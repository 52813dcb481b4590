"""The lowest layer: dtypes, errors, names, units, command-line parsing, atomic writes. core imports only compat."""

from pathlib import Path

VERSION = "0.2.0"
PACKAGE = Path(__file__).parents[1]

"""The lowest layer: dtypes, errors, names, units, command-line parsing, atomic writes. It imports no other room."""

from pathlib import Path

VERSION = "0.2.0"
PACKAGE = Path(__file__).parents[1]

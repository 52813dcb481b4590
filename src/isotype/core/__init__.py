"""The lowest layer: dtypes, errors, names, units, command lines, atomic writes. It imports only compat."""

from pathlib import Path

VERSION = "0.2.0"
PACKAGE = Path(__file__).parents[1]

"""Quantization formats are told apart by their records."""

from __future__ import annotations

import ast
from pathlib import Path

import isotype
from isotype.core.formats import DEQUANTIZED, FITTED, FORMATS, FOUR_BITS, METHODS, QUANTIZATIONS

SOURCE = Path(isotype.__file__).parent


def test_what_follows_from_the_records() -> None:
    assert QUANTIZATIONS == ("nf4", "fp4", "int8")
    assert FOUR_BITS == ("nf4", "fp4")
    assert FITTED == ("nf4-fitted", "nf4-32-fitted")
    assert DEQUANTIZED == ("mxfp4", "fp8", "compressed-tensors", "modelopt", "awq")
    assert all(form.block or form.bits == 8 for form in FORMATS.values())


def test_no_other_file_lists_formats() -> None:
    """`planning/record.py` ranks them by precision, `mixed` among them; colours are those of the pages."""
    names = FORMATS.keys() | METHODS.keys()
    listing = {
        file.relative_to(SOURCE).as_posix()
        for file in SOURCE.rglob("*.py")
        if any(f'"{name}"' in (text := file.read_text(encoding="utf-8")) for name in ("fp4", "modelopt"))
        for node in ast.walk(ast.parse(text))
        if isinstance(node, (ast.Tuple, ast.List, ast.Set))
        and len({each.value for each in node.elts if isinstance(each, ast.Constant)} & names) > 1
    }
    assert listing <= {"planning/record.py"}


def test_documents_name_every_method() -> None:
    for page in ("docs/checkpoints.md", "CHANGELOG.md"):
        text = Path(page).read_text(encoding="utf-8").lower()
        assert [name for name in METHODS if name not in text] == [], page

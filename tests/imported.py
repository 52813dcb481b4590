"""Imports the libraries, then isotype, and notes what that changed in them; the first thing that `tests.processes` does.

In the process of the tests both have been imported before, and tests have patched them.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import transformers
import trl


def _state() -> dict[tuple[str, str], Any]:
    """What modules and the bases of a trainer have, by (owner, name)."""
    owners = [torch, torch.nn, transformers, trl, *trl.SFTTrainer.__mro__]
    return {
        (owner.__name__, name): value
        for owner in owners
        for name, value in vars(owner).items()
        if isinstance(owner, type) or not name.startswith("_")
    }


_FIRST = "isotype" not in sys.modules
_BEFORE = _state()

import isotype  # noqa: E402

for _name in isotype.__all__:
    getattr(isotype, _name)

_AFTER = _state()


def changes() -> list[tuple[str, str]]:
    """Names that importing isotype has replaced, removed, or added to a class."""
    assert _FIRST, "isotype was imported before"
    changed = [key for key, value in _BEFORE.items() if _AFTER.get(key) is not value]
    classes = {each.__name__ for each in trl.SFTTrainer.__mro__}
    return changed + [key for key in _AFTER.keys() - _BEFORE.keys() if key[0] in classes]

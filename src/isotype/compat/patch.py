"""One record for each place where another library's insides are read or changed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["read", "replaced", "overridden", "swapped"]
"""A private name that is read; an attribute that is replaced for a time; a method that a subclass overrides; a class that an object is
given in the place of its own."""


@dataclass(frozen=True)
class Patch:
    """What is read or changed inside of another library.

    Attributes:
        name: what is touched, by its name in the library.
        library: whose it is, as it is imported; `standard` for Python's own.
        kind: how it is touched.
        where: the module of ours that does it.
        what: what happens to it.
        why: what would be wrong without.
        when: from when on, and how long.
        restored: how it is put back; "" where nothing is changed.
        link: where the library has it, or where the need for it is described.
        tried: the versions that it was tried with.
        test: the test that fails when it is no longer needed or no longer fits, as pytest names it.
    """

    name: str
    library: str
    kind: Kind
    where: str
    what: str
    why: str
    when: str
    restored: str
    link: str
    tried: str
    test: str

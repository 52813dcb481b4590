"""Writes docs/compat.md from the records of `isotype.compat.registry`.

python -m tools.compat_page
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from isotype.compat.patch import Patch
from isotype.compat.registry import PATCHES
from tools.sources import ROOT

PAGE = ROOT / "docs" / "compat.md"
_TITLES = {"standard": "Python and the C library"}
_INTRODUCTION = (
    "# What isotype changes in other libraries",
    "",
    "When, why, and how it is put back. Importing isotype changes nothing. This page is written by `python -m tools.compat_page` from",
    "`isotype.compat.registry`; the test that is named fails when an entry is no longer needed or no longer fits. Private names of other",
    "libraries are in `src/isotype/compat` alone, which `python -m tools.private_names` checks.",
)


def page(patches: Iterable[Patch]) -> str:
    """The whole page; patches of one library stand together."""
    lines = [*_INTRODUCTION]
    for library, some in groupby(patches, key=lambda patch: patch.library):
        lines += ["", f"## {_TITLES.get(library, library)}"]
        for patch in some:
            lines += ["", *_entry(patch)]
    return "\n".join(lines) + "\n"


def _entry(patch: Patch) -> list[str]:
    rows = {
        "What": f"{patch.what} ({patch.kind}, in `{patch.where}`)",
        "Why": f"{patch.why} ([source]({patch.link}))",
        "When": patch.when,
        "Put back": patch.restored or "nothing is changed",
        "Tried with": patch.tried,
        "Test": f"`{patch.test}`",
    }
    return [
        f"### {patch.name.replace('_', chr(92) + '_').replace('*', chr(92) + '*')}",
        "",
        *(f"- {name}: {text}" for name, text in rows.items()),
    ]


if __name__ == "__main__":
    PAGE.write_text(page(PATCHES), encoding="utf-8", newline="\n")

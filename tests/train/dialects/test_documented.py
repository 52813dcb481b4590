"""docs/dialects.md lists the names of tables.yaml; `python -m tests.train.dialects.test_documented` writes them."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

from isotype.train.dialects.reader import tables

PAGE = Path(__file__).parents[3] / "docs" / "dialects.md"
ROWS = (
    ("idle", "No effect", "The training is the same without these settings. The reason follows the names:"),
    (
        "differs",
        "Not done",
        "isotype trains without these settings, and prints what it does instead, which follows the names:",
    ),
    (
        "refused",
        "Refused",
        "isotype refuses a file with one of these settings. It supports what follows the names:",
    ),
)
BLOCK = re.compile(r"(<!-- names of other trainers: [^\n]* -->\n).*?(<!-- end of the names -->)", re.S)


def _listed(names: list[str]) -> str:
    return textwrap.fill(
        ", ".join(f"`{name}`" for name in names), 158, break_long_words=False, break_on_hyphens=False
    )


def _of(table: dict[str, Any]) -> str:
    pairs = [word.partition("=") for word in table["used"].split()]
    ruled = sorted(
        {name for rule in table["rules"] for name in rule.get("use", "").split()}
        - {name for name, *_ in pairs}
    )
    parts = [
        f"## {table['title']}",
        f"**The same name in isotype.** {_listed([name for name, _, ours in pairs if not ours])}.",
        f"**Another name in isotype.** {_listed([f'{name}` → `{ours}' for name, _, ours in pairs if ours])}.",
        f"**Read together.** isotype combines several of these settings into one argument, or uses only some of their values: {_listed(ruled)}.",
    ]
    for kind, title, lead in ROWS:
        lines = [
            f"- {_listed(names.split())}: {why.removeprefix('no effect: ')}"
            for why, names in table[kind].items()
        ]
        parts.append("\n".join([f"**{title}.** {lead}", "", *lines]))
    return "\n\n".join(parts)


def documented() -> str:
    """Return the block of the page."""
    types = [f"- `{method}`: {_listed(list(named))}" for method, named in tables()["types"].items() if named]
    return (
        "\n".join(
            [
                "",
                _of(tables()["axolotl"]),
                "",
                "**Types of data sets (`type` in `datasets`).**",
                "",
            ]
        )
        + "\n"
        + "\n".join([*types, "", _of(tables()["llama_factory"]), ""])
    )


def test_the_page_has_every_name_of_the_table() -> None:
    text = PAGE.read_text(encoding="utf-8")
    found = BLOCK.search(text)
    assert found is not None
    assert found[0] == f"{found[1]}{documented()}{found[2]}"


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(BLOCK.sub(lambda found: f"{found[1]}{documented()}{found[2]}", text), encoding="utf-8")

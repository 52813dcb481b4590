"""Pieces of HTML that more than one report is made of."""

from __future__ import annotations

import re
from collections.abc import Iterable

from isotype.report.charts import escape


def breakable(text: str) -> str:
    """Text that may go on in the next line behind the joints of its words (`_ / = , . : -`), never inside of them."""
    return "<wbr>".join(escape(part) for part in re.split(r"(?<=[_/=,.:-])(?=[^\s\d])", text))


def pair_list(pairs: Iterable[tuple[str, str]], css: str = "pairs") -> str:
    """Names and values as a `<dl>` in two columns; empty without pairs."""
    rows = "".join(f"<dt>{breakable(name)}</dt><dd>{breakable(value)}</dd>" for name, value in pairs)
    return f'<dl class="{css}">{rows}</dl>' if rows else ""

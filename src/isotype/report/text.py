"""Formats of amounts and places, the same in every report."""

from __future__ import annotations

import math

from isotype.report.charts import format_number


def format_duration(seconds: float) -> str:
    """Format seconds: `0.84 s`, `12.3 s`, `4 min 05 s`, `2 h 07 min`, `3 d 04 h`."""
    if not math.isfinite(seconds) or seconds < 60:
        return f"{format_number(seconds, 3)} s"
    units = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))
    whole = round(seconds)
    i = next(i for i, (_, size) in enumerate(units) if whole >= size)
    (large, size), (small, part) = units[i], units[i + 1]
    return f"{whole // size:,} {large} {whole % size // part:02d} {small}"


def format_share(share: float) -> str:
    """Format a share: `62 %`, `3.5 %` below a tenth, `under 0.1 %` if it rounds to zero."""
    percent = 100 * share
    if 0 < percent < 0.05:
        return "under 0.1 %"
    return f"{percent:.1f} %" if 0 < percent < 9.95 else f"{percent:.0f} %"


def format_count(count: int) -> str:
    """Format a count: `950`, `12.3 k`, `1.84 M`, `2.1 B`."""
    for size, letter in ((1_000_000_000, "B"), (1_000_000, "M"), (10_000, "k")):
        if count >= size:
            return f"{format_number(count / (1000 if letter == 'k' else size), 3)} {letter}"
    return f"{count:,}"


def format_flops(flops: float) -> str:
    """Format FLOPs: `950 FLOP`, `1.24 TFLOP`."""
    for name, unit in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if flops >= unit:
            return f"{format_number(flops / unit, 3)} {name}FLOP"
    return f"{flops:,.0f} FLOP"


def short_source(source: str) -> str:
    """Shorten `/lib/transformers/models/llama/modeling_llama.py:64` to `llama/modeling_llama.py:64`."""
    return "/".join(source.replace("\\", "/").split("/")[-2:])

"""Amounts as a person reads them, the same in every report."""

from __future__ import annotations

import math

from isotype.report.charts import format_number


def format_bytes(amount: int) -> str:
    """`512 B`, `1.50 KiB`, `34.5 MiB`, `1.84 GiB`."""
    value, unit = float(amount), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024 or unit == "TiB":
            break
        value /= 1024
    return (
        f"{amount:,} B"
        if unit == "B"
        else f"{value:,.{2 if value < 10 else 1 if value < 100 else 0}f} {unit}"
    )


def format_duration(seconds: float) -> str:
    """`0.84 s`, `12.3 s`, `4 min 05 s`, `2 h 07 min`, `3 d 04 h`."""
    if not math.isfinite(seconds) or seconds < 60:
        return f"{format_number(seconds, 3)} s"
    units = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))
    whole = round(seconds)
    i = next(i for i, (_, size) in enumerate(units) if whole >= size)
    (large, size), (small, part) = units[i], units[i + 1]
    return f"{whole // size:,} {large} {whole % size // part:02d} {small}"


def format_share(share: float) -> str:
    """`12.5 %`."""
    return f"{format_number(100 * share, 3)} %"


def format_count(count: int) -> str:
    """`950`, `12.3 k`, `1.84 M`, `2.1 B`."""
    for size, letter in ((1_000_000_000, "B"), (1_000_000, "M"), (10_000, "k")):
        if count >= size:
            return f"{format_number(count / (1000 if letter == 'k' else size), 3)} {letter}"
    return f"{count:,}"

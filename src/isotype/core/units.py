"""Amounts of memory as a person reads them, the same in every finding and report."""

from __future__ import annotations


def format_bytes(amount: float) -> str:
    """`512 B`, `1.50 KiB`, `34.5 MiB`, `1.84 GiB`."""
    value, unit = float(amount), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024 or unit == "TiB":
            break
        value /= 1024
    return (
        f"{amount:,.0f} B"
        if unit == "B"
        else f"{value:,.{2 if value < 10 else 1 if value < 100 else 0}f} {unit}"
    )

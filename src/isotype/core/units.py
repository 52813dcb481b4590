"""Amounts of memory as text, and free memory."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_SIZES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


def format_bytes(amount: float) -> str:
    """Return an amount as `512 B`, `1.50 KiB`, `34.5 MiB` or `1.84 GiB`."""
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


def parse_size(text: str) -> int | None:
    """Return the bytes of `20GiB` and `20G` (both binary), `20GB`, `8e9`; None if it is no amount above 0."""
    parts = re.fullmatch(r"\s*([0-9]*\.?[0-9]+(?:e[0-9]+)?)\s*([kmgt]?)(i?b)?\s*", text.lower())
    if parts is None:
        return None
    number, letter, ending = float(parts[1]), parts[2], parts[3]
    unit = _SIZES[letter] if ending == "b" or not letter else _BINARY[letter]
    return int(number * unit) or None


def free_memory(device: torch.device) -> int | None:
    """Return the free bytes of a device; None if unknown."""
    if device.type == "cuda":
        import torch

        return int(torch.cuda.mem_get_info(device)[0])
    if device.type != "cpu":
        return None
    try:
        import psutil
    except ImportError:
        return None
    return int(psutil.virtual_memory().available)

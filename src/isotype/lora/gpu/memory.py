"""How much memory a device has."""

from __future__ import annotations

from functools import cache

import torch


@cache
def total_memory(device: torch.device) -> int | None:
    """Bytes of a GPU's memory, as its driver reports them; None of a CPU, or where torch does not tell."""
    if device.type in ("cpu", "meta"):
        return None
    ask = getattr(torch.get_device_module(device), "mem_get_info", None)
    return None if ask is None else int(ask(device)[1])

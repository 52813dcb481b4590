"""Memory that is free on a device."""

from __future__ import annotations

import torch


def free_memory(device: torch.device) -> int | None:
    """Free bytes of a device; None where nobody knows."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type != "cpu":
        return None
    try:
        import psutil
    except ImportError:
        return None
    return int(psutil.virtual_memory().available)

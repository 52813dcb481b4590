"""What a module or a function computes, seen by running it on a few numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def result_of(call: Callable[..., Any], *operands: torch.Tensor) -> Any:
    """What `call` makes of operands on one device, without autograd and autocast; None if it takes something else."""
    device = operands[0].device.type
    try:
        with torch.no_grad(), torch.autocast("cpu" if device == "meta" else device, enabled=False):
            return call(*operands)
    except Exception:  # noqa: BLE001 - who takes something else raises whatever it likes
        return None


def is_close(result: Any, wanted: torch.Tensor, rtol: float, atol: float) -> bool:
    """Whether a result is a tensor of this shape whose numbers are those of `wanted`, on the CPU in float64, which some devices have not."""
    return (
        isinstance(result, torch.Tensor)
        and result.shape == wanted.shape
        and torch.allclose(result.cpu().double(), wanted, rtol=rtol, atol=atol)
    )

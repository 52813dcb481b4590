"""Results of modules and functions on a few numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def result_of(call: Callable[..., Any], *operands: torch.Tensor) -> Any:
    """Return `call` of operands on one device, without autograd and autocast; None if it rejects them."""
    device = operands[0].device.type
    try:
        with torch.no_grad(), torch.autocast("cpu" if device == "meta" else device, enabled=False):
            return call(*operands)
    except Exception:  # noqa: BLE001 - code that expects other arguments may raise anything
        return None


def is_close(result: Any, wanted: torch.Tensor, rtol: float, atol: float) -> bool:
    """Return whether a result has the shape and numbers of `wanted`, compared in float64 on the CPU."""
    return (
        isinstance(result, torch.Tensor)
        and result.shape == wanted.shape
        and torch.allclose(result.cpu().double(), wanted, rtol=rtol, atol=atol)
    )

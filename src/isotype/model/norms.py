"""Norms that return float32 whatever they are given: what follows them in 16 bits would refuse it."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

import torch
from torch import nn

from isotype.compat.torch import PARAMETERS, own_parameters
from isotype.model.boundary import original_class

_PLAIN = (bool, int, float, str, torch.dtype)
_ANSWERS: dict[Hashable, bool] = {}
"""A class, the dtypes and shapes of its weights and its plain attributes decide: a model asks for each of its hundred norms."""


def returns_float32(norm: nn.Module, dtype: torch.dtype) -> bool:
    """Whether a norm with weights returns float32 for an input in a 16-bit dtype; asked on the meta device, where nothing is computed.

    Args:
        norm: with or without a boundary; its class is asked without. One that takes something else than a single tensor
            `[…, n]`, as gated norms do, is known to nobody: False.
        dtype: of the input.
    """
    weights = {name: each for name, each in own_parameters(norm).items() if each is not None}
    if all(each.dim() != 1 for each in weights.values()):
        return False
    settings = tuple((name, value) for name, value in vars(norm).items() if isinstance(value, _PLAIN))
    shapes = tuple((name, each.shape, each.dtype) for name, each in weights.items())
    key = (original_class(norm), settings, shapes, dtype)
    if key not in _ANSWERS:
        _ANSWERS[key] = _asked(norm, weights, dtype)
    return _ANSWERS[key]


def _asked(norm: nn.Module, weights: Mapping[str, torch.Tensor], dtype: torch.dtype) -> bool:
    plain = original_class(norm)
    twin = object.__new__(plain)
    blank = {
        name: nn.Parameter(torch.empty(each.shape, dtype=each.dtype, device="meta"), requires_grad=False)
        for name, each in weights.items()
    }
    twin.__dict__.update(norm.__dict__, **{PARAMETERS: {**own_parameters(norm), **blank}})
    size = next(each.shape[0] for each in weights.values() if each.dim() == 1)
    try:
        with torch.no_grad():
            output = plain.forward(twin, torch.empty(1, size, dtype=dtype, device="meta"))
    except Exception:  # noqa: BLE001 - a norm of something else than one tensor raises whatever it likes
        return False
    return isinstance(output, torch.Tensor) and output.dtype == torch.float32

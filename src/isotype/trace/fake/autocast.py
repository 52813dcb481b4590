"""Runs functions under the CPU's autocast as the autocast of another device runs them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from isotype.contracts.contract import autocast_lists
from isotype.core.dtypes import FLOATS, HALVES
from isotype.core.operators import given_tensors
from isotype.trace.fake.arguments import with_tensors_in

LOWERED = FLOATS - {torch.float64}  # autocast keeps float64
SPARSE_PRODUCT = torch.sparse.mm.__name__  # calls `addmm`, which autocast casts


class DeviceAutocast:
    """The autocast of a kind of device, simulated while the CPU's autocast is enabled."""

    def __init__(self, kind: str) -> None:
        self._there, self._here = autocast_lists(kind), autocast_lists("cpu")

    def banned(self, name: str, args: Any, kwargs: Any) -> bool:
        """Return whether the device's autocast refuses the function `name`."""
        return self._there.treatment(name, args, kwargs) == "banned"

    def run(self, call: Callable[[Any, Any], Any], name: str, args: Any, kwargs: Any) -> Any:
        """Return the result of `call(args, kwargs)`, where `call` runs the function `name`."""
        writes, both = kwargs.get("out") is not None, (self._there, self._here)
        there, here = ("" if writes else lists.treatment(name, args, kwargs) for lists in both)
        if there in ("banned", "float32", "promote"):
            floats = {tensor.dtype for _, tensor in given_tensors(args, kwargs) if tensor.is_floating_point()}
            widest = floats.pop() if there == "promote" and len(floats) == 1 else torch.float32
            with torch.autocast("cpu", enabled=False):
                return call(*with_tensors_in(widest, (args, kwargs), HALVES))
        if name == SPARSE_PRODUCT or (there == "lower" and here != "lower"):
            return call(*with_tensors_in(torch.get_autocast_dtype("cpu"), (args, kwargs), LOWERED))
        if here in ("float32", "promote"):
            with torch.autocast("cpu", enabled=False):
                return call(args, kwargs)
        return call(args, kwargs)

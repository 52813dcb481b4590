"""The softmax of a loss by compiled loops (softmax.cpp): each row of logits is read once into a core's cache."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import torch

from isotype.compat.torch import dispatch_depth, is_transformed
from isotype.lora.loops.loading import NAMES, Loops, loops_of

SOURCE = Path(__file__).with_suffix(".cpp")
HEADERS = (Path(__file__).with_name("vectors.h"),)
_FLOATS = ("log_probs", "logsumexp", "entropy", "mean_logits", "log_sum_sq_probs", "factor")


class _Results(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in (*_FLOATS, "is_top1")]


@cache
def _loops() -> Loops:
    return loops_of(SOURCE, *HEADERS)


def usable(logits: torch.Tensor, exact: torch.Tensor, targets: torch.Tensor) -> bool:
    """Return whether the compiled loops support a block: plain contiguous CPU tensors of known dtypes."""
    return (
        not torch.compiler.is_compiling()
        and not is_transformed()
        and logits.device.type == "cpu"
        and logits.dtype in NAMES
        and (exact.dtype, targets.dtype) == (torch.float32, torch.int64)
        and exact.shape == targets.shape == logits.shape[:1]
        and all(type(each) is torch.Tensor and each.is_contiguous() for each in (logits, exact, targets))
        and not dispatch_depth()  # dispatch modes see torch's operators
        and _loops().reason is None
    )


def softmax(
    logits: torch.Tensor,
    exact: torch.Tensor,
    targets: torch.Tensor,
    factors: tuple[float, float],
    outputs: Mapping[str, torch.Tensor],
    ahead: bool,
) -> torch.Tensor | None:
    """Compute `isotype.lora.loss.softmax.softmax` of logits `[n, V]` without a soft cap.

    Args:
        logits: overwritten with `ahead`.
        exact: the targets' own logits, float32 `[n]`.
        targets: int64 `[n]`, each in `[0, V)`.
        factors: of logits and of gradients.
        outputs: requested results by name, contiguous `[n]`.
        ahead: whether the gradients are written over the logits.

    Returns:
        With `ahead`, the factor of each row of gradients.
    """
    factor = torch.empty_like(exact) if ahead else None
    written = {**outputs, **({} if factor is None else {"factor": factor})}
    results = _Results(**{name: each.data_ptr() for name, each in written.items()})
    sizes = *logits.shape, torch.get_num_threads()
    _loops().run(
        "softmax", logits.dtype, *sizes, *map(float, factors), logits, exact, targets, ctypes.byref(results)
    )
    return factor

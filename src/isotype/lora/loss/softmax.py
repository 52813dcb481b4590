"""Computes the softmax of a chunk's logits in float32, block by block, and the gradients of the results.

On a CPU, compiled loops (lora/loops/softmax.cpp) load each row of logits into a core's cache only once.
"""

import ctypes
from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path

import torch

from isotype.compat.torch import FakeTensor, dispatch_depth, needs_operators
from isotype.lora.loops.loading import NAMES, loops_of
from isotype.lora.loss.logits import Scratch, scale_and_cap
from isotype.precision.devices.simulated import device_type_of

_LOOPS = Path(__file__).parents[1] / "loops"
_loops = cache(partial(loops_of, _LOOPS / "softmax.cpp", _LOOPS / "vectors.h"))
_FLOATS = ("log_probs", "logsumexp", "entropy", "mean_logits", "log_sum_sq_probs", "factor")


class _Results(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in (*_FLOATS, "is_top1")]


def _is_by_loops(logits: torch.Tensor, exact: torch.Tensor, targets: torch.Tensor) -> bool:
    return (
        not needs_operators()
        and logits.device.type == "cpu"
        and logits.dtype in NAMES
        and (exact.dtype, targets.dtype) == (torch.float32, torch.int64)
        and exact.shape == targets.shape == logits.shape[:1]
        and all(type(x) is torch.Tensor and x.is_contiguous() for x in (logits, exact, targets))
        and not dispatch_depth()  # dispatch modes get torch's operators
        and _loops().reason is None
    )


def softmax(
    scratch: Scratch,
    logits: torch.Tensor,
    exact: torch.Tensor,
    targets: torch.Tensor,
    outputs: Mapping[str, torch.Tensor],
    ahead: bool,
) -> torch.Tensor | None:
    """Write a block's results into `outputs`. If `ahead` is True, also overwrite the logits with their gradients.

    With p = softmax and target t, the gradient p_j - 1[j = t] of logit j is divided by 1 - p_t. The quotient is -1 at t
    and p_j / (1 - p_t) elsewhere, so it stays accurate if p_t is near 1. The returned factors undo the division.

    Args:
        exact: float32 logits of the targets, `[n]`.
        targets: int64 `[n]`, each in `[0, V)`.
        outputs: name -> contiguous result `[n]`.

    Returns:
        The factor of each row of gradients, float32 `[n]`; None if `ahead` is False.
    """
    call = scratch.call
    if call.softcap is None and _is_by_loops(logits, exact, targets):
        factor = torch.empty_like(exact) if ahead else None
        written = {**outputs, **({} if factor is None else {"factor": factor})}
        results = ctypes.byref(_Results(**{name: result.data_ptr() for name, result in written.items()}))
        numbers = *logits.shape, torch.get_num_threads(), float(call.slope), float(call.gradient_factor)
        _loops().run("softmax", logits.dtype, *numbers, logits, exact, targets, results)
        return factor
    n, at = logits.shape[0], targets[:, None]
    z, slope = scratch.scaled(logits)
    target_slope = None if slope is None else torch.empty_like(exact)
    target_z = scale_and_cap(call, exact.clone(), target_slope)
    top = z.amax(-1, keepdim=True)
    if "is_top1" in outputs:
        outputs["is_top1"].copy_(_first_of_largest(z, top, targets))
    if "mean_logits" in outputs:
        torch.mean(z, -1, out=outputs["mean_logits"])
    z.sub_(top)
    e = torch.exp(z, out=z if scratch.other is None else scratch.other[:n])
    # The target is added separately: the exact logit replaces the rounded one, and log1p is exact near p = 1.
    e.scatter_(1, at, 0.0)
    target_z = target_z - top[:, 0]
    target_e = target_z.exp()
    others = e.sum(-1)
    log_total = torch.log1p(others + (target_e - 1))
    torch.sub(target_z, log_total, out=outputs["log_probs"])
    torch.add(top[:, 0], log_total, out=outputs["logsumexp"])
    if "entropy" in outputs:
        weighted = z.mul_(e).sum(-1) + target_e * target_z  # the buffer `other` exists, so e is not z
        torch.sub(log_total, weighted / (others + target_e), out=outputs["entropy"])
    if "log_sum_sq_probs" in outputs:
        squares = torch.mul(e, e, out=None if e is z else z).sum(-1) + target_e.square()
        torch.sub(squares.log(), log_total, alpha=2, out=outputs["log_sum_sq_probs"])
    if not ahead:
        return None
    share = call.gradient_factor / others.clamp_min(1e-30)
    if slope is not None:
        e.mul_(slope)
    write_scaled(e, share[:, None], logits)
    scale = -call.gradient_factor
    target = torch.full_like(exact, scale) if target_slope is None else target_slope * scale
    if device_type_of(logits) == "cpu":  # `scatter_` into 16 bits would allocate a float32 copy of the logits
        logits.index_put_((torch.arange(n), targets), target.to(logits.dtype))
    else:
        logits.scatter_(1, at, target[:, None].to(logits.dtype))
    return others / (others + target_e) * (-call.slope / call.gradient_factor)


def write_scaled(values: torch.Tensor, factor: torch.Tensor, out: torch.Tensor) -> None:
    """Write `values * factor` into `out`, which may have another dtype. On a CPU, `values` is overwritten."""
    # On a CPU, torch would allocate memory for the product if `out` has another dtype.
    if device_type_of(out) == "cpu":
        out.copy_(values.mul_(factor))
    else:
        torch.mul(values, factor, out=out)


def _first_of_largest(z: torch.Tensor, top: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    if z.device.type != "cpu" or isinstance(z, FakeTensor):
        return z.argmax(-1) == targets
    # On a CPU argmax is twenty times slower than amax.
    largest = z.gather(1, targets[:, None]) == top
    for row in largest[:, 0].nonzero()[:, 0].tolist():
        before = z[row, : targets[row]]
        if before.numel():
            largest[row] &= before.amax() < top[row]
    return largest[:, 0]


def gradient(
    scratch: Scratch,
    logits: torch.Tensor,
    exact: torch.Tensor,
    targets: torch.Tensor,
    results: Mapping[str, torch.Tensor],
    gradients: Mapping[str, torch.Tensor],
) -> torch.Tensor:
    """Return the gradient of the loss with respect to the logits y = W h + b of a block of tokens: float32 `[block, V]`, in a
    buffer.

    With p = softmax(z) and target t: d log p_t / dz_j = 1[j = t] - p_j; d entropy / dz_j = -p_j (log p_j + entropy); d
    logsumexp / dz_j = p_j. `results`: the forward's log-probabilities, logsumexp and entropy; `gradients`: their
    gradients.
    """
    log_p, logsumexp, entropy = results["log_probs"], results["logsumexp"], results.get("entropy")
    assert scratch.other is not None
    at, nothing = targets[:, None], torch.zeros_like(exact)
    z, slope = scratch.scaled(logits)
    values = torch.exp(z.sub_(logsumexp[:, None]), out=scratch.other[: len(z)])
    target_p = log_p.exp()
    of_log_prob, of_entropy = gradients.get("log_probs", nothing), gradients.get("entropy")
    both = gradients.get("logsumexp", nothing) - of_log_prob
    # For p_t near 1 the difference 1 - p_t loses digits; expm1 does not.
    target = gradients.get("logsumexp", nothing) * target_p - of_log_prob * torch.expm1(log_p)
    if of_entropy is None or entropy is None:
        values.mul_(both[:, None])
    else:
        values.mul_(z.add_(entropy[:, None]).mul_(-of_entropy[:, None]).add_(both[:, None]))
        target -= of_entropy * target_p * (log_p + entropy)
    if "mean_logits" in gradients:
        of_logit = gradients["mean_logits"] / logits.shape[1]
        values.add_(of_logit[:, None])
        target += of_logit
    values.scatter_(1, at, target[:, None])
    if slope is not None:
        target_slope = torch.empty_like(exact)
        scale_and_cap(scratch.call, exact.clone(), target_slope)
        values.mul_(slope.scatter_(1, at, target_slope[:, None]))
    factor = scratch.call.slope
    return values.mul_(factor) if factor != 1 else values

"""Computes tokens' log-probabilities from a language model's hidden states, for one chunk of tokens at a time.

With y = W h + b, cap(x) = softcap tanh(x / softcap), z = cap(scale y) / temperature, p = softmax(z) and the target t:

    log p_t = z_t - logsumexp(z)
    d log p_t / d h = sum_j (1[j = t] - p_j) (dz_j / dy_j) W_j

A token's log-probability depends only on its own hidden state. The forward already computes the gradients of the hidden
states. The backward multiplies the gradient of each token by the incoming gradient. If the entropy is differentiated or
the head is trained, the backward recomputes the logits. A chunk has all logits of its tokens. The gradient of each
hidden state is therefore one matrix product, and is rounded once.

The logit of the target is also computed in float32, because its rounding error would be an error of the
log-probability. A logit of 20 has a rounding error up to 0.06 in bfloat16.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from isotype.core.dtypes import autocast_dtype
from isotype.lora.loss.logits import Call, Head, Scratch, add_outer
from isotype.lora.loss.softmax import gradient, softmax, write_scaled

OUTPUTS = ("entropy", "logsumexp", "mean_logits", "log_sum_sq_probs", "is_top1")
"""Names of the optional results of `log_probs`. All results except the last two can be differentiated."""


@dataclass(frozen=True)
class PerToken:
    """Results per token, float32 `[N]`, or None if they were not requested.

    Attributes:
        mean_logits: mean of the logits over the vocabulary.
        log_sum_sq_probs: logarithm of the sum of p² over the vocabulary. It has no gradient.
        is_top1: True where the target has the largest logit, and no smaller token id has the same logit; bool `[N]`.
    """

    log_probs: torch.Tensor
    entropy: torch.Tensor | None = None
    logsumexp: torch.Tensor | None = None
    mean_logits: torch.Tensor | None = None
    log_sum_sq_probs: torch.Tensor | None = None
    is_top1: torch.Tensor | None = None


def log_probs(
    head: Head,
    hidden: torch.Tensor,
    targets: torch.Tensor,
    outputs: Sequence[str] = (),
    *,
    gradients: Sequence[str] = ("log_probs",),
    working: torch.dtype | None = None,
) -> PerToken:
    """Return the log-probability of each target, given its hidden state, and the results named in `outputs`.

    Args:
        head: the language-model head. Its weight and bias get gradients if they require them.
        hidden: hidden states `[N, H]` in any float dtype.
        targets: int64 `[N]`, each in `[0, V)`.
        gradients: names of the results that may be differentiated. If it contains another name than `log_probs`, the backward
            recomputes the logits.
        working: dtype of the products. None means autocast's dtype if autocast is on, else the dtype of the weight.

    Raises:
        RuntimeError: in the backward, a result that `gradients` does not name gets a nonzero gradient.
    """
    call = Call(
        head.scale,
        head.softcap,
        head.temperature,
        working or autocast_dtype(hidden.device.type) or head.weight.dtype,
        tuple(name for name in OUTPUTS if name in outputs),
        frozenset(gradients),
        torch.is_grad_enabled(),
    )
    values: tuple[torch.Tensor, ...] = _LogProbs.apply(call, hidden, head.weight, head.bias, targets)  # type: ignore[no-untyped-call]
    return PerToken(**dict(zip(("log_probs", *call.outputs), values, strict=True)))


def log_probs_of_logits(logits: torch.Tensor, targets: torch.Tensor, temperature: float) -> PerToken:
    """Return all results from complete logits `[N, V]`, for models whose head does more than a projection."""
    z = logits.float() / temperature
    logsumexp, target = z.logsumexp(-1), z.gather(-1, targets[:, None])[:, 0]
    logp = z - logsumexp[:, None]
    return PerToken(
        target - logsumexp,
        -(logp.exp() * logp).sum(-1),
        logsumexp,
        z.mean(-1),
        (2 * logp).logsumexp(-1).detach(),
        z.argmax(-1) == targets,
    )


_SAVED = ("log_probs", "logsumexp", "entropy")  # results that the backward needs


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        call: Call,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        of_hidden, *of_head = ctx.needs_input_grad[1:4]
        again = call.differentiated and (any(of_head) or (of_hidden and call.gradients != {"log_probs"}))
        ahead = call.differentiated and of_hidden and not again
        with torch.autocast(hidden.device.type, enabled=False):
            values, rows = _forward(call, hidden, weight, bias, targets, ahead=ahead)
        ctx.call, ctx.dtype = call, hidden.dtype
        if rows is not None:
            ctx.save_for_backward(*rows)
        elif again:
            needed = (values[name] for name in _SAVED if name in values)
            ctx.save_for_backward(hidden, weight, bias, targets, *needed)
        ctx.again = again
        without = {"log_sum_sq_probs", "is_top1"}.intersection(call.outputs)
        ctx.mark_non_differentiable(*(values[name] for name in without))
        return tuple(values[name] for name in ("log_probs", *call.outputs))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        call: Call = ctx.call
        named = zip(("log_probs", *call.outputs), grads, strict=True)
        gradients = {name: grad.float() for name, grad in named if grad is not None}
        # A compiled graph passes a zero gradient for a result that it only reads.
        others = {name: gradients.pop(name) for name in gradients.keys() - call.gradients}
        if unnamed := sorted(name for name, grad in others.items() if grad.any()):
            called = f"`log_probs` was called with gradients={sorted(call.gradients)}"
            raise RuntimeError(f"the loss needs the gradient of {', '.join(unnamed)}, but {called}")
        if ctx.again:
            with torch.autocast(ctx.saved_tensors[0].device.type, enabled=False):
                return None, *_backward(call, ctx.needs_input_grad[1:4], ctx.saved_tensors, gradients), None
        if "log_probs" not in gradients:
            return None, None, None, None, None
        unit, factor = ctx.saved_tensors
        grad = torch.empty_like(unit, dtype=ctx.dtype)
        torch.mul(unit, (gradients["log_probs"] * factor)[:, None], out=grad)
        return None, grad, None, None, None


def _forward(
    call: Call,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    *,
    ahead: bool,
) -> tuple[Mapping[str, torch.Tensor], tuple[torch.Tensor, torch.Tensor] | None]:
    """Return (results by name, None). If `ahead` is True, return (results, (gradients of the hidden states, factor of each row))."""
    tokens = hidden.shape[0]
    names = {"log_probs", "logsumexp", *call.outputs} | (call.gradients & {"entropy"})
    dtypes = {name: torch.bool if name == "is_top1" else torch.float32 for name in names}
    outputs = {name: hidden.new_zeros(tokens, dtype=dtype) for name, dtype in dtypes.items()}
    scratch = Scratch(call, weight, bias, tokens, other="entropy" in names, slope=ahead)
    unit = hidden.new_empty(hidden.shape, dtype=call.working) if ahead else None
    factor = hidden.new_zeros(tokens, dtype=torch.float32) if ahead else None
    for chunk in scratch.chunks(tokens):
        logits, exact = scratch.project(hidden[chunk].to(call.working), targets[chunk])
        for rows, place in scratch.blocks(chunk):
            block = {name: values[place] for name, values in outputs.items()}
            scale = softmax(scratch, logits[rows], exact[rows], targets[place], block, ahead)
            if factor is not None and scale is not None:
                factor[place] = scale
        if unit is not None:
            scratch.multiply_into(unit[chunk], logits)
    return outputs, None if unit is None or factor is None else (unit, factor)


def _backward(
    call: Call, needed: Sequence[bool], saved: Sequence[Any], gradients: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Recompute the logits, and return the gradients of (hidden, weight, bias). `gradients`: gradients of the results."""
    hidden, weight, bias, targets = saved[:4]
    results = dict(zip(_SAVED, saved[4:], strict=False))
    tokens = hidden.shape[0]
    d_hidden = torch.empty_like(hidden) if needed[0] else None
    d_weight = torch.zeros_like(weight, dtype=torch.float32) if needed[1] else None
    d_bias = torch.zeros_like(bias, dtype=torch.float32) if needed[2] else None
    scratch = Scratch(call, weight, bias, tokens, other=True, slope=True)
    for chunk in scratch.chunks(tokens):
        x = hidden[chunk].to(call.working)
        logits, exact = scratch.project(x, targets[chunk])
        factor = torch.zeros_like(exact)
        for rows, place in scratch.blocks(chunk):
            block = {name: result[place] for name, result in results.items()}
            grads = {name: grad[place] for name, grad in gradients.items()}
            values = gradient(scratch, logits[rows], exact[rows], targets[place], block, grads)
            if d_bias is not None:
                d_bias.add_(values.sum(0))
            # Each row is scaled so that the largest entry is 1 (in float16 `_LIFT`), and no product overflows.
            norm = torch.linalg.vector_norm(values, torch.inf, dim=-1).clamp_min(1e-30)
            write_scaled(values, (call.gradient_factor / norm)[:, None], logits[rows])
            factor[rows] = norm / call.gradient_factor
        if d_hidden is not None:
            unit = x.new_empty(x.shape)
            scratch.multiply_into(unit, logits)
            torch.mul(unit, factor[:, None], out=d_hidden[chunk])
        if d_weight is not None:
            add_outer(logits, x, factor, d_weight)
    d_weight = None if d_weight is None else d_weight.to(weight.dtype)
    return d_hidden, d_weight, None if d_bias is None else d_bias.to(bias.dtype)

"""LoRA linear layers as one autograd function, for one layer or several with the same input.

For layers l with adapters a (`s` the scaling, `m` DoRA's magnitude, `‖·‖` the norm of each row):

    Y_l = X W_lᵀ + b_l + Σ_a s_a (drop_a(X) A_aᵀ) B_aᵀ                      LoRA, https://arxiv.org/abs/2106.09685
    Y_l = m ⊙ (X W_lᵀ + s (X Aᵀ) Bᵀ) / ‖W_l + s B A‖ + b_l                  DoRA, https://arxiv.org/abs/2402.09353

All casts are here, with autocast off: X once, the adapters' masters once, gradients of masters to the
masters' dtype. The backward computes one gradient of X for all layers and one product for all A. Base weights
are frozen, so only X and the small X Aᵀ are saved; for a gated product X, its two factors. Tensors are saved
before Y is computed: gradient checkpointing stops its recomputation there, so the last product of a block is
not computed twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from isotype.compat.bitsandbytes import product_4bit
from isotype.compat.torch import UNNAMED_VIEW, has_kernel
from isotype.core.dtypes import NoAutocast
from isotype.lora import kernels
from isotype.lora.loops.products import Sum, write_sums
from isotype.lora.spec import Adapter, Layer, Spec
from isotype.lora.weights import Pairs, rounded, shape_of
from isotype.model.quantized import quantization_state

_aten = torch.ops.aten


def drop(
    x: torch.Tensor, source: torch.Tensor, probability: float
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return (X after dropout, scaled; the mask `[rows, in]`, None without dropout).

    A CPU's random numbers are drawn in memory order of the input, even a transposed one, as in `nn.Dropout`.
    `x`: X as a matrix `[rows, in]` in the dtype of the products; `source`: the tensor of any shape and strides that it
    was flattened from.
    """
    if not probability:
        return x, None
    if _has_kernel(x):
        kept, mask = _aten.native_dropout(x, probability, True)
        return kept, mask
    drawn = torch.empty_like(source, dtype=torch.bool).bernoulli_(1 - probability)
    mask = drawn.reshape(-1, source.shape[-1])
    return dropped(x, mask, probability), mask


def dropped(x: torch.Tensor, mask: torch.Tensor | None, probability: float) -> torch.Tensor:
    """Return X, or its gradient, after applying a dropout mask, scaled."""
    if mask is None:
        return x
    # With a probability of 1 there is nothing to scale.
    scale = 1 / max(1 - probability, torch.finfo(x.dtype).tiny)
    if _has_kernel(x):
        result: torch.Tensor = _aten.native_dropout_backward(x, mask, scale if probability < 1 else 0.0)
        return result
    return x * mask * scale


def _has_kernel(x: torch.Tensor) -> bool:
    return x.device.type in kernels.DEVICES and has_kernel("aten::native_dropout", x.device.type)


def lora_linear(
    spec: Spec, inputs: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """Return the outputs of `spec.layers`, each `[…, out_features]` in `spec.result`.

    Args:
        inputs: X `[…, in_features]` in any float dtype; with a gate, its two factors.
        tensors: for each layer its biases `[out]`, for each adapter A `[r, in]` and B `[out, r]`, and
            DoRA's magnitude `[out]`.
    """
    first, second = (*inputs, None)[:2]
    products: list[_Product] = []
    outputs: tuple[torch.Tensor, ...] = _LoraLinear.apply(spec, products, first, second, *tensors)  # type: ignore[no-untyped-call]
    with torch.no_grad(), NoAutocast(inputs[0].device.type):
        _write(spec, products)
    return outputs


class _Product(NamedTuple):
    """An output returned before its values are computed, `out`: X Wᵀ + b + s (X Aᵀ) Bᵀ of one layer."""

    own: _Own
    x: torch.Tensor
    hidden: torch.Tensor
    bias: torch.Tensor | None
    out: torch.Tensor

    def written_to(self, out: torch.Tensor, weight: torch.Tensor) -> Sum:
        # The adapters first: torch's operators would add them to an already rounded base.
        up = self.own.scaled_up
        small = () if up is None else ((_columns(self.hidden, self.own), up.t()),)
        return Sum(out, (*small, (self.x, weight.t())), self.bias)


class _LoraLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        spec: Spec,
        products: list[_Product],
        first: torch.Tensor,
        second: torch.Tensor | None,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        with NoAutocast(first.device.type):
            x = _product(spec, _factors(spec, first, second))
            # A CPU rounds every A separately; one that is already rounded is not copied.
            each, down = _rounded(spec, tensors, stacked=not (spec.drops and first.is_cpu))
            hidden, masks = _hidden(spec, x, first, each, down)
            done = [_output(spec, own, x, hidden, products) for own in each]
        outputs, totals, norms = zip(*done, strict=True)
        ctx.spec, ctx.shape = spec, first.shape
        ctx.dtypes = first.dtype, None if second is None else second.dtype
        factors = (x, None) if spec.gate is None else (first, second)
        scaled = [own.scaled_up for own in each]
        ctx.save_for_backward(*factors, hidden, down, *scaled, *totals, *norms, *tensors, *masks)
        leading = first.shape[:-1]
        # Not views for autograd, which forbids writing into views returned by a function.
        return tuple([UNNAMED_VIEW(rows, (*leading, rows.shape[-1])) for rows in outputs])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        spec: Spec = ctx.spec
        spec.weights.workspace.release_after_backward()
        first, second, hidden, down, *saved = ctx.saved_tensors
        layers, adapters = len(grads), spec.adapters
        scaled, totals, norms = saved[:layers], saved[layers : 2 * layers], saved[2 * layers : 3 * layers]
        tensors, masks = saved[3 * layers : len(saved) - adapters], saved[len(saved) - adapters :]
        found: list[torch.Tensor | None] = [None] * len(tensors)
        arrived: list[tuple[_Own, torch.Tensor]] = []
        with NoAutocast(first.device.type):
            factors = _factors(spec, first, second)
            each = _owned(spec, tensors)
            for own, up in zip(each, scaled, strict=True):
                own.scaled_up = up
            for own, grad, total, norm in zip(each, grads, totals, norms, strict=True):
                if grad is not None:
                    rows = grad.reshape(-1, grad.shape[-1]).to(spec.working)
                    arrived.append((own, _through_output(own, rows, total, norm, found)))
            d_hidden = torch.empty_like(hidden) if len(arrived) == len(grads) else torch.zeros_like(hidden)
            _through_up(spec, arrived, hidden, d_hidden, found)
            wanted = any(ctx.needs_input_grad[2:4]) and bool(arrived)
            # The gated product is recomputed with its gradient.
            x = None if wanted and spec.gate is not None else _product(spec, factors)
            whole = None if spec.drops else down
            d_x, d_down = _through_products(spec, arrived if wanted else (), whole, d_hidden, x)
            if d_x is not None and spec.drops:  # adapters have dropout masks of their own
                adapters_of = _adapters(each, down, d_hidden.dtype)
                parts = _split(d_hidden, [adapter.rank for adapter, _ in adapters_of], 1)
                for part, (adapter, a), mask in zip(parts, adapters_of, masks, strict=True):
                    d_x.add_(dropped(part @ a, mask, adapter.dropout))
            x, d_inputs = _through_input(ctx, d_x, factors, x)
            del d_x, factors, arrived  # copies in the working dtype, not needed for the gradients of A
            if d_down is None:
                _, d_down = _through_products(spec, (), whole, d_hidden, x)
            _through_down(spec, each, x, masks, d_hidden, d_down, found)
        return None, None, *d_inputs, *found


@dataclass(slots=True)
class _Own:
    """The tensors of one layer, their positions, and its adapters' columns in X Aᵀ.

    `first_pair`: position of its first A among all tensors, followed by B. `scaled_up`: s B of all its
    adapters side by side in the working dtype, `[out, rank]`; None without adapters.
    """

    layer: Layer
    start: int
    first_pair: int
    first_column: int
    biases: Sequence[torch.Tensor]
    down: Sequence[torch.Tensor]
    up: Sequence[torch.Tensor]
    magnitude: torch.Tensor | None
    scaled_up: torch.Tensor | None = None


def _owned(spec: Spec, tensors: Sequence[torch.Tensor]) -> list[_Own]:
    """Slice the flat tensor list per layer, without `scaled_up`."""
    made, start, column = [], 0, 0
    for layer in spec.layers:
        pair, end = start + len(layer.biases), start + layer.tensors
        last = pair + 2 * len(layer.adapters)
        down, up = tensors[pair:last:2], tensors[pair + 1 : last : 2]
        magnitude = tensors[last] if last < end else None
        made.append(_Own(layer, start, pair, column, tensors[start:pair], down, up, magnitude))
        start = end
        column += layer.rank
    return made


def _rounded(
    spec: Spec, tensors: Sequence[torch.Tensor], *, stacked: bool
) -> tuple[list[_Own], torch.Tensor | None]:
    """Return (tensors per layer; all A stacked in the working dtype, if `stacked` and there are any)."""
    each = _owned(spec, tensors)
    pairs = [Pairs(own.down, own.up, own.layer.scales) for own in each]
    down, scaled = rounded(pairs, spec.working, stacked=stacked)
    for own, up in zip(each, scaled, strict=True):
        own.scaled_up = up
    return each, down


def _columns(hidden: torch.Tensor, own: _Own) -> torch.Tensor:
    """Return a layer's columns of X Aᵀ or of its gradient."""
    rank = own.layer.rank
    return hidden if rank == hidden.shape[1] else hidden.narrow(1, own.first_column, rank)


def _factors(spec: Spec, *inputs: torch.Tensor | None) -> list[torch.Tensor]:
    """Return X, or its two factors, as matrices in the working dtype."""
    return [each.reshape(-1, each.shape[-1]).to(spec.working) for each in inputs if each is not None]


def _product(spec: Spec, factors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return X as a matrix in the working dtype."""
    return factors[0] if spec.gate is None else spec.gate.product(*factors)


def _adapters(
    each: Sequence[_Own], down: torch.Tensor | None, dtype: torch.dtype
) -> list[tuple[Adapter, torch.Tensor]]:
    """Return every adapter with its A in a dtype, in the order of X Aᵀ's columns; `down`: all A if rounded."""
    adapters = [adapter for own in each for adapter in own.layer.adapters]
    if down is None:
        downs: Sequence[torch.Tensor] = [part.to(dtype) for own in each for part in own.down]
    else:
        downs = _split(down, [adapter.rank for adapter in adapters], 0)
    return list(zip(adapters, downs, strict=True))


def _hidden(
    spec: Spec,
    x: torch.Tensor,
    first: torch.Tensor,
    each: Sequence[_Own],
    down: torch.Tensor | None,
) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """Return (X Aᵀ of all adapters side by side `[rows, rank]`, each adapter's dropout mask).

    `down`: all A; None if there are none or dropout gives adapters different X.
    """
    if down is not None and not spec.drops:
        hidden = x.new_empty(x.shape[0], down.shape[0])
        write_sums([Sum(hidden, ((x, down.t()),))], compiled=spec.compiled)
        return hidden, [None] * spec.adapters
    parts, masks = [], []
    for adapter, own in _adapters(each, down, x.dtype):
        kept, mask = drop(x, first, adapter.dropout)
        parts.append(kept @ own.t())
        masks.append(mask)
    return torch.cat(parts, dim=1) if parts else x.new_empty(x.shape[0], 0), masks


def _output(
    spec: Spec, own: _Own, x: torch.Tensor, hidden: torch.Tensor, products: list[_Product]
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return (Y; for DoRA the sum before the magnitude, row norms of W + s B A). Only DoRA's Y has values yet."""
    bias = None
    if own.biases:
        biases = [bias * scale for bias, scale in zip(own.biases, own.layer.biases, strict=True)]
        bias = sum(biases[1:], biases[0]).to(x.dtype)
    columns = shape_of(own.layer.base)[0]
    if own.magnitude is None:
        out = x.new_empty(x.shape[0], columns, dtype=spec.result)
        products.append(_Product(own, x, hidden, bias, out))
        return out, None, None
    y = x.new_empty(x.shape[0], columns)
    with ExitStack() as stack:
        weight = spec.weights.matrix(own.layer.base, x.dtype, stack, keep=spec.keep)
        norm = _row_norms(weight, own)
        product = _Product(own, x, hidden, None, y)
        write_sums([product.written_to(y, weight)], compiled=spec.compiled)
    scaled = y * (own.magnitude / norm)  # in float32, the magnitude's dtype
    return (scaled if bias is None else scaled + bias).to(spec.result), y, norm


def _write(spec: Spec, products: Sequence[_Product]) -> None:
    """Compute the outputs returned without values, in one call of the compiled loops if none is cast after."""
    if not spec.keep:
        whole = []
        for each in products:
            if spec.weights.in_4_bits(each.own.layer.base, each.x):
                _write_few(each)
            else:
                whole.append(each)
        products = whole
    cast = spec.result not in (spec.working, torch.float32)
    for group in [products] if spec.compiled and not cast else [[each] for each in products]:
        outs = [torch.empty_like(each.out, dtype=spec.working) if cast else each.out for each in group]
        with ExitStack() as stack:
            sums = (
                each.written_to(out, _weight(spec, each.own, stack, keep=spec.keep))
                for each, out in zip(group, outs, strict=True)
            )
            write_sums(sums, compiled=spec.compiled)
        if cast:
            group[0].out.copy_(outs[0])


def _write_few(product: _Product) -> None:
    """Compute few rows without backward by a packed weight; rounds the base's sum before adding the adapters'."""
    own = product.own
    base: Any = own.layer.base
    y = product_4bit(product.x, base.weight.data, quantization_state(base), product.bias)
    if own.scaled_up is not None:
        y = torch.addmm(y, _columns(product.hidden, own), own.scaled_up.t())
    product.out.copy_(y)


def _weight(spec: Spec, own: _Own, stack: ExitStack, *, keep: bool) -> torch.Tensor:
    """Return a layer's base weight, in scratch until the stack is closed or torch's operators have used it."""
    if not spec.compiled:
        stack.close()  # torch computes one product at a time, so one weight is in scratch
    return spec.weights.matrix(own.layer.base, spec.working, stack, keep=keep)


def _row_norms(weight: torch.Tensor, own: _Own) -> torch.Tensor:
    """Return ‖W + s B A‖ per row in float32 without the sum: ‖W‖² + 2 s (W Aᵀ)·B + s² (B A Aᵀ)·B is its square."""
    scale = own.layer.adapters[0].scale
    down, up = own.down[0].float(), own.up[0].float()
    across = (weight @ down.to(weight.dtype).t()).float()
    square = torch.linalg.vector_norm(weight, dim=1, dtype=torch.float32).square()
    inner = 2 * scale * across + scale * scale * (up @ (down @ down.t()))
    norms: torch.Tensor = (square + (inner * up).sum(1)).clamp_min(0).sqrt()
    return norms


def _through_output(
    own: _Own,
    rows: torch.Tensor,
    total: torch.Tensor | None,
    norm: torch.Tensor | None,
    found: list[torch.Tensor | None],
) -> torch.Tensor:
    """Return the gradient of X Wᵀ from Y's, and store those of this layer's biases and magnitude."""
    for index, (bias, scale) in enumerate(zip(own.biases, own.layer.biases, strict=True)):
        found[own.start + index] = (rows.sum(0, dtype=_summed(rows)) * scale).to(bias.dtype)
    if own.magnitude is None or norm is None or total is None:
        return rows
    d_magnitude = torch.linalg.vecdot(rows.float(), total.float(), dim=0) / norm
    found[own.start + own.layer.tensors - 1] = d_magnitude.to(own.magnitude.dtype)
    return (rows * (own.magnitude / norm)).to(total.dtype)


def _through_up(
    spec: Spec,
    arrived: Sequence[tuple[_Own, torch.Tensor]],
    hidden: torch.Tensor,
    d_hidden: torch.Tensor,
    found: list[torch.Tensor | None],
) -> None:
    """Store the gradients of all B, and write X Aᵀ's into `d_hidden`, from those of the products with each weight."""
    sums, places, summed = [], [], _summed(hidden)
    for own, rows in arrived:
        if own.scaled_up is None:
            continue
        sums.append(Sum(_columns(d_hidden, own), ((rows, own.scaled_up),)))
        through, mine = rows.t(), _columns(hidden, own)
        parts = _split(mine, own.layer.ranks, 1)
        for index, (part, up, scale) in enumerate(zip(parts, own.up, own.layer.scales, strict=True)):
            d_up = rows.new_empty(up.shape, dtype=summed)
            sums.append(Sum(d_up, ((through, part),), None, scale))
            places.append((own.first_pair + 2 * index + 1, d_up, up.dtype))
    write_sums(sums, compiled=spec.compiled)
    for place, d_up, dtype in places:
        found[place] = d_up.to(dtype)


def _split(x: torch.Tensor, sizes: Sequence[int], dim: int) -> Sequence[torch.Tensor]:
    return (x,) if len(sizes) == 1 else x.split_with_sizes(sizes, dim)


def _summed(x: torch.Tensor) -> torch.dtype:
    """Return the dtype in which products of such matrices are summed."""
    return torch.promote_types(x.dtype, torch.float32)


def _through_products(
    spec: Spec,
    arrived: Sequence[tuple[_Own, torch.Tensor]],
    down: torch.Tensor | None,
    d_hidden: torch.Tensor,
    x: torch.Tensor | None,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return (gradient of X, gradient of all A); None for one that is not requested.

    Args:
        arrived: the layers with the gradients of their products; empty if X needs no gradient.
        down: all A; None without adapters, or if dropout gives them different X.
        d_hidden: the gradient of X Aᵀ.
        x: None if the gradient of A is computed later.
    """
    sums, d_x, d_down = [], None, None
    with ExitStack() as stack:
        if arrived:
            rows = arrived[0][1]
            small = () if down is None else ((d_hidden, down),)
            terms = ((grad, _weight(spec, own, stack, keep=True)) for own, grad in arrived)
            d_x = rows.new_empty(rows.shape[0], shape_of(spec.layers[0].base)[1])
            sums.append(Sum(d_x, chain(small, terms)))
        if x is not None and down is not None:
            d_down = x.new_empty(down.shape, dtype=_summed(x))
            sums.append(Sum(d_down, ((d_hidden.t(), x),)))
        write_sums(sums, compiled=spec.compiled)
    return d_x, d_down


def _through_down(
    spec: Spec,
    each: Sequence[_Own],
    x: torch.Tensor,
    masks: Sequence[torch.Tensor | None],
    d_hidden: torch.Tensor,
    d_down: torch.Tensor | None,
    found: list[torch.Tensor | None],
) -> None:
    """Store the gradient of each A: rows of `d_down`, or with separate dropout masks from X Aᵀ's gradient."""
    places = [own.first_pair + 2 * index for own in each for index in range(len(own.down))]
    if not places:
        return
    adapters = [adapter for own in each for adapter in own.layer.adapters]
    downs = [down for own in each for down in own.down]
    whole, dim = (d_hidden, 1) if d_down is None else (d_down, 0)
    parts = _split(whole, [adapter.rank for adapter in adapters], dim)
    for place, part, down, adapter, mask in zip(places, parts, downs, adapters, masks, strict=True):
        each_down = part
        if d_down is None:
            each_down = x.new_empty(down.shape, dtype=_summed(x))
            kept = dropped(x, mask, adapter.dropout)
            write_sums([Sum(each_down, ((part.t(), kept),))], compiled=spec.compiled)
        found[place] = each_down.to(down.dtype)


def _through_input(
    ctx: Any, d_x: torch.Tensor | None, factors: Sequence[torch.Tensor], x: torch.Tensor | None
) -> tuple[torch.Tensor, tuple[torch.Tensor | None, torch.Tensor | None]]:
    """Return (X, the inputs' gradients in their dtypes and shapes); `x` None: recompute it over its gradient."""
    spec, (dtype, other) = ctx.spec, ctx.dtypes
    if spec.gate is not None and d_x is not None:
        x, d_first, d_second = spec.gate.backward(d_x, *factors)
        return x, (d_first.view(ctx.shape).to(dtype), d_second.view(ctx.shape).to(other))
    assert x is not None, "only a gated product whose gradient is wanted is formed later"
    return x, (None if d_x is None else d_x.view(ctx.shape).to(dtype), None)

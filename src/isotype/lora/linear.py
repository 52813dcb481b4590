"""LoRA linear layers as one autograd function, for one layer or for several that read the same input.

For layers l with adapters a (`s` the scaling, `m` DoRA's magnitude, `‖·‖` the norm of each row):

    Y_l = X W_lᵀ + b_l + Σ_a s_a (drop_a(X) A_aᵀ) B_aᵀ                      LoRA, https://arxiv.org/abs/2106.09685
    Y_l = m ⊙ (X W_lᵀ + s (X Aᵀ) Bᵀ) / ‖W_l + s B A‖ + b_l                  DoRA, https://arxiv.org/abs/2402.09353

Every cast happens here, with autocast off: X once, the adapters' masters once, gradients of masters back to their own
dtype. The backward forms one gradient of X for all layers and one product for all A. The base weights are frozen, so
nothing is saved but X and the small X Aᵀ; where X is itself a gated product, its two factors are saved in its place.
What is saved is saved before Y is computed: gradient checkpointing, which computes a layer again for what it saves, stops
there, and the last product of a block is not computed twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from isotype.lora.gates import Gate
from isotype.lora.loops.products import Sum, write_sums
from isotype.lora.weights import DenseWeights, shape_of


@dataclass(frozen=True)
class Adapter:
    """One active adapter of a layer.

    Attributes:
        rank: r.
        scale: what its product is multiplied by: alpha / r, or alpha / sqrt(r) of rsLoRA.
        dropout: probability; 0 in evaluation.
        magnitude: whether it is DoRA's, which comes alone and without dropout.
    """

    rank: int
    scale: float
    dropout: float = 0.0
    magnitude: bool = False


@dataclass(frozen=True)
class Layer:
    """One linear layer: its frozen base, its biases and its active adapters.

    Attributes:
        base: the base layer, which holds the weight.
        biases: what each of its bias vectors is multiplied by: 1 for the base's, the scale for an adapter's.
        adapters: the active ones, in order.
    """

    base: nn.Module
    biases: tuple[float, ...] = ()
    adapters: tuple[Adapter, ...] = ()

    @property
    def rank(self) -> int:
        """Rank of all adapters together."""
        return sum(adapter.rank for adapter in self.adapters)

    @property
    def tensors(self) -> int:
        """How many tensors belong to it."""
        return len(self.biases) + sum(2 + adapter.magnitude for adapter in self.adapters)


@dataclass(frozen=True)
class Spec:
    """What one call computes.

    Attributes:
        layers: the layers that read the same input.
        weights: gives their base weights.
        working: dtype of the products: the compute dtype, or float32 where the device has no fast products in it.
        result: dtype of the outputs.
        gate: of an input that is a gated product of two tensors.
        keep: whether a backward will follow, see `DenseWeights.matrix`.
        compiled: whether compiled loops multiply, see `isotype.lora.loops.products`.
    """

    layers: tuple[Layer, ...]
    weights: DenseWeights
    working: torch.dtype
    result: torch.dtype
    gate: Gate | None = None
    keep: bool = True
    compiled: bool = False


def lora_linear(
    spec: Spec, inputs: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """The outputs of `spec.layers`, each `[…, out_features]` in `spec.result`.

    Args:
        spec: what to compute.
        inputs: X `[…, in_features]` in any float dtype; with a gate, its two factors.
        tensors: for each layer in turn its biases `[out]`, then for each adapter A `[r, in]` and B `[out, r]`, and
            last DoRA's magnitude `[out]`.
    """
    first, second = (*inputs, None)[:2]
    products: list[_Product] = []
    outputs: tuple[torch.Tensor, ...] = _LoraLinear.apply(spec, products, first, second, *tensors)  # type: ignore[no-untyped-call]
    with torch.no_grad(), torch.autocast(inputs[0].device.type, enabled=False):
        _write(spec, products)
    return outputs


@dataclass(frozen=True)
class _Product:
    """An output that was returned without its numbers, `out`: X Wᵀ + b + s (X Aᵀ) Bᵀ of one layer."""

    own: _Own
    x: torch.Tensor
    hidden: torch.Tensor
    bias: torch.Tensor | None
    out: torch.Tensor

    def written_to(self, out: torch.Tensor, weight: torch.Tensor) -> Sum:
        # The adapters' first: torch's operators would add it to a base that is rounded already, and it begins at zero.
        up, columns = self.own.scaled_up(self.x.dtype), self.own.columns
        small = ((self.hidden[:, columns], up.t()),) if up is not None else ()
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
        with torch.autocast(first.device.type, enabled=False):
            x = _rows(spec, first, second)
            each = tuple(_owned(spec, tensors))
            masks = tuple(_mask(adapter, x) for layer in spec.layers for adapter in layer.adapters)
            hidden = _hidden(spec, x, each, masks)
            done = [_output(spec, own, x, hidden, products) for own in each]
        outputs, totals, norms = zip(*done, strict=True)
        ctx.spec = spec
        ctx.shape, ctx.dtypes = first.shape, tuple(None if t is None else t.dtype for t in (first, second))
        factors = (x, None) if spec.gate is None else (first, second)
        ctx.save_for_backward(*factors, hidden, *masks, *totals, *norms, *tensors)
        return tuple(_shaped(output, first) for output in outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        spec: Spec = ctx.spec
        spec.weights.workspace.release_after_backward()
        first, second, hidden, *rest = ctx.saved_tensors
        adapters, layers = sum(len(layer.adapters) for layer in spec.layers), len(grads)
        masks, rest = rest[:adapters], rest[adapters:]
        totals, norms, tensors = rest[:layers], rest[layers : 2 * layers], rest[2 * layers :]
        found: dict[int, torch.Tensor] = {}
        arrived: list[tuple[_Own, torch.Tensor]] = []
        with torch.autocast(first.device.type, enabled=False):
            factors = _factors(spec, first, second)
            each = tuple(_owned(spec, tensors))
            for own, grad, total, norm in zip(each, grads, totals, norms, strict=True):
                if grad is not None:
                    rows = grad.reshape(-1, grad.shape[-1]).to(spec.working)
                    arrived.append((own, _through_output(own, rows, total, norm, found)))
            d_hidden = torch.empty_like(hidden) if len(arrived) == layers else torch.zeros_like(hidden)
            _through_up(spec, arrived, hidden, d_hidden, found)
            d_x = None
            if any(ctx.needs_input_grad[2:4]) and arrived:
                d_x = _input_gradient(spec, arrived, each, masks, d_hidden)
            x, d_inputs = _through_input(ctx, d_x, factors)
            _through_down(spec, each, x, masks, d_hidden, found)
        return None, None, *d_inputs, *(found.get(index) for index in range(len(tensors)))


@dataclass(frozen=True)
class _Own:
    """The tensors of one layer, where they are among all, and its adapters' columns in X Aᵀ."""

    layer: Layer
    start: int
    columns: slice
    biases: tuple[torch.Tensor, ...]
    down: tuple[torch.Tensor, ...]
    up: tuple[torch.Tensor, ...]
    magnitude: torch.Tensor | None

    def scaled_up(self, dtype: torch.dtype) -> torch.Tensor | None:
        """s B of all adapters side by side, `[out, rank]`; None without adapters."""
        if not self.up:
            return None
        parts = [b * adapter.scale for b, adapter in zip(self.up, self.layer.adapters, strict=True)]
        return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)).to(dtype)


def _owned(spec: Spec, tensors: Sequence[torch.Tensor]) -> Iterator[_Own]:
    starts = accumulate((layer.tensors for layer in spec.layers), initial=0)
    columns = accumulate((layer.rank for layer in spec.layers), initial=0)
    for layer, start, column in zip(spec.layers, starts, columns, strict=False):
        own = tuple(tensors[start : start + layer.tensors])
        biases, rest = own[: len(layer.biases)], own[len(layer.biases) :]
        pairs, last = rest[: 2 * len(layer.adapters)], rest[2 * len(layer.adapters) :]
        where = slice(column, column + layer.rank)
        yield _Own(layer, start, where, biases, pairs[::2], pairs[1::2], last[0] if last else None)


def _factors(spec: Spec, *inputs: torch.Tensor | None) -> list[torch.Tensor]:
    """X, or the two that it is the gated product of, as matrices in the working dtype."""
    return [each.reshape(-1, each.shape[-1]).to(spec.working) for each in inputs if each is not None]


def _rows(spec: Spec, *inputs: torch.Tensor | None) -> torch.Tensor:
    """X as a matrix in the working dtype."""
    factors = _factors(spec, *inputs)
    return factors[0] if spec.gate is None else spec.gate.product(*factors)


def _shaped(rows: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    # No view in autograd's eyes, which forbids writing into views that a function returns.
    made: torch.Tensor = torch.ops.aten._unsafe_view(rows, [*like.shape[:-1], rows.shape[-1]])
    return made


def _mask(adapter: Adapter, x: torch.Tensor) -> torch.Tensor | None:
    """What dropout leaves of X, as booleans; None where it drops nothing."""
    if not adapter.dropout:
        return None
    return torch.empty_like(x, dtype=torch.bool).bernoulli_(1 - adapter.dropout)


def _dropped(x: torch.Tensor, mask: torch.Tensor | None, adapter: Adapter) -> torch.Tensor:
    # A probability of 1 leaves nothing, and nothing to scale up.
    return x if mask is None else x * mask * (1 / max(1 - adapter.dropout, torch.finfo(x.dtype).tiny))


def _adapters(each: Sequence[_Own]) -> list[tuple[Adapter, torch.Tensor]]:
    """Every adapter with its A, in the order of the columns of X Aᵀ."""
    return [pair for own in each for pair in zip(own.layer.adapters, own.down, strict=True)]


def _stacked(each: Sequence[_Own], dtype: torch.dtype) -> torch.Tensor:
    """All A above one another, `[rank, in]`."""
    parts = [down for own in each for down in own.down]
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).to(dtype)


def _hidden(
    spec: Spec, x: torch.Tensor, each: Sequence[_Own], masks: Sequence[torch.Tensor | None]
) -> torch.Tensor:
    """X Aᵀ of all adapters side by side, `[rows, rank]`."""
    adapters = _adapters(each)
    if not any(mask is not None for mask in masks):
        hidden = x.new_empty(x.shape[0], sum(adapter.rank for adapter, _ in adapters))
        if adapters:
            write_sums([Sum(hidden, ((x, _stacked(each, x.dtype).t()),))], compiled=spec.compiled)
        return hidden
    parts = [
        _dropped(x, mask, adapter) @ down.to(x.dtype).t()
        for (adapter, down), mask in zip(adapters, masks, strict=True)
    ]
    return torch.cat(parts, dim=1)


def _output(
    spec: Spec, own: _Own, x: torch.Tensor, hidden: torch.Tensor, products: list[_Product]
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """(Y, and of DoRA: the sum before the magnitude, the norms of the rows of W + s B A). All but DoRA's Y is written later."""
    biases = [bias * scale for bias, scale in zip(own.biases, own.layer.biases, strict=True)]
    bias = sum(biases[1:], biases[0]).to(x.dtype) if biases else None
    columns = shape_of(own.layer.base)[0]
    if own.magnitude is None:
        out = x.new_empty(x.shape[0], columns, dtype=spec.result)
        products.append(_Product(own, x, hidden, bias, out))
        return out, None, None
    y = x.new_empty(x.shape[0], columns)
    with spec.weights.matrix(own.layer.base, x.dtype, keep=spec.keep) as weight:
        norm = _row_norms(weight, own)
        product = _Product(own, x, hidden, None, y)
        write_sums([product.written_to(y, weight)], compiled=spec.compiled)
    scaled = y * (own.magnitude / norm)  # in the magnitude's dtype: float32
    return (scaled if bias is None else scaled + bias).to(spec.result), y, norm


def _write(spec: Spec, products: Sequence[_Product]) -> None:
    """Write outputs that were returned without their numbers: all in one call of the compiled loops, where none is cast after."""
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


def _weight(spec: Spec, own: _Own, stack: ExitStack, *, keep: bool) -> torch.Tensor:
    """The base weight of a layer, in scratch until the stack is closed or torch's operators have multiplied by it."""
    if not spec.compiled:
        stack.close()  # torch takes one product after another: one weight at a time is in scratch
    return stack.enter_context(spec.weights.matrix(own.layer.base, spec.working, keep=keep))


def _row_norms(weight: torch.Tensor, own: _Own) -> torch.Tensor:
    """‖W + s B A‖ of each row in float32, without the sum: its square is ‖W‖² + 2 s (W Aᵀ)·B + s² (B A Aᵀ)·B."""
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
    found: dict[int, torch.Tensor],
) -> torch.Tensor:
    """From the gradient of Y to that of X Wᵀ, which is returned, and of this layer's biases and magnitude."""
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
    found: dict[int, torch.Tensor],
) -> None:
    """From the gradients of the products with each weight to those of all B and of X Aᵀ, which are written into `d_hidden`."""
    sums, places = [], []
    for own, rows in arrived:
        scaled_up = own.scaled_up(rows.dtype)
        if scaled_up is None:
            continue
        sums.append(Sum(d_hidden[:, own.columns], ((rows, scaled_up),)))
        ranks = [adapter.rank for adapter in own.layer.adapters]
        parts = torch.split(hidden[:, own.columns], ranks, dim=1)
        for index, (part, up, adapter) in enumerate(zip(parts, own.up, own.layer.adapters, strict=True)):
            d_up = rows.new_empty(up.shape, dtype=_summed(rows))
            sums.append(Sum(d_up, ((rows.t(), part),), factor=adapter.scale))
            places.append((_place(own, index) + 1, d_up, up.dtype))
    write_sums(sums, compiled=spec.compiled)
    for place, d_up, dtype in places:
        found[place] = d_up.to(dtype)


def _summed(x: torch.Tensor) -> torch.dtype:
    """The dtype in which products of such matrices are summed."""
    return torch.promote_types(x.dtype, torch.float32)


def _place(own: _Own, adapter: int) -> int:
    """Where A of a layer's adapter is among all tensors."""
    return own.start + len(own.biases) + 2 * adapter


def _input_gradient(
    spec: Spec,
    arrived: Sequence[tuple[_Own, torch.Tensor]],
    each: Sequence[_Own],
    masks: Sequence[torch.Tensor | None],
    d_hidden: torch.Tensor,
) -> torch.Tensor:
    """The gradient of X from those of the products with each weight and with all A."""
    adapters, rows = _adapters(each), arrived[0][1]
    dropped = any(mask is not None for mask in masks)
    small = [(d_hidden, _stacked(each, rows.dtype))] if adapters and not dropped else []
    d_x = rows.new_empty(rows.shape[0], shape_of(each[0].layer.base)[1])
    with ExitStack() as stack:
        terms = ((grad, _weight(spec, own, stack, keep=True)) for own, grad in arrived)
        write_sums([Sum(d_x, chain(small, terms))], compiled=spec.compiled)
    if dropped:
        parts = torch.split(d_hidden, [adapter.rank for adapter, _ in adapters], dim=1)
        for part, (adapter, down), mask in zip(parts, adapters, masks, strict=True):
            d_x.add_(_dropped(part @ down.to(part.dtype), mask, adapter))
    return d_x


def _through_down(
    spec: Spec,
    each: Sequence[_Own],
    x: torch.Tensor,
    masks: Sequence[torch.Tensor | None],
    d_hidden: torch.Tensor,
    found: dict[int, torch.Tensor],
) -> None:
    """From the gradient of X Aᵀ to those of all A."""
    adapters = _adapters(each)
    places = [_place(own, index) for own in each for index in range(len(own.down))]
    ranks = [adapter.rank for adapter, _ in adapters]
    if any(mask is not None for mask in masks):
        parts = torch.split(d_hidden, ranks, dim=1)
        for place, part, (adapter, down), mask in zip(places, parts, adapters, masks, strict=True):
            found[place] = (part.t() @ _dropped(x, mask, adapter)).to(down.dtype)
    elif adapters:
        d_down = x.new_empty(sum(ranks), x.shape[1], dtype=_summed(x))
        write_sums([Sum(d_down, ((d_hidden.t(), x),))], compiled=spec.compiled)
        for place, part, (_, down) in zip(places, torch.split(d_down, ranks), adapters, strict=True):
            found[place] = part.to(down.dtype)


def _through_input(
    ctx: Any, d_x: torch.Tensor | None, factors: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, tuple[torch.Tensor | None, torch.Tensor | None]]:
    """(X, the gradients of the inputs in their own dtypes and shapes); that of X, a gated product, is written over."""
    spec, (dtype, other) = ctx.spec, ctx.dtypes
    if spec.gate is None:
        return factors[0], (None if d_x is None else d_x.view(ctx.shape).to(dtype), None)
    if d_x is None:
        return spec.gate.product(*factors), (None, None)
    x, d_first, d_second = spec.gate.backward(d_x, *factors)
    return x, (d_first.view(ctx.shape).to(dtype), d_second.view(ctx.shape).to(other))

"""Computes the experts of one layer and their LoRA adapters in one autograd function.

Each token t goes to experts e with the routing weights w. Each product has adapters a with scaling s and dropout drop:

    h = x U_e + b_e + Σ_a s_a (drop_a(x) A_ae) B_ae          gate and up side by side, or up alone
    y = g(h) V_e + c_e + Σ_a s_a (drop_a(g(h)) A'_ae) B'_ae    g: the gated product, or the activation
    out_t = Σ_e w_te y_te

Tokens are sorted by expert once. Activations are multiplied by A and then by B. The weight delta of an adapter is never
computed. Only the weights of experts with tokens are read, a few experts at a time.

The forward saves x, h and the small products with A. The backward computes g(h) and the dropout masks again, but not y.
With V' for V and its adapters, y = g(h) V' + c. The gradient of w is ∂L/∂w = ⟨∂L/∂out, y⟩ = ⟨∂L/∂out V'ᵀ, g(h)⟩ +
⟨∂L/∂out, c⟩.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional

from isotype.compat.torch import FakeTensor
from isotype.core.dtypes import NoAutocast
from isotype.model.repeated_layers import representing
from isotype.precision.devices.simulated import device_type_of

_DENSE_BYTES = 1 << 27
"""Maximum bytes of the weights of quantized experts that are dense at a time."""
_ROWS = 512
"""Rows of a grouped product on a CPU. With fewer rows, the calls take too long. More rows do not fit into the caches."""


@dataclass(frozen=True)
class Adapter:
    """An active adapter: its scale (alpha / r, or alpha / sqrt(r) for rsLoRA) and its dropout rate (0 in evaluation)."""

    scale: float
    dropout: float = 0.0


@dataclass(frozen=True)
class Product:
    """A product that every expert computes.

    Attributes:
        weights: function of (start, stop) that returns the dense weights `[stop - start, d1, d2]` of these experts.
        inputs_first: True for weights `[experts, in, out]` (x W), False for weights `[experts, out, in]` (x Wᵀ).
        bytes: size of an expert's dense weight if weights are quantized, else 0.
        bias: the frozen bias `[experts, out]`, or None.
        sizes: d1 and d2 if the weights are quantized; empty for other weights.
    """

    weights: Callable[[int, int], torch.Tensor]
    inputs_first: bool
    adapters: tuple[Adapter, ...] = ()
    bytes: int = 0
    bias: torch.Tensor | None = None
    sizes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Experts:
    """The experts of one call of `experts_output`.

    Attributes:
        up, down: `up` is the product with the gate and up weights, `down` the product with the down weights.
        gate: the activation or gated product, a function of h `[rows, …]`.
        working: dtype in which products are computed.
        normed: norm of the outputs of the experts `[rows, out]` before they are multiplied by routing weights; None without a
            norm.
    """

    up: Product
    down: Product
    gate: Callable[[torch.Tensor], torch.Tensor]
    compute: torch.dtype
    working: torch.dtype
    count: int
    normed: Callable[[torch.Tensor], torch.Tensor] | None = None

    @property
    def summed(self) -> torch.dtype:
        """The dtype in which the outputs of a token's experts are summed."""
        return torch.promote_types(self.working, torch.float32)


def experts_output(
    spec: Experts,
    x: torch.Tensor,
    index: torch.Tensor,
    scores: torch.Tensor | None,
    factors: Sequence[torch.Tensor],
) -> torch.Tensor:
    """Return the weighted sum of each token's experts, `[tokens, out]` in the dtype of `x`.

    Args:
        x: `[tokens, in]`, any float dtype.
        index: the numbers of each token's experts, integers `[tokens, k]`. The value `spec.count` and larger numbers mean no
            expert.
        scores: `[tokens, k]` routing weights in any float dtype; None if all weights are 1.
        factors: A `[experts, in, r]` and B `[experts, r, out]` of each adapter, in any float dtype and layout. The adapters of
            `up` come first, and then the adapters of `down`.
    """
    saves = torch.is_grad_enabled()
    # Gradient checkpointing restores the CPU's generator. Its state is read without waiting for the device.
    drops = any(adapter.dropout for adapter in (*spec.up.adapters, *spec.down.adapters))
    seed = int(torch.randint(2**31, ()).item()) if drops else 0
    result: torch.Tensor = _Experts.apply(spec, saves, seed, x, index, scores, *factors)  # type: ignore[no-untyped-call]
    return result


@dataclass(frozen=True)
class _Group:
    """The experts `first` to `stop - 1`, with their rows `begin` to `end - 1`. All rows are sorted by expert.

    `offsets` (int32) contains the ends of the rows of each expert, counted from `begin`; None for a single expert. In a
    trace, the group represents `times` groups of equal size.
    """

    first: int
    stop: int
    begin: int
    end: int
    offsets: torch.Tensor | None = None
    times: int = 1

    @property
    def experts(self) -> slice:
        return slice(self.first, self.stop)

    def product(self, rows: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
        """Multiply each row in `rows` `[n, in]` by its expert's matrix in `matrices` `[experts, in, out]`."""
        if self.offsets is None:
            return rows @ matrices[0]
        return functional.grouped_mm(rows, matrices, offs=self.offsets)

    def write_outer(self, out: torch.Tensor | None, left: torch.Tensor, right: torch.Tensor) -> None:
        """For each expert, write leftᵀ @ right of the expert's rows into `out` `[experts of the layer, in, out]`."""
        if out is None:
            return
        if self.offsets is not None:
            out[self.experts] = functional.grouped_mm(left.t(), right, offs=self.offsets)
        elif out.dtype == left.dtype:
            torch.mm(left.t(), right, out=out[self.first])
        else:
            out[self.first] = left.t() @ right

    def each_row(self, per_expert: torch.Tensor) -> torch.Tensor:
        """Return the vector in `per_expert` of the expert of each row, `[n, out]`; `[1, out]` for a single expert."""
        vectors = per_expert[self.experts]
        if self.offsets is None:
            return vectors
        sizes = torch.diff(self.offsets, prepend=self.offsets.new_zeros(1))
        return vectors.repeat_interleave(sizes, dim=0, output_size=self.end - self.begin)


def _sorted(
    spec: Experts, x: torch.Tensor, index: torch.Tensor, factors: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, list[_Group]]:
    """Return (order of the flattened `index` by expert, groups of experts that are computed together)."""
    flat = index.reshape(-1)
    order = torch.argsort(flat, stable=True)
    if without_values := isinstance(x, FakeTensor) or x.is_meta:
        share, more = divmod(flat.numel(), spec.count)  # as if the router were balanced
        counts = [share + (expert < more) for expert in range(spec.count)]
    else:
        counts = torch.bincount(flat, minlength=spec.count)[: spec.count].tolist()
    groups = list(_groups(counts, _together(spec, x, sum(counts), factors)))
    chosen = _representatives(groups) if without_values else groups
    return order, [_with_offsets(group, counts, x.device) for group in chosen]


def _representatives(groups: Sequence[_Group]) -> Iterator[_Group]:
    """Yield the first group, and then one group for each run of groups with equal numbers of experts and rows."""
    yield from groups[:1]
    for _, run in groupby(groups[1:], lambda group: (group.stop - group.first, group.end - group.begin)):
        same = list(run)
        yield replace(same[0], times=len(same))


def _together(spec: Experts, x: torch.Tensor, rows: int, factors: Sequence[torch.Tensor]) -> int:
    if x.is_meta or not _can_be_grouped(spec, x, factors):
        return 1
    stored = max(spec.up.bytes, spec.down.bytes)
    most = max(1, _DENSE_BYTES // stored) if stored else spec.count
    on_cpu = device_type_of(x) == "cpu"
    return min(most, max(1, _ROWS * spec.count // max(1, rows))) if on_cpu else most


_ALIGNED = 8
"""Strides in torch's grouped product are multiples of this number of 16-bit values (16 bytes)."""


def _can_be_grouped(spec: Experts, x: torch.Tensor, factors: Sequence[torch.Tensor]) -> bool:
    """Return True if torch's grouped product accepts these operands: sizes are aligned, and no operand is float64."""
    sizes = [x.shape[1], *(size for factor in factors for size in factor.shape[1:])]
    for product in (spec.up, spec.down):
        sizes += product.sizes or product.weights(0, 1).shape[1:]
    return spec.working.itemsize <= 4 and not any(size % _ALIGNED for size in sizes)


def _groups(counts: Sequence[int], together: int) -> Iterator[_Group]:
    """Yield groups of up to `together` experts. Experts without rows are omitted. `counts`: number of rows of each expert."""
    ends = [0, *accumulate(counts)]
    for first in range(0, len(counts), together):
        stop = min(first + together, len(counts))
        if ends[first] < ends[stop]:
            yield _Group(first, stop, ends[first], ends[stop])


def _with_offsets(group: _Group, counts: Sequence[int], device: torch.device) -> _Group:
    if group.stop - group.first == 1:
        return group
    with representing(group.times):
        ends = torch.tensor(list(accumulate(counts[group.experts])), dtype=torch.int32)
        return replace(group, offsets=ends.to(device, non_blocking=True))


@dataclass(frozen=True)
class _Low:
    """An adapter of one product, with A `[experts, in, r]` and B `[experts, r, out]` in the working dtype.

    A backward writes the gradients of A and B into `d_a` and `d_b`. These are None if the gradients are not needed.
    """

    scale: float
    dropout: float
    a: torch.Tensor
    b: torch.Tensor
    seed: int
    d_a: torch.Tensor | None = None
    d_b: torch.Tensor | None = None

    def dropped(self, rows: torch.Tensor, group: _Group) -> torch.Tensor:
        """Apply the adapter's dropout to a group's rows, or to their gradient in the backward."""
        if not self.dropout:
            return rows
        generator = torch.Generator(rows.device)
        generator.manual_seed(self.seed + group.first)
        mask = torch.empty_like(rows).bernoulli_(1 - self.dropout, generator=generator)
        return rows * mask.div_(max(1 - self.dropout, torch.finfo(rows.dtype).tiny))


@dataclass(frozen=True)
class _Adapted:
    """A product and its adapters, for the rows of one group at a time."""

    product: Product
    lows: Sequence[_Low]
    working: torch.dtype

    def matrices(self, group: _Group) -> torch.Tensor:
        """Return the dense weights `[experts of the group, in, out]`."""
        dense = self.product.weights(group.first, group.stop).to(self.working)
        return dense if self.product.inputs_first else dense.transpose(1, 2)

    def hidden(self, rows: torch.Tensor, group: _Group) -> list[torch.Tensor]:
        """Return drop(rows) @ A of each adapter, `[n, r]`."""
        return [group.product(low.dropped(rows, group), low.a[group.experts]) for low in self.lows]

    def output(self, rows: torch.Tensor, hidden: Sequence[torch.Tensor], group: _Group) -> torch.Tensor:
        """Return rows times weights with bias and adapters, `[n, out]`."""
        out = group.product(rows, self.matrices(group))
        if self.product.bias is not None:
            out.add_(group.each_row(self.product.bias).to(out.dtype))
        for low, small in zip(self.lows, hidden, strict=True):
            if group.offsets is None:
                out.addmm_(small, low.b[group.first], alpha=low.scale)
            else:
                out.add_(group.product(small, low.b[group.experts]), alpha=low.scale)
        return out

    def through(
        self,
        rows: torch.Tensor,
        hidden: Sequence[torch.Tensor],
        d_out: torch.Tensor,
        group: _Group,
        weight: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the gradient of the rows. Write the gradients of A and B, multiplied by `weight` if it is not None."""
        d_rows = group.product(d_out, self.matrices(group).transpose(1, 2))
        for low, small in zip(self.lows, hidden, strict=True):
            d_small = group.product(d_out, low.b[group.experts].transpose(1, 2)).mul_(low.scale)
            d_rows.add_(low.dropped(group.product(d_small, low.a[group.experts].transpose(1, 2)), group))
            scaled = small * (low.scale if weight is None else low.scale * weight)
            d_small = d_small if weight is None else d_small * weight
            group.write_outer(low.d_a, low.dropped(rows, group), d_small.to(rows.dtype))
            group.write_outer(low.d_b, scaled.to(d_out.dtype), d_out)
        return d_rows


def _as_matrices(factor: torch.Tensor) -> torch.Tensor:
    """Return a factor `[experts, m, n]` in a memory layout that matrix products can read. It is copied only if necessary."""
    if 1 in factor.stride()[1:]:
        return factor
    rows_first = factor.stride(1) >= factor.stride(2)
    turned = factor if rows_first else factor.mT
    # Experts may be innermost in memory, as in PEFT's lora_B. Then torch copies one transposed matrix, block by block.
    matrices = turned.flatten(1).contiguous().view(turned.shape)
    return matrices if rows_first else matrices.mT


def _gradient_of(factor: torch.Tensor) -> torch.Tensor:
    """Return zeros for the gradient of a factor, in the memory layout of `_as_matrices`."""
    rows_first = factor.stride(1) >= factor.stride(2)
    return factor.new_zeros(factor.shape) if rows_first else factor.new_zeros(factor.mT.shape).mT


def _adapted(
    spec: Experts, factors: Sequence[torch.Tensor], seed: int, needed: Sequence[bool] = ()
) -> tuple[_Adapted, _Adapted]:
    """Return the up and the down product with their adapters. `needed`: True for each factor that needs a gradient."""
    lows = []
    for number, adapter in enumerate((*spec.up.adapters, *spec.down.adapters)):
        pair = slice(2 * number, 2 * number + 2)
        a, b = (_as_matrices(factor.to(spec.working)) for factor in factors[pair])
        pairs = zip(factors[pair], needed[pair], strict=False)
        gradients = [_gradient_of(factor) if need else None for factor, need in pairs]
        lows.append(_Low(adapter.scale, adapter.dropout, a, b, seed + number * spec.count, *gradients))
    ups = len(spec.up.adapters)
    return _Adapted(spec.up, lows[:ups], spec.working), _Adapted(spec.down, lows[ups:], spec.working)


def _weights(spec: Experts, scores: torch.Tensor | None, order: torch.Tensor) -> torch.Tensor | None:
    return None if scores is None else scores.reshape(-1)[order].to(spec.summed)[:, None]


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        spec: Experts,
        saves: bool,
        seed: int,
        x: torch.Tensor,
        index: torch.Tensor,
        scores: torch.Tensor | None,
        *factors: torch.Tensor,
    ) -> torch.Tensor:
        with NoAutocast(x.device.type):
            order, groups = _sorted(spec, x, index, factors)
            up, down = _adapted(spec, factors, seed)
            tokens, weights = order // index.shape[-1], _weights(spec, scores, order)
            out: torch.Tensor | None = None
            saved: list[torch.Tensor] = []
            others: list[torch.Tensor] = []
            for group in groups:
                if saves and group.times > 1:  # memory that the represented groups would save
                    rows_of_others = (group.times - 1) * (group.end - group.begin)
                    step = 1 + len(up.lows) + len(down.lows)
                    others += [t.new_empty(rows_of_others, *t.shape[1:]) for t in saved[:step]]
                with representing(group.times):
                    at = tokens[group.begin : group.end]
                    rows = x[at].to(spec.working)
                    hidden = up.hidden(rows, group)
                    h = up.output(rows, hidden, group).to(spec.compute)
                    a = spec.gate(h).to(spec.working)
                    small = down.hidden(a, group)
                    y = down.output(a, small, group)
                    if spec.normed is not None:
                        y = spec.normed(y.to(spec.compute))
                    y = y.to(spec.summed)
                    if out is None:
                        out = y.new_zeros(x.shape[0], y.shape[1])
                    out.index_add_(0, at, y if weights is None else y * weights[group.begin : group.end])
                    if saves:
                        saved += [h, *hidden, *small]
            ctx.spec, ctx.seed, ctx.groups, ctx.k = spec, seed, groups, index.shape[-1]
            ctx.shape = None if scores is None else scores.shape
            ctx.save_for_backward(x, order, scores, *factors, *saved, *others)
            return (x.new_zeros(x.shape) if out is None else out).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: torch.Tensor) -> tuple[Any, ...]:
        spec: Experts = ctx.spec
        x, order, scores, *rest = ctx.saved_tensors
        adapters = len(spec.up.adapters) + len(spec.down.adapters)
        factors, saved = rest[: 2 * adapters], rest[2 * adapters :]
        with NoAutocast(x.device.type):
            up, down = _adapted(spec, factors, ctx.seed, ctx.needs_input_grad[6:])
            tokens, weights = order // ctx.k, _weights(spec, scores, order)
            d_weights = None if weights is None else weights.new_zeros(order.shape)
            d_x = x.new_zeros(x.shape, dtype=spec.summed) if ctx.needs_input_grad[3] else None
            step = 1 + adapters
            for number, group in enumerate(ctx.groups):
                with representing(group.times):
                    h, *hidden = saved[number * step : (number + 1) * step]
                    small = hidden[len(up.lows) :]
                    rows_of_group = slice(group.begin, group.end)
                    at = tokens[rows_of_group]
                    d_y = d_out[at]
                    weight = None if weights is None else weights[rows_of_group]
                    with torch.enable_grad():
                        leaf = h.detach().requires_grad_()
                        gated = spec.gate(leaf)
                    a = gated.detach().to(spec.working)
                    if spec.normed is not None:
                        d_y, d_weight = _through_norm(spec, down.output(a, small, group), d_y, weight)
                        d_a = down.through(a, small, d_y, group)
                    else:
                        d_y = d_y.to(spec.working)
                        d_a, d_weight = down.through(a, small, d_y, group, weight), None
                        if weight is not None:
                            d_weight = _gradient_of_weight(spec, a, d_a, d_y, group)
                            d_a = d_a * weight.to(d_a.dtype)
                    if d_weights is not None and d_weight is not None:
                        d_weights[rows_of_group] = d_weight
                    (d_h,) = torch.autograd.grad(gated, leaf, d_a.to(gated.dtype))
                    d_h = d_h.to(spec.working)
                    rows = x[at].to(spec.working)
                    d_rows = up.through(rows, hidden[: len(up.lows)], d_h, group)
                    if d_x is not None:
                        d_x.index_add_(0, at, d_rows.to(spec.summed))
        d_scores = None
        if d_weights is not None and ctx.needs_input_grad[5]:
            flat = torch.empty_like(d_weights)
            flat[order] = d_weights
            d_scores = flat.view(ctx.shape).to(scores.dtype)
        gradients = (gradient for low in (*up.lows, *down.lows) for gradient in (low.d_a, low.d_b))
        return None, None, None, None if d_x is None else d_x.to(x.dtype), None, d_scores, *gradients


def _gradient_of_weight(
    spec: Experts, a: torch.Tensor, d_a: torch.Tensor, d_y: torch.Tensor, group: _Group
) -> torch.Tensor:
    """Return the gradient of the routing weights w. `d_y`: gradient of w · y; `d_a`: gradient of w · g(h)."""
    d_weight = (d_a.to(spec.summed) * a).sum(1)
    if spec.down.bias is not None:
        d_weight += (d_y.to(spec.summed) * group.each_row(spec.down.bias)).sum(1)
    return d_weight


def _through_norm(
    spec: Experts, y: torch.Tensor, d_out: torch.Tensor, weight: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the gradients of y, which the norm gets, and of the routing weights."""
    assert spec.normed is not None
    with torch.enable_grad():
        leaf = y.to(spec.compute).detach().requires_grad_()
        normed = spec.normed(leaf)
    d_normed = d_out if weight is None else d_out * weight.to(d_out.dtype)
    (d_y,) = torch.autograd.grad(normed, leaf, d_normed.to(normed.dtype))
    d_weight = None if weight is None else (d_out.to(spec.summed) * normed.detach()).sum(1)
    return d_y.to(spec.working), d_weight

"""Computes one LoRA linear layer, or several with the same input, in one autograd function.

For layers l with adapters a (`s` is the scaling, `m` the magnitude of DoRA, `‖·‖` the norm of each row):

    Y_l = X W_lᵀ + b_l + Σ_a s_a (drop_a(X) A_aᵀ) B_aᵀ                      LoRA, https://arxiv.org/abs/2106.09685
    Y_l = m ⊙ (X W_lᵀ + s (X Aᵀ) Bᵀ) / ‖W_l + s B A‖ + b_l                  DoRA, https://arxiv.org/abs/2402.09353

The function turns autocast off, and casts X, the adapters' weights and the gradients of these weights only once. The
backward computes one gradient of X for all layers, and all gradients of A in one product. Base weights are frozen, so
the function saves only X and the small X Aᵀ. If X is a gated product, its two factors are saved instead of X. All
tensors are saved before Y is computed. Gradient checkpointing stops a recomputation after the last saved tensor.
Therefore Y is not computed again for the last layer of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from isotype.compat.bitsandbytes import product_4bit
from isotype.compat.torch import UNNAMED_VIEW
from isotype.core.dtypes import NoAutocast
from isotype.lora import kernels
from isotype.lora.adapted import Adapter, Layer
from isotype.lora.gates import Gate
from isotype.lora.loops.products import Sum, write_sums
from isotype.lora.weights import DenseWeights, Pairs, rounded, shape_of, split
from isotype.model.quantized import quantization_state
from isotype.precision.devices.simulated import device_type_of

_aten = torch.ops.aten


@dataclass(frozen=True)
class Spec:
    """The settings of a call for layers with the same input X.

    Attributes:
        working: dtype of the products: the compute dtype, or float32 if the device emulates the compute dtype.
        gate: computes X if X is a gated product of two tensors; else None.
        keep: True if a backward may follow. If False, packed 4-bit weights may be multiplied without dequantization.
        compiled: True if compiled loops compute the products (see `isotype.lora.loops.products`).
    """

    layers: tuple[Layer, ...]
    weights: DenseWeights
    working: torch.dtype
    result: torch.dtype
    gate: Gate | None = None
    keep: bool = True
    compiled: bool = False

    @property
    def drops(self) -> bool:
        """True if an adapter has dropout. Each adapter then has its own input."""
        return any(map(attrgetter("drops"), self.layers))

    @property
    def adapters(self) -> list[Adapter]:
        return [adapter for layer in self.layers for adapter in layer.adapters]


def drop(
    x: torch.Tensor, source: torch.Tensor, probability: float
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return (X after dropout and its scaling, the bool mask `[rows, in]`). Without dropout, return (X, None).

    On a CPU the random mask has the memory layout of `source`, as in `nn.Dropout`, even if `source` is transposed.

    Args:
        x: X as a matrix `[rows, in]` in the dtype of the products.
        source: X before it was flattened and cast, in any layout.
    """
    if not probability:
        return x, None
    if device_type_of(x) in kernels.DEVICES:
        kept, mask = _aten.native_dropout(x, probability, True)
        return kept, mask
    drawn = torch.empty_like(source, dtype=torch.bool).bernoulli_(1 - probability)
    mask = drawn.reshape(-1, source.shape[-1])
    return dropped(x, mask, probability), mask


def dropped(x: torch.Tensor, mask: torch.Tensor | None, probability: float) -> torch.Tensor:
    """Return `x` multiplied by a dropout mask and by 1 / (1 - probability). `x` is X or the gradient of X."""
    if mask is None:
        return x
    # With a probability of 1 every value is dropped; the scale only has to be finite.
    scale = 1 / max(1 - probability, torch.finfo(x.dtype).tiny)
    if device_type_of(x) in kernels.DEVICES:
        result: torch.Tensor = _aten.native_dropout_backward(x, mask, scale if probability < 1 else 0.0)
        return result
    return x * mask * scale


def lora_linear(
    spec: Spec, inputs: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """Return the outputs of `spec.layers`, each `[…, out_features]` in the dtype `spec.result`.

    Args:
        inputs: X `[…, in_features]` in any float dtype, or the two factors of X if X is a gated product.
        tensors: the tensors of all layers. For each layer, these are its biases `[out]`, A `[r, in]` and B `[out, r]` of each
            adapter, and DoRA's magnitude `[out]`.
    """
    first, second = (*inputs, None)[:2]
    products: list[_Product] = []
    outputs: tuple[torch.Tensor, ...] = _LoraLinear.apply(spec, products, first, second, *tensors)  # type: ignore[no-untyped-call]
    with torch.no_grad(), NoAutocast(inputs[0].device.type):
        _write(spec, products)
    return outputs


class _Product(NamedTuple):
    """The output `out` = X Wᵀ + b + s (X Aᵀ) Bᵀ of a layer, which is not computed yet, and the operands to compute it."""

    layer: _LayerTensors
    x: torch.Tensor
    hidden: torch.Tensor
    bias: torch.Tensor | None
    out: torch.Tensor

    def written_to(self, out: torch.Tensor, weight: torch.Tensor) -> Sum:
        # The adapters' product first: torch's operators would add it to an already rounded base product.
        up = self.layer.scaled_up
        small = () if up is None else ((self.layer.columns(self.hidden), up.t()),)
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
            # With dropout, a CPU rounds every A separately, so that an A in the working dtype is not copied.
            layers = _layers_of(spec, tensors)
            pairs = [layer.pairs for layer in layers]
            down, scaled = rounded(
                pairs, spec.working, stacked=not (spec.drops and device_type_of(first) == "cpu")
            )
            for layer, up in zip(layers, scaled, strict=True):
                layer.scaled_up = up
            hidden, masks = _hidden(spec, x, first, layers, down)
            results = [_output(spec, layer, x, hidden, products) for layer in layers]
        outputs, totals, norms = zip(*results, strict=True)
        ctx.spec, ctx.shape = spec, first.shape
        ctx.dtypes = first.dtype, None if second is None else second.dtype
        factors = (x, None) if spec.gate is None else (first, second)
        ctx.save_for_backward(*factors, hidden, down, *scaled, *totals, *norms, *tensors, *masks)
        leading = first.shape[:-1]
        # Autograd must not see views: it forbids writing into views that a function returns.
        return tuple([UNNAMED_VIEW(rows, (*leading, rows.shape[-1])) for rows in outputs])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        spec: Spec = ctx.spec
        first, second, hidden, down, *saved = ctx.saved_tensors
        count, adapters = len(grads), len(spec.adapters)
        scaled, totals, norms = saved[:count], saved[count : 2 * count], saved[2 * count : 3 * count]
        tensors, masks = saved[3 * count : len(saved) - adapters], saved[len(saved) - adapters :]
        output_grads: list[tuple[_LayerTensors, torch.Tensor]] = []
        with NoAutocast(first.device.type):
            factors = _factors(spec, first, second)
            layers = _layers_of(spec, tensors)
            for layer, up, grad, total, norm in zip(layers, scaled, grads, totals, norms, strict=True):
                layer.scaled_up = up
                if grad is not None:
                    rows = grad.reshape(-1, grad.shape[-1]).to(spec.working)
                    output_grads.append((layer, _through_output(layer, rows, total, norm)))
            d_hidden = (
                torch.empty_like(hidden) if len(output_grads) == len(grads) else torch.zeros_like(hidden)
            )
            _through_up(spec, output_grads, hidden, d_hidden)
            wanted = any(ctx.needs_input_grad[2:4]) and bool(output_grads)
            # The gated product is recomputed together with the gradients of the two factors.
            x = None if wanted and spec.gate is not None else _product(spec, factors)
            whole = None if spec.drops else down
            d_x, d_down = _through_products(spec, output_grads if wanted else (), whole, d_hidden, x)
            if d_x is not None and spec.drops:  # each adapter has a dropout mask
                downs = _downs(spec, layers, down, d_hidden.dtype)
                for adapter, part, a, mask in zip(
                    spec.adapters, _of_each(spec, d_hidden, 1), downs, masks, strict=True
                ):
                    d_x.add_(dropped(part @ a, mask, adapter.dropout))
            x, d_inputs = _through_input(ctx, d_x, factors, x)
            del d_x, factors, output_grads  # copies in the working dtype, no longer needed
            if d_down is None:
                _, d_down = _through_products(spec, (), whole, d_hidden, x)
            _through_down(spec, layers, x, masks, d_hidden, d_down)
        return None, None, *d_inputs, *chain.from_iterable([layer.gradients for layer in layers])


@dataclass(slots=True)
class _LayerTensors:
    """The tensors of one layer, and their gradients.

    Attributes:
        first_column: index of the first column that the layer's adapters have in the matrix X Aᵀ.
        gradients: gradients of the biases, of A and B of each adapter, and of DoRA's magnitude.
        scaled_up: s B of all adapters, concatenated to `[out, rank]` in the working dtype; None without adapters.
    """

    spec: Layer
    first_column: int
    biases: Sequence[torch.Tensor]
    pairs: Pairs
    magnitude: torch.Tensor | None
    gradients: list[torch.Tensor | None]
    scaled_up: torch.Tensor | None = None

    def columns(self, hidden: torch.Tensor) -> torch.Tensor:
        rank = self.spec.rank
        return hidden if rank == hidden.shape[1] else hidden.narrow(1, self.first_column, rank)


def _layers_of(spec: Spec, tensors: Sequence[torch.Tensor]) -> list[_LayerTensors]:
    """Split the flat list of tensors among the layers. `scaled_up` and `gradients` are set later."""
    layers, start, column = [], 0, 0
    for layer in spec.layers:
        pair = start + len(layer.biases)
        end = last = pair + 2 * len(layer.adapters)
        pairs = Pairs(tensors[pair:last:2], tensors[pair + 1 : last : 2], layer.scales)
        magnitude = None
        if layer.adapters and layer.adapters[0].magnitude:
            magnitude, end = tensors[last], last + 1
        gradients: list[torch.Tensor | None] = [None] * (end - start)
        layers.append(_LayerTensors(layer, column, tensors[start:pair], pairs, magnitude, gradients))
        start = end
        column += layer.rank
    return layers


def _factors(spec: Spec, *inputs: torch.Tensor | None) -> list[torch.Tensor]:
    return [x.reshape(-1, x.shape[-1]).to(spec.working) for x in inputs if x is not None]


def _product(spec: Spec, factors: Sequence[torch.Tensor]) -> torch.Tensor:
    return factors[0] if spec.gate is None else spec.gate.product(*factors)


def _of_each(spec: Spec, whole: torch.Tensor, dim: int) -> Sequence[torch.Tensor]:
    """Return each adapter's part of a tensor in which all adapters are concatenated."""
    return split(whole, [adapter.rank for adapter in spec.adapters], dim)


def _downs(
    spec: Spec, layers: Sequence[_LayerTensors], down: torch.Tensor | None, dtype: torch.dtype
) -> Sequence[torch.Tensor]:
    """Return A of each adapter in `dtype`. `down` is the stack of all A, or None."""
    if down is not None:
        return _of_each(spec, down, 0)
    return [part.to(dtype) for layer in layers for part in layer.pairs.downs]


def _hidden(
    spec: Spec,
    x: torch.Tensor,
    first: torch.Tensor,
    layers: Sequence[_LayerTensors],
    down: torch.Tensor | None,
) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """Return (X Aᵀ of all adapters `[rows, rank]`, their dropout masks). `down` is the stack of all A, or None."""
    if down is not None and not spec.drops:
        hidden = x.new_empty(x.shape[0], down.shape[0])
        write_sums([Sum(hidden, ((x, down.t()),))], compiled=spec.compiled)
        return hidden, [None] * len(spec.adapters)
    parts, masks = [], []
    for adapter, a in zip(spec.adapters, _downs(spec, layers, down, x.dtype), strict=True):
        dropped_x, mask = drop(x, first, adapter.dropout)
        parts.append(dropped_x @ a.t())
        masks.append(mask)
    return torch.cat(parts, dim=1) if parts else x.new_empty(x.shape[0], 0), masks


def _output(
    spec: Spec, layer: _LayerTensors, x: torch.Tensor, hidden: torch.Tensor, products: list[_Product]
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return (Y, None, None). For DoRA, return (Y, Y before magnitude and bias, row norms of W + s B A).

    Without DoRA, Y is empty. `lora_linear` computes Y later from the operands that are added to `products`.
    """
    bias = None
    if layer.biases:
        biases = [bias * scale for bias, scale in zip(layer.biases, layer.spec.biases, strict=True)]
        bias = sum(biases[1:], biases[0]).to(x.dtype)
    columns = shape_of(layer.spec.base)[0]
    if layer.magnitude is None:
        out = x.new_empty(x.shape[0], columns, dtype=spec.result)
        products.append(_Product(layer, x, hidden, bias, out))
        return out, None, None
    y = x.new_empty(x.shape[0], columns)
    weight = spec.weights.matrix(layer.spec.base, x.dtype)
    norm = _row_norms(weight, layer)
    product = _Product(layer, x, hidden, None, y)
    write_sums([product.written_to(y, weight)], compiled=spec.compiled)
    scaled = y * (layer.magnitude / norm)  # in float32, the magnitude's dtype
    return (scaled if bias is None else scaled + bias).to(spec.result), y, norm


def _write(spec: Spec, products: Sequence[_Product]) -> None:
    """Compute the outputs in `products`, in one call of the compiled loops if the outputs need no cast."""
    others = []
    for product in products:
        if not spec.keep and spec.weights.in_4_bits(product.layer.spec.base, product.x):
            _write_few(product)
        else:
            others.append(product)
    cast = spec.result not in (spec.working, torch.float32)
    for group in [others] if spec.compiled and not cast else [[product] for product in others]:
        outs = [torch.empty_like(p.out, dtype=spec.working) if cast else p.out for p in group]
        sums = (
            p.written_to(out, spec.weights.matrix(p.layer.spec.base, spec.working))
            for p, out in zip(group, outs, strict=True)
        )
        write_sums(sums, compiled=spec.compiled)
        if cast:
            group[0].out.copy_(outs[0])


def _write_few(product: _Product) -> None:
    """Compute an output with few rows and without a backward, directly from the packed 4-bit weight."""
    layer = product.layer
    base: Any = layer.spec.base
    # This product is rounded before the adapters' product is added.
    y = product_4bit(product.x, base.weight.data, quantization_state(base), product.bias)
    if layer.scaled_up is not None:
        y = torch.addmm(y, layer.columns(product.hidden), layer.scaled_up.t())
    product.out.copy_(y)


def _row_norms(weight: torch.Tensor, layer: _LayerTensors) -> torch.Tensor:
    """Return the norm of each row of W + s B A in float32, without computing W + s B A."""
    scale = layer.spec.adapters[0].scale
    down, up = layer.pairs.downs[0].float(), layer.pairs.ups[0].float()
    across = (weight @ down.to(weight.dtype).t()).float()
    square = torch.linalg.vector_norm(weight, dim=1, dtype=torch.float32).square()
    inner = 2 * scale * across + scale * scale * (up @ (down @ down.t()))
    norms: torch.Tensor = (square + (inner * up).sum(1)).clamp_min(0).sqrt()
    return norms


def _through_output(
    layer: _LayerTensors,
    rows: torch.Tensor,
    total: torch.Tensor | None,
    norm: torch.Tensor | None,
) -> torch.Tensor:
    """Return the gradient of X Wᵀ, and set the gradients of biases and magnitude. `rows` is Y's gradient."""
    for index, (bias, scale) in enumerate(zip(layer.biases, layer.spec.biases, strict=True)):
        layer.gradients[index] = (rows.sum(0, dtype=_summed(rows)) * scale).to(bias.dtype)
    if layer.magnitude is None or norm is None or total is None:
        return rows
    d_magnitude = torch.linalg.vecdot(rows.float(), total.float(), dim=0) / norm
    layer.gradients[-1] = d_magnitude.to(layer.magnitude.dtype)
    return (rows * (layer.magnitude / norm)).to(total.dtype)


def _through_up(
    spec: Spec,
    output_grads: Sequence[tuple[_LayerTensors, torch.Tensor]],
    hidden: torch.Tensor,
    d_hidden: torch.Tensor,
) -> None:
    """Set the gradients of all B, and write the gradient of X Aᵀ into `d_hidden`."""
    sums, places, summed = [], [], _summed(hidden)
    for layer, rows in output_grads:
        if layer.scaled_up is None:
            continue
        sums.append(Sum(layer.columns(d_hidden), ((rows, layer.scaled_up),)))
        transposed, parts = rows.t(), split(layer.columns(hidden), layer.spec.ranks, 1)
        for index, (part, up, scale) in enumerate(
            zip(parts, layer.pairs.ups, layer.pairs.scales, strict=True)
        ):
            d_up = rows.new_empty(up.shape, dtype=summed)
            sums.append(Sum(d_up, ((transposed, part),), None, scale))
            places.append((layer, len(layer.biases) + 2 * index + 1, d_up, up.dtype))
    write_sums(sums, compiled=spec.compiled)
    for layer, place, d_up, dtype in places:
        layer.gradients[place] = d_up.to(dtype)


def _summed(x: torch.Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _through_products(
    spec: Spec,
    output_grads: Sequence[tuple[_LayerTensors, torch.Tensor]],
    down: torch.Tensor | None,
    d_hidden: torch.Tensor,
    x: torch.Tensor | None,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return (gradient of X, stacked gradients of all A). A gradient that is not requested is None.

    Args:
        output_grads: pairs of a layer and the gradient of its X Wᵀ. It is empty if X needs no gradient.
        down: all A stacked; None if there are no adapters, or if adapters have dropout.
        x: X, or None to skip the gradients of A.
    """
    sums, d_x, d_down = [], None, None
    if output_grads:
        rows = output_grads[0][1]
        small = () if down is None else ((d_hidden, down),)
        terms = ((grad, spec.weights.matrix(layer.spec.base, spec.working)) for layer, grad in output_grads)
        d_x = rows.new_empty(rows.shape[0], shape_of(spec.layers[0].base)[1])
        sums.append(Sum(d_x, chain(small, terms)))
    if x is not None and down is not None:
        d_down = x.new_empty(down.shape, dtype=_summed(x))
        sums.append(Sum(d_down, ((d_hidden.t(), x),)))
    write_sums(sums, compiled=spec.compiled)
    return d_x, d_down


def _through_down(
    spec: Spec,
    layers: Sequence[_LayerTensors],
    x: torch.Tensor,
    masks: Sequence[torch.Tensor | None],
    d_hidden: torch.Tensor,
    d_down: torch.Tensor | None,
) -> None:
    """Set the gradient of each A. `d_down`: gradient of all A, or None to compute the gradient of each A."""
    places = [(layer, index) for layer in layers for index in range(len(layer.pairs.downs))]
    if not places:
        return
    parts = _of_each(spec, d_hidden, 1) if d_down is None else _of_each(spec, d_down, 0)
    for (layer, index), gradient, adapter, mask in zip(places, parts, spec.adapters, masks, strict=True):
        down = layer.pairs.downs[index]
        if d_down is None:
            part, gradient = gradient, x.new_empty(down.shape, dtype=_summed(x))
            terms = ((part.t(), dropped(x, mask, adapter.dropout)),)
            write_sums([Sum(gradient, terms)], compiled=spec.compiled)
        layer.gradients[len(layer.biases) + 2 * index] = gradient.to(down.dtype)


def _through_input(
    ctx: Any, d_x: torch.Tensor | None, factors: Sequence[torch.Tensor], x: torch.Tensor | None
) -> tuple[torch.Tensor, tuple[torch.Tensor | None, torch.Tensor | None]]:
    """Return (X, gradients of the inputs). If `x` is None, X is a gated product, and is computed again here."""
    spec, (dtype, other) = ctx.spec, ctx.dtypes
    if spec.gate is not None and d_x is not None:
        x, d_first, d_second = spec.gate.backward(d_x, *factors)
        return x, (d_first.view(ctx.shape).to(dtype), d_second.view(ctx.shape).to(other))
    assert x is not None, "X is None only for a gated product that needs a gradient"
    return x, (None if d_x is None else d_x.view(ctx.shape).to(dtype), None)

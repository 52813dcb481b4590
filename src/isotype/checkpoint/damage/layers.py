"""Linear layers of a twin: the effect of each weight's error on the loss, and a forward with stored weights."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from isotype.compat.bitsandbytes import dequantize_4bit
from isotype.compat.torch import UncompiledMode, without_dispatch
from isotype.core.dtypes import parse_dtype
from isotype.core.formats import FITTED, FORMATS
from isotype.core.operators import operator_name
from isotype.model.fitted import nearest_values
from isotype.model.quantize import quantize_4bit, quantize_int8
from isotype.model.walk import kind_of
from isotype.precision.damages import MEASURED
from isotype.precision.policy import read_moments, write_moments
from isotype.ranges.weights import Weight, Weights, attached, rows_of, whole

_PIECE = 1 << 20
_BLOCKS = 64  # rows in whole blocks of 4 bits, however wide a row is


class PlainWeights(Weights):
    """Weights without a measurement."""

    def _made(self, weight: Weight) -> torch.Tensor:
        with torch.no_grad():
            return weight.read().detach().to(self.device, self.dtype)

    def rows(self, weight: Weight, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the unique rows of `weight` that `indices` name, and the indices into them."""
        with torch.no_grad():
            stored = weight.read().detach()
            wanted, inverse = torch.unique(indices, return_inverse=True)
            return stored[wanted.to(stored.device)].to(self.device, self.dtype), inverse


class EmbeddedRows(UncompiledMode):  # type: ignore[no-untyped-call]
    """Weights of which embeddings materialize only the rows that are looked up."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operator_name(func).startswith("aten.embedding") and "backward" not in operator_name(func):
            args = rows_of(args)
        else:
            args, kwargs = whole(args, kwargs or {})
        return func(*args, **(kwargs or {}))


@dataclass
class Sums:
    """Sums over one layer: nats of all tokens and squared error of the weight by format, squares of its inputs.

    Each of the `tokens` input squares is weighted by its squared gradient norm: column sums of the Fisher
    information.
    """

    rows: int = 0
    columns: int = 0
    damage: dict[str, float] = field(default_factory=dict)
    error: dict[str, float] = field(default_factory=dict)
    squares: torch.Tensor | None = None
    tokens: int = 0

    @property
    def moments(self) -> str:
        """Moments of the input channels, in the form of policies."""
        return "" if self.squares is None else write_moments(self.squares, self.tokens)


@dataclass
class Layers:
    """Measurement of linear layers, in place of a recorder in `isotype.ranges.twin.twin_of`.

    With f = ln p(y | x) for y sampled from the model, the divergence of the model with weights W + D is ½ E[<D,
    df/dW>²] to second order (the Fisher information); `isotype.checkpoint.damage.measure` replaces df by another
    gradient with the same second moments. Its diagonal is used, per token: ½ Σ (g² xᵀ²) D² for the gradient g of the
    output and the input x. Errors of different weights are nearly independent; the square of a sum over tokens would
    need hundreds of samples.

    Attributes:
        wanted: names of the measured layers.
        form: format to which weights are rounded in a forward without gradients; None: no rounding.
        sums: of each layer that the backward has reached.
    """

    wanted: Collection[str]
    form: str | None = None
    sums: dict[str, Sums] = field(default_factory=dict)

    def again(self) -> Any:
        """Return a context without effect around each run of a block."""
        return nullcontext()

    def watch(self, model: nn.Module, names: Mapping[int, str], inside: Collection[int]) -> None:
        """Install this measurement's forward in the wanted layers, and make embeddings require gradients."""
        for module in model.modules():
            if names[id(module)] in self.wanted:
                vars(module)["forward"] = self._forward(module, names[id(module)])
            elif kind_of(module) == "embedding" and id(module) not in inside:
                module.register_forward_hook(_give_gradient, prepend=True)

    def _forward(self, module: Any, name: str) -> Any:
        turned = type(module).__name__ == "Conv1D"

        def forward(x: torch.Tensor) -> torch.Tensor:
            weight = module.weight.T.contiguous() if turned else module.weight
            form = self.form
            if form is not None:
                stored = torch.empty_like(weight, memory_format=torch.contiguous_format)
                moments = read_moments(self.sums[name].moments) if form in FITTED else None
                with without_dispatch():
                    for rows in pieces(*weight.shape):
                        stored[rows] = rounded(weight[rows], form, moments)
                weight = stored
            output: torch.Tensor = _Product.apply(x, weight, self, name)  # type: ignore[no-untyped-call]
            bias = module.bias
            return output if bias is None else output + bias

        return forward

    def add(self, name: str, x: torch.Tensor, weight: torch.Tensor, gradient: torch.Tensor) -> None:
        """Add one call of a layer: `x` `[…, in]`, `weight` `[out, in]` float32, `gradient` of the output `[…, out]`."""
        sums = self.sums.setdefault(name, Sums(*weight.shape))
        squares = x.reshape(-1, x.shape[-1]).square()
        above = gradient.reshape(-1, gradient.shape[-1]).square()
        gradients = above.sum(1)
        sums.squares = gradients @ squares + (0 if sums.squares is None else sums.squares)
        sums.tokens += int((gradients > 0).sum())  # a padded token has none
        moments = read_moments(sums.moments)
        damage = dict.fromkeys(MEASURED, 0.0)
        error = dict.fromkeys(MEASURED, 0.0)
        for rows in pieces(*weight.shape):
            part = weight[rows]
            fisher = above[:, rows].T @ squares
            for form in MEASURED:
                off = rounded(part, form, moments, exact=False).sub_(part).square_()
                error[form] += float(off.sum())
                damage[form] += 0.5 * float(torch.dot(off.view(-1), fisher.view(-1)))
        for form in MEASURED:
            sums.damage[form] = sums.damage.get(form, 0.0) + damage[form]
        sums.error = error

    @contextmanager
    def rounding(self, form: str) -> Iterator[None]:
        """Compute with weights as this format stores them."""
        self.form = form
        try:
            yield
        finally:
            self.form = None


def _give_gradient(_: nn.Module, __: Any, output: Any) -> Any:
    wants = isinstance(output, torch.Tensor) and output.is_floating_point() and not output.requires_grad
    return attached(output) if wants and torch.is_grad_enabled() else output


class _Product(torch.autograd.Function):
    """X Wᵀ, whose backward feeds the measurement and returns only the gradient of X."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, layers: Layers, name: str) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.layers, ctx.name = layers, name
        return nn.functional.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (gradient,) = gradients
        x, weight = ctx.saved_tensors
        with torch.no_grad(), without_dispatch():  # a mode would see every operator of the roundings
            ctx.layers.add(ctx.name, x, weight, gradient)
            return gradient @ weight, None, None, None


def rounded(
    weight: torch.Tensor, form: str, moments: torch.Tensor | None = None, *, exact: bool = True
) -> torch.Tensor:
    """Return a float32 weight, or whole blocks of its rows, rounded to a format: float32 `[rows, columns]`.

    Args:
        form: one of `isotype.precision.damages.MEASURED`.
        moments: `[columns]`, of the layer's input channels, for formats with fitted constants.
        exact: bitsandbytes' values to the bit; else `isotype.model.fitted.nearest_values`, in half the time.

    Raises:
        ValueError: a fitted format without moments.
    """
    if form == "int8":
        codes, scales = quantize_int8(weight)
        return codes.float() * (scales.float() / 127).to(weight.device).unsqueeze(1)
    if form in ("bfloat16", "float16"):
        return weight.to(parse_dtype(form)).float()
    name, size = FORMATS[form].code, FORMATS[form].block
    fitted = FORMATS[form].fitted
    if fitted and moments is None:
        raise ValueError(f"{form} is fitted to the moments of a layer's inputs, and there are none")
    if fitted or not exact:
        return nearest_values(weight, name, moments if fitted else None, blocksize=size)
    codes, state = quantize_4bit(weight.contiguous(), name, blocksize=size)
    return dequantize_4bit(codes, state).float()


def pieces(rows: int, columns: int) -> Iterator[slice]:
    """Yield slices of a weight's rows: some megabytes each, in whole blocks of 4 bits."""
    step = max(_BLOCKS, _PIECE // max(1, columns) // _BLOCKS * _BLOCKS)
    for begin in range(0, rows, step):
        yield slice(begin, min(begin + step, rows))

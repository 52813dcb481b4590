"""Weights of the measured model, in float32. A weight is created when it is used, and dropped after its block has run."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from isotype.compat.torch import tree_map, version_of, without_dispatch
from isotype.core.threads import SMALL, one_thread
from isotype.precision.policy import DEFAULT_LOSS_SCALE
from isotype.precision.ranges import FLOAT16_FLUSHED

_SCALED = FLOAT16_FLUSHED / DEFAULT_LOSS_SCALE
_KNOWN = "_isotype_magnitude"
FILL = 1e38
"""Values above 1e38 that no operator computed are fill values: infinity, or the largest float32 or bfloat16 number."""
_SAMPLE = 1 << 15
"""Maximum number of sampled values. With this number, shares are accurate to a fraction of a percent."""


@dataclass(frozen=True, slots=True)
class Magnitude:
    """The largest magnitude of a tensor without its fill values. `filled` is True if there are fill values, as in masks."""

    value: float
    filled: bool = False

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Magnitude:
        """Return the magnitude of a float tensor. Values above 1e38 count as fill values."""
        return cls.cached(tensor) or _measured(tensor).remember(tensor)

    @staticmethod
    def cached(tensor: torch.Tensor) -> Magnitude | None:
        version, measured = getattr(tensor, _KNOWN, (None, None))
        return measured if version is not None and version == version_of(tensor) else None

    def remember(self, tensor: torch.Tensor) -> Magnitude:
        """Cache this magnitude of `tensor` until the next write to it. Magnitudes of inference tensors are not cached."""
        version = version_of(tensor)
        if version is not None:
            setattr(tensor, _KNOWN, (version, self))
        return self


def _measured(tensor: torch.Tensor) -> Magnitude:
    if not tensor.numel():
        return Magnitude(0.0)
    with one_thread(_is_small(tensor)):
        low, high = map(float, torch.aminmax(tensor.detach()))
    largest = max(-low, high) if low == low and high == high else math.nan
    if largest < FILL or math.isnan(largest):
        return Magnitude(largest)
    values = tensor.detach().abs()
    inside = values[values < FILL]
    return Magnitude(float(inside.max()) if inside.numel() else 0.0, filled=True)


def largest_rows(tensor: torch.Tensor) -> list[float]:
    """Return the largest magnitude in each row (first dimension) of a float tensor."""
    with one_thread(_is_small(tensor)):
        low, high = torch.aminmax(tensor.detach().reshape(tensor.shape[0], -1), dim=1)
    return [float(largest) for largest in torch.maximum(-low, high)]


def _is_small(tensor: torch.Tensor) -> bool:
    return tensor.numel() <= SMALL and tensor.device.type == "cpu"


def flushed_shares(tensor: torch.Tensor) -> tuple[float, float]:
    """Return the share of nonzero values that float16 rounds to zero, and the same share with a loss scale of 65536."""
    values = sampled(tensor).abs()
    nonzero = int(torch.count_nonzero(values))
    if not nonzero:
        return 0.0, 0.0
    plain = int(torch.count_nonzero(values > FLOAT16_FLUSHED))
    scaled = nonzero if plain == nonzero else int(torch.count_nonzero(values > _SCALED))
    return 1.0 - plain / nonzero, 1.0 - scaled / nonzero


def median(tensor: torch.Tensor) -> float:
    """Return the median magnitude of the nonzero values of a float tensor (of `sampled` values of a large tensor)."""
    values = sampled(tensor).float().abs()
    nonzero = values[values > 0]
    return float(nonzero.median()) if nonzero.numel() else 0.0


def sampled(tensor: torch.Tensor) -> torch.Tensor:
    """Return at most 2^15 values of a tensor, evenly spaced in memory; all values of a smaller tensor."""
    # In memory order, a transposed matrix is not copied.
    order = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
    flat = tensor.detach().permute(order).reshape(-1)
    # An odd step covers every column of a matrix with even width.
    step = max(1, -(-flat.numel() // _SAMPLE))
    return flat[:: step if step == 1 else step | 1]


_LATER = "_isotype_weight"


@dataclass(frozen=True, eq=False)
class Weight:
    """A parameter of the measured model. Tied parameters have the same `key`. `read` returns the stored values."""

    key: Hashable
    shape: torch.Size
    read: Callable[[], torch.Tensor]
    trainable: bool = False


@dataclass
class Weights:
    """The weights of a model. They are created when they are used, in the dtype and on the device of a measurement.

    Attributes:
        records: True to record magnitudes of weights, and magnitudes of the gradients of trainable weights.
        embedding: True while an embedding runs. `make` then returns a placeholder for a frozen weight, and only the looked-up
            rows are read.
    """

    dtype: torch.dtype
    device: torch.device
    records: bool = True
    _open: list[dict[Hashable, torch.Tensor]] = field(default_factory=list)
    _sizes: dict[Hashable, tuple[float, float]] = field(default_factory=dict)  # largest and median magnitude
    _gradients: dict[Hashable, torch.Tensor] = field(default_factory=dict)
    _largest_gradient: dict[Hashable, float] = field(default_factory=dict)
    embedding: bool = False

    def open(self) -> None:
        """Keep the weights that are created from now on until `close`."""
        self._open.append({})

    def close(self) -> None:
        """Drop the weights created since `open`."""
        self._open.pop()

    def make(self, weight: Weight) -> torch.Tensor:
        for weights in reversed(self._open):
            if weight.key in weights:
                return weights[weight.key]
        if self.embedding and not weight.trainable:
            value = self.stand_in(weight)
            setattr(value, _LATER, (self, weight))
            return value
        value = self.materialized(weight)
        if self._open:
            self._open[-1][weight.key] = value
        return value

    def materialized(self, weight: Weight) -> torch.Tensor:
        """Return the values of `weight`. Gradients of a trainable weight are summed over all calls."""
        with without_dispatch(), torch.no_grad():
            value = weight.read().detach().to(self.device, self.dtype)
            self._note(weight, value, value)
        if self.records and weight.trainable and torch.is_grad_enabled():
            value = attached(value, lambda gradient: self._add(weight.key, gradient))
            Magnitude(self._sizes[weight.key][0]).remember(value)
        return value

    def rows(self, weight: Weight, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the distinct rows of `weight` at `indices`, and the position of each index among these rows."""
        with without_dispatch(), torch.no_grad():
            stored = weight.read().detach()
            wanted, inverse = torch.unique(indices, return_inverse=True)
            value = stored[wanted.to(stored.device)].to(self.device, self.dtype)
            self._note(weight, stored, value)
        return value, inverse

    def _note(self, weight: Weight, stored: torch.Tensor, value: torch.Tensor) -> None:
        """Record the magnitudes of a weight when it is first used. `value` contains some rows of `stored`, which is the whole weight."""
        if self.records:
            if weight.key not in self._sizes:
                self._sizes[weight.key] = (Magnitude.of(stored).value, median(stored))
            Magnitude(self._sizes[weight.key][0]).remember(value)

    def stand_in(self, weight: Weight) -> torch.Tensor:
        """Return a placeholder that has the shape of the weight and takes no memory."""
        with without_dispatch():
            return torch.zeros((), dtype=self.dtype, device=self.device).expand(weight.shape)

    def _add(self, key: Hashable, gradient: torch.Tensor) -> None:
        with without_dispatch(), torch.no_grad():
            earlier = self._gradients.get(key)
            self._gradients[key] = gradient.detach().clone() if earlier is None else earlier.add_(gradient)

    def end_step(self) -> None:
        """Record the gradients after a backward."""
        for key, gradient in self._gradients.items():
            largest = Magnitude.of(gradient).value
            self._largest_gradient[key] = max(self._largest_gradient.get(key, 0.0), largest)
        self._gradients.clear()

    def range_of(self, weights: Collection[Weight]) -> tuple[float, float, float]:
        """Return the largest magnitude, the largest parameter's median magnitude, and the largest gradient of `weights`."""
        used = [weight for weight in weights if weight.key in self._sizes]
        sizes = [(weight.shape.numel(), *self._sizes[weight.key]) for weight in used]
        if not sizes:
            return 0.0, 0.0, 0.0
        gradients = (self._largest_gradient.get(weight.key, 0.0) for weight in weights)
        return max(largest for _, largest, _ in sizes), max(sizes)[2], max(gradients)


class OnDemand(dict[str, Any]):
    """Replaces a module's `_parameters`. `[name]` creates a weight; `items()` and `values()` return placeholders."""

    def __init__(self, weights: Weights, by_name: Mapping[str, Weight | None]) -> None:
        super().__init__(by_name)
        self._weights = weights

    def __getitem__(self, name: str) -> torch.Tensor | None:
        weight = super().__getitem__(name)
        return None if weight is None else self._weights.make(weight)

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default  # noqa: SIM401 - this implements `get`

    def items(self) -> Any:
        return [(name, self._stand_in(weight)) for name, weight in super().items()]

    def values(self) -> Any:
        return [value for _, value in self.items()]

    def weights(self) -> list[Weight]:
        return [weight for weight in super().values() if weight is not None]

    def _stand_in(self, weight: Weight | None) -> torch.Tensor | None:
        return None if weight is None else self._weights.stand_in(weight)


def with_values(operator: str, args: tuple[Any, ...], kwargs: Any) -> tuple[Any, Any]:
    """Return the arguments of an operator with values instead of placeholder weights. For an embedding, return only the used rows."""

    def restored(value: Any) -> Any:
        later = getattr(value, _LATER, None)
        return value if later is None else later[0].materialized(later[1])

    if not any(hasattr(argument, _LATER) for argument in args):
        return args, kwargs
    if operator == "aten.embedding":
        weights, weight = getattr(args[0], _LATER)
        # The other arguments concern the weight's gradient, which is not needed.
        return weights.rows(weight, args[1]), kwargs
    return tree_map(restored, (args, kwargs))  # type: ignore[no-any-return]


def attached(value: torch.Tensor, sink: Callable[[torch.Tensor], None] | None = None) -> torch.Tensor:
    """Return a tensor with the same values that requires a gradient. Only `sink` gets this gradient."""
    anchor = torch.empty(0, requires_grad=True)
    tensor: torch.Tensor = _Attached.apply(anchor, value, sink)  # type: ignore[no-untyped-call]
    return tensor


def give_gradient(_: Any, __: Any, output: Any) -> torch.Tensor | None:
    """A forward hook that makes a module's float output require a gradient."""
    wanted = isinstance(output, torch.Tensor) and output.is_floating_point() and not output.requires_grad
    return attached(output) if wanted and torch.is_grad_enabled() else None


class _Attached(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, _: torch.Tensor, value: torch.Tensor, sink: Any) -> torch.Tensor:
        ctx.sink = sink
        with without_dispatch():
            # Models write to embeddings in place. Autograd forbids that for an input that is returned as an output.
            return value.clone() if sink is None else value.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        if ctx.sink is not None:
            ctx.sink(gradients[0])
        return None, None, None

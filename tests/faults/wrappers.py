"""Modules of a user's own in the place of a layer: casts too many, casts too few, writes into buffers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from isotype.core.dtypes import dtype_name
from tests.faults.setup import Fault, Setup, linears, middle


class Wrapped(nn.Module):
    """A linear layer and what is done with its input and output; it looks like the layer from outside."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.in_features, self.out_features = base.in_features, base.out_features

    @property
    def weight(self) -> torch.Tensor:
        """The layer's own weight."""
        return self.base.weight

    @property
    def bias(self) -> torch.Tensor | None:
        """The layer's own bias."""
        return self.base.bias


class RawLora(Wrapped):
    """A LoRA layer that casts nothing."""

    def __init__(self, base: nn.Linear, dtype: torch.dtype) -> None:
        super().__init__(base)
        base.weight.requires_grad_(False)
        self.lora_a = nn.Parameter(torch.randn(4, base.in_features).to(dtype))
        self.lora_b = nn.Parameter(torch.randn(base.out_features, 4).to(dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.base(x)
        return result + functional.linear(functional.linear(x, self.lora_a), self.lora_b)


class CastOutput(Wrapped):
    """A layer that returns another dtype."""

    def __init__(self, base: nn.Linear, dtype: torch.dtype) -> None:
        super().__init__(base)
        self.dtype = dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.base(x)
        return result.to(self.dtype)


class CastInput(CastOutput):
    """A layer that casts its input, to a dtype its weight may not have."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.base(x.to(self.dtype))
        return result


class AddsConstant(CastOutput):
    """A layer that adds a table of another dtype to its output: promotion."""

    def __init__(self, base: nn.Linear, dtype: torch.dtype) -> None:
        super().__init__(base, dtype)
        self.table: torch.Tensor
        self.register_buffer("table", torch.full((base.out_features,), 0.01, dtype=dtype), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.base(x)
        return result + self.table


class Buffered(CastOutput):
    """A layer that collects its output in a buffer of another dtype."""

    def __init__(self, base: nn.Linear, dtype: torch.dtype, write: Callable[[Any, Any], Any]) -> None:
        super().__init__(base, dtype)
        self.write = write

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = self.base(x)
        flat = result.flatten(0, -2)
        collected: torch.Tensor = self.write(torch.zeros_like(flat, dtype=self.dtype), flat)
        return collected.view(result.shape).to(result.dtype)


class Batched(CastOutput):
    """A layer that multiplies as a batch of one, with a copy of its weight in another dtype."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.flatten(0, -2).unsqueeze(0)
        weight = self.base.weight.to(self.dtype).t().unsqueeze(0)
        return torch.bmm(rows, weight).view(*x.shape[:-1], -1)


class Attends(CastOutput):
    """A layer whose output attends to itself, its values in another dtype."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = self.base(x)
        heads = result.reshape(1, 1, -1, self.out_features)
        mixed = functional.scaled_dot_product_attention(heads, heads, heads.to(self.dtype))
        return mixed.view(result.shape)


class _KeepsCopy(torch.autograd.Function):
    """A linear map whose backward multiplies with a copy of the weight in another dtype."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        ctx.save_for_backward(x, weight.to(dtype))
        return functional.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, weight = ctx.saved_tensors
        gradient = gradients[0]
        by_weight = gradient.flatten(0, -2).t() @ x.flatten(0, -2)
        return gradient @ weight, by_weight, None


class KeepsCopy(CastOutput):
    """A layer with a backward of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = _KeepsCopy.apply(x, self.base.weight, self.dtype)  # type: ignore[no-untyped-call]
        return result if self.base.bias is None else result + self.base.bias


def _index_put(into: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    into[torch.arange(rows.shape[0])] = rows
    return into


def _index_add(into: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return into.index_add_(0, torch.arange(rows.shape[0]), rows)


def _index_copy(into: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return into.index_copy_(0, torch.arange(rows.shape[0]), rows)


def _scatter(into: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    places = torch.arange(rows.shape[0]).unsqueeze(-1).expand_as(rows)
    return into.scatter_(0, places, rows)


def _masked_scatter(into: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return into.masked_scatter(torch.ones_like(into, dtype=torch.bool), rows)


def _slice(into: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    into[: rows.shape[0]] = rows
    return into


def _wrap(make: Callable[[nn.Linear, torch.dtype], Wrapped], narrow: bool, setup: Setup) -> str | None:
    place = middle(linears(setup.model))
    if place is None:
        return None
    dtype = setup.other if narrow else setup.wide
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        setup.model.set_submodule(place.name, make(place.module, dtype))  # type: ignore[arg-type]
    return f"{place.name} wrapped: {dtype_name(dtype)}"


def _wrapping(name: str, make: Callable[[nn.Linear, torch.dtype], Wrapped], narrow: bool = False) -> Fault:
    return Fault(name, partial(_wrap, make, narrow))


FAULTS: tuple[Fault, ...] = (
    _wrapping("raw-lora", RawLora),
    _wrapping("raw-lora-other", RawLora, narrow=True),
    _wrapping("output-wide", CastOutput),
    _wrapping("output-other", CastOutput, narrow=True),
    _wrapping("input-wide", CastInput),
    _wrapping("constant-wide", AddsConstant),
    _wrapping("bmm-wide", Batched),
    _wrapping("attention-values-wide", Attends),
    _wrapping("backward-wide", KeepsCopy),
    _wrapping("write-index-put", partial(Buffered, write=_index_put)),
    _wrapping("write-index-add", partial(Buffered, write=_index_add)),
    _wrapping("write-index-copy", partial(Buffered, write=_index_copy)),
    _wrapping("write-scatter", partial(Buffered, write=_scatter)),
    _wrapping("write-masked-scatter", partial(Buffered, write=_masked_scatter)),
    _wrapping("write-slice", partial(Buffered, write=_slice)),
)

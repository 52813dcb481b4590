"""Provides matrices in the dtype of a product: frozen base weights (which may be packed in 4 bits or int8) and adapters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from isotype.compat.bitsandbytes import multiplies, with_float32_constants
from isotype.compat.torch import FakeTensor, copy_each, has_kernel, multiply_each, storage_of, version_of
from isotype.core.dtypes import COMPUTE_DTYPES
from isotype.model.quantized import codes_of, dense_weight, quantization_state
from isotype.model.walk import derives_from, kind_of
from isotype.precision.devices.simulated import device_type_of, gpu_memory, represented

FEW = 64
"""Up to this number of rows (generated tokens), bitsandbytes multiplies by a 4-bit weight without dequantizing it."""

_SHARE = 64  # a GPU's memory over the memory for float32 block constants


def shape_of(layer: Any) -> tuple[int, int]:
    """Return (out_features, in_features) of a base layer."""
    if derives_from(type(layer), "Conv1D"):
        return tuple(layer.weight.shape[::-1])
    return layer.out_features, layer.in_features


def dense(layer: Any, dtype: torch.dtype, state: Any = None) -> torch.Tensor:
    """Return the weight `[out, in]` in `dtype`, as a view if possible. `state` replaces the quantization state of a 4-bit layer."""
    quantized = kind_of(layer) in ("linear4bit", "linear8bit")
    return dense_weight(layer, dtype, state) if quantized else _oriented(layer).to(dtype)


class DenseWeights:
    """Provides the base weights of a model as dense matrices in the dtype of a product.

    A weight that is quantized or not in the product's dtype is converted. Converted matrices are kept up to `budget`
    bytes. All others are converted again for each product. A copy is valid as long as the weight has the same memory
    and version. Code that changes weights through `.data`, such as PEFT's merge, must call `forget`.
    """

    def __init__(self, budget: int = 0) -> None:
        self.budget = budget
        self._copies: WeakKeyDictionary[nn.Module, tuple[_Identity, torch.Tensor]] = WeakKeyDictionary()
        # 4-bit layer -> (identity of its 8-bit constants, state with float32 constants).
        self._constants: WeakKeyDictionary[nn.Module, tuple[_Identity | None, Any]] = WeakKeyDictionary()
        self._constants_bytes = 0

    def matrix(self, layer: Any, dtype: torch.dtype) -> torch.Tensor:
        """Return a layer's weight `[out, in]` in `dtype`."""
        kept = self.kept(layer, dtype)
        if kept is not None:
            return kept
        return dense(layer, dtype, self._state(layer) if kind_of(layer) == "linear4bit" else None)

    def _state(self, layer: Any) -> Any:
        """Return a 4-bit layer's quantization state, with float32 constants if the GPU has enough memory."""
        state, memory = quantization_state(layer), gpu_memory(layer.weight)
        if memory is None or not state.nested:
            return state
        former, identity = self._constants.get(layer), _memory_of(state.absmax, torch.float32)
        if former is not None and former[0] == identity is not None:
            return former[1]
        size = 4 * state.absmax.numel() * represented(layer.weight)
        if former is None:
            if self._constants_bytes + size > memory // _SHARE:
                return state
            self._constants_bytes += size
        with torch.inference_mode(False), torch.no_grad():
            single = with_float32_constants(state)
        self._constants[layer] = identity, single
        return single

    def in_4_bits(self, layer: Any, x: torch.Tensor) -> bool:
        """Return True if bitsandbytes can multiply `x`, which must have few rows, by the packed weight."""
        device = x.device.type
        if kind_of(layer) != "linear4bit" or not 0 < x.shape[0] <= FEW or device == "cpu":
            return False
        if not has_kernel("bitsandbytes::gemm_4bit", device) or x.dtype not in COMPUTE_DTYPES:
            return False
        return layer not in self._copies and multiplies(quantization_state(layer))

    def kept(self, layer: Any, dtype: torch.dtype) -> torch.Tensor | None:
        """Return the weight if its dtype is `dtype`, or else a copy in this dtype. Return None if the budget has no room for a copy."""
        if kind_of(layer) == "linear" and layer.weight.dtype == dtype:
            return _oriented(layer)
        former, copy = self._copies.get(layer, (None, None))
        if copy is not None and former == _identity(layer, dtype):
            return copy
        self.forget(layer)
        if not self._has_room(layer, dtype) or (identity := _identity(layer, dtype)) is None:
            return None  # a weight of inference mode has no identity
        with torch.inference_mode(False), torch.no_grad():  # a training step may read the copy next
            copy = dense(layer, dtype)
        self._copies[layer] = identity, copy
        return copy

    def _has_room(self, layer: Any, dtype: torch.dtype) -> bool:
        rows, columns = shape_of(layer)
        size = rows * columns * dtype.itemsize
        return size <= self.budget and self.bytes + size <= self.budget  # most GPUs have no budget

    def forget(self, layer: nn.Module) -> None:
        """Drop the copy of a layer's weight, which has changed."""
        self._copies.pop(layer, None)

    @property
    def copies(self) -> int:
        return len(self._copies)

    @property
    def bytes(self) -> int:
        return sum(copy.nbytes for _, copy in self._copies.values())

    def __reduce__(self) -> tuple[type[DenseWeights], tuple[int]]:
        return DenseWeights, (self.budget,)  # a copy of the model creates its own copies


_Identity = tuple[int, int, torch.dtype]
"""(address of a weight, its version, dtype of the copy). For a fake tensor, the id of the storage replaces the address."""


def _identity(layer: Any, dtype: torch.dtype) -> _Identity | None:
    return _memory_of(codes_of(layer) if kind_of(layer) == "linear8bit" else layer.weight, dtype)


def _memory_of(weight: torch.Tensor, dtype: torch.dtype) -> _Identity | None:
    version = version_of(weight)
    fake = isinstance(weight, FakeTensor)  # fake tensors have no memory, only a storage
    where = storage_of(weight) if fake else weight.data_ptr()
    return None if version is None else (where, version, dtype)


def _oriented(layer: Any) -> torch.Tensor:
    weight: torch.Tensor = layer.weight.detach()
    return weight.t() if derives_from(type(layer), "Conv1D") else weight


# ------------------------------------------------------------------------------------------------------- adapters
# On a GPU two kernels round the adapters of all layers of a group, because launches cost more than the work. Every forward
# rounds again: some optimizers write masters through `.data`, and FSDP2 does not count writes, so a cache could be stale.


@dataclass(frozen=True)
class Pairs:
    """All adapters of one layer: A `[rank, in]`, B `[out, rank]` and the scale of each."""

    downs: Sequence[torch.Tensor]
    ups: Sequence[torch.Tensor]
    scales: Sequence[float]


Rounded = tuple[torch.Tensor | None, list[torch.Tensor | None]]
"""(all A stacked `[rank, in]` or None; scale × B of each layer's adapters `[out, rank]`, None without adapters)."""


def rounded(layers: Sequence[Pairs], dtype: torch.dtype, *, stacked: bool) -> Rounded:
    """Return (all A stacked, or None if `stacked` is False; scale × B of each layer), rounded once to `dtype`."""
    matrices = [x for layer in layers for x in (*layer.downs, *layer.ups)]
    if not matrices or device_type_of(matrices[0]) == "cpu" or all(x.dtype == dtype for x in matrices):
        return _one_by_one(layers, dtype, stacked)
    return _together(layers, dtype, stacked)


def _one_by_one(layers: Sequence[Pairs], dtype: torch.dtype, stacked: bool) -> Rounded:
    downs = [down for layer in layers for down in layer.downs] if stacked else []
    down = (downs[0] if len(downs) == 1 else torch.cat(downs)).to(dtype) if downs else None
    scaled = []
    for layer in layers:
        parts = [up * scale for up, scale in zip(layer.ups, layer.scales, strict=True)]
        scaled.append((parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)).to(dtype) if parts else None)
    return down, scaled


def _together(layers: Sequence[Pairs], dtype: torch.dtype, stacked: bool) -> Rounded:
    ups = [up for layer in layers for up in layer.ups]
    sources = multiply_each(ups, [scale for layer in layers for scale in layer.scales])
    targets: list[torch.Tensor] = []
    scaled: list[torch.Tensor | None] = []
    for layer in layers:
        ranks = [up.shape[1] for up in layer.ups]
        whole = layer.ups[0].new_empty(layer.ups[0].shape[0], sum(ranks), dtype=dtype) if ranks else None
        scaled.append(whole)
        if whole is not None:
            targets += split(whole, ranks, 1)
    down = None
    if stacked:
        downs = [down for layer in layers for down in layer.downs]
        ranks = [matrix.shape[0] for matrix in downs]
        down = downs[0].new_empty(sum(ranks), downs[0].shape[1], dtype=dtype)
        sources, targets = [*sources, *downs], [*targets, *split(down, ranks, 0)]
    copy_each(targets, sources)
    return down, scaled


def split(whole: torch.Tensor, sizes: Sequence[int], dim: int) -> Sequence[torch.Tensor]:
    """Split a tensor into views of the given sizes. A single part is the tensor itself, so that no operator runs."""
    return (whole,) if len(sizes) == 1 else whole.split_with_sizes(sizes, dim)

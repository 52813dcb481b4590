"""Plans from headers, before a weight is read, how each tensor of a checkpoint is loaded under a policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from isotype.checkpoint.facts import quantization_of
from isotype.checkpoint.fill import dtypes_of
from isotype.checkpoint.formats.headers import CheckpointHeaders
from isotype.checkpoint.formats.tensor import TensorHeader
from isotype.checkpoint.mapping.match import Match, match, unknown_quantization
from isotype.checkpoint.mapping.stored import main_form
from isotype.checkpoint.mapping.weight_map import Source, steps
from isotype.compat.transformers import pinned
from isotype.core.dtypes import dtype_name
from isotype.core.errors import CheckpointError
from isotype.core.formats import METHODS, QUANTIZATIONS
from isotype.core.names import alternatives
from isotype.model.experts.quantize import formats_of_stacks
from isotype.model.read_weights import unquantizable
from isotype.precision.policy import PrecisionPolicy, is_pinned

# A word for each operation of transformers' conversions.
_WORDS = {
    "MergeModulelist": "stacked",
    "SplitModulelist": "unstacked",
    "Concatenate": "joined",
    "Chunk": "split",
    "Split": "split",
    "Transpose": "transposed",
    "PermuteForRope": "permuted",
    "Interleave": "interleaved",
}


@dataclass(frozen=True)
class PlannedTensor:
    """The plan for loading one tensor of the model.

    Attributes:
        sources: the tensors in the files from which this tensor is made, with their quantization constants.
        stored, storage: dtype name or quantization format, in the files and in the loaded model.
        conversion: conversion steps in order; empty if the tensor is used as stored.
        pinned: True if the model's author keeps the tensor in float32.
    """

    name: str
    shape: tuple[int, ...]
    sources: tuple[TensorHeader, ...]
    stored: str
    storage: str
    conversion: tuple[str, ...] = ()
    pinned: bool = False

    @property
    def how(self) -> str:
        return ", ".join(self.conversion) or "as stored"

    @property
    def bytes(self) -> int:
        return sum(source.bytes for source in self.sources)


@dataclass(frozen=True)
class LoadPlan:
    """The plan for loading a model's tensors; `match` names tensors that are missing or surplus in the checkpoint."""

    tensors: tuple[PlannedTensor, ...]
    match: Match = field(repr=False)


def load_plan(model: nn.Module, headers: CheckpointHeaders, policy: PrecisionPolicy) -> LoadPlan:
    """Plan how a dense model, which may be on the meta device, gets its tensors from a checkpoint.

    Raises CheckpointError if the checkpoint is quantized by a method that isotype does not know.
    """
    quantization = quantization_of(getattr(model, "config", None))
    if quantization is not None and unknown_quantization(quantization):
        what = f"{headers.path}, quantized by {quantization.method}"
        expected = f"weights in float dtypes, or quantized by {alternatives(METHODS)}"
        fix = "load it with transformers, or take the checkpoint before it was quantized"
        raise CheckpointError.of("no plan for this quantization", what, expected, fix)
    packed = quantization.format if quantization is not None else "packed"
    matched = match(model, headers)
    storage = _storage(model, policy)
    tensors = []
    for name, value in model.state_dict(keep_vars=True).items():
        source = matched.weights.sources.get(name)
        if source is None or source.failure:
            continue
        form = main_form(tensor for tensor, _ in source.tensors) or "packed"
        stored = packed if form == "packed" else form
        loaded = stored if stored in QUANTIZATIONS else storage.get(name, stored)
        tensors.append(
            PlannedTensor(
                name,
                tuple(value.shape),
                tuple(part for tensor, _ in source.tensors for part in tensor.parts),
                stored,
                loaded,
                _conversion(name, source, stored, loaded),
                is_pinned(name, policy.pinned),
            )
        )
    return LoadPlan(tuple(tensors), matched)


def _storage(model: nn.Module, policy: PrecisionPolicy) -> dict[str, str]:
    """Return the dtype name or format in which the policy stores each float tensor of a dense model, by name."""
    quantized = quantized_weights(model, policy) if policy.quantized else ()
    stacks = (
        formats_of_stacks(model, policy, _skipped(model, policy.unquantized)) if policy.quantization else {}
    )
    dtypes = dtypes_of(model, policy, quantized, policy.pinned)
    formats = {name: policy.storage_of(name.removesuffix(".weight")) for name in quantized}
    return {name: dtype_name(dtype) for name, dtype in dtypes.items()} | formats | stacks


def quantized_weights(model: Any, policy: PrecisionPolicy | None = None) -> frozenset[str]:
    """Return the names of the weights that transformers quantizes with bitsandbytes when it loads a dense model.

    For a module that is not from transformers, these are all linear layers' weights. The result has no weights that
    `policy` stores dense.
    """
    from transformers.pytorch_utils import Conv1D
    from transformers.quantizers.quantizers_utils import should_convert_module

    always = unquantizable(model) if policy is None else ()
    skipped = [*_skipped(model, () if policy is None else policy.unquantized), *always]
    return frozenset(
        f"{name}.weight"
        for name, module in model.named_modules()
        if (type(module) is nn.Linear or isinstance(module, Conv1D))
        and should_convert_module(name, skipped)
        and (policy is None or not is_pinned(f"{name}.weight", policy.pinned))
    )


def _skipped(model: Any, dense: Sequence[str]) -> Sequence[str]:
    """Return the modules that transformers leaves dense: `dense` or, if it is empty, the defaults of the model's class."""
    from transformers.quantizers.base import HfQuantizer

    if not hasattr(model, "all_tied_weights_keys"):
        return dense
    skipped: Sequence[str] = HfQuantizer.get_modules_to_not_convert(model, list(dense) or None, pinned(model))
    return skipped


def _conversion(name: str, source: Source, stored: str, storage: str) -> tuple[str, ...]:
    words = []
    if not steps(source) and source.tensors[0][0].name != name:
        words.append("renamed")
    dense = not any(tensor.quantized for tensor, _ in source.tensors)
    if stored != storage and not dense:
        words.append("dequantized")
    words += [_WORDS.get(step, f"converted by {step}") for step in steps(source)]
    if stored != storage and storage in QUANTIZATIONS:
        words.append("quantized")
    elif stored != storage and dense:
        words.append("cast")
    return tuple(dict.fromkeys(words))

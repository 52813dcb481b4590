"""Inspects a checkpoint from its headers alone, and plans how each of its tensors is loaded under a policy."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from isotype.checkpoint.checkpoint import local_path, open_checkpoint
from isotype.checkpoint.facts import facts_of, quantization_of
from isotype.checkpoint.fill import dtypes_of
from isotype.checkpoint.formats.headers import CheckpointHeaders, read_headers
from isotype.checkpoint.formats.hub import local_snapshot, remote_headers
from isotype.checkpoint.formats.json_file import read_json
from isotype.checkpoint.formats.tensor import TensorHeader
from isotype.checkpoint.mapping.match import Match, match, unknown_quantization
from isotype.checkpoint.mapping.stored import StoredTensor, main_form, stored_tensors
from isotype.checkpoint.mapping.weight_map import Source
from isotype.checkpoint.resolve import resolve_precision
from isotype.checkpoint.weightless import left_dense, quantized_weights, skeleton, store
from isotype.core.dtypes import dtype_name, dtypes_named
from isotype.core.errors import CheckpointError
from isotype.core.formats import METHODS, QUANTIZATIONS
from isotype.core.names import alternatives, grouped, starred
from isotype.model.experts.quantize import formats_of_stacks
from isotype.precision.policy import PrecisionPolicy, is_pinned

# Prefixes of the fields of a quantization_config that are printed.
_SHOWN = ("bnb_4bit_", "load_in_", "bits", "group_size", "desc_act")
_SHOWN_8BIT = ("load_in_", "llm_int8_threshold")


@dataclass(frozen=True)
class Mismatched:
    """A tensor that is stored in another dtype than most tensors of its group."""

    name: str
    dtype: str


@dataclass(frozen=True)
class Group:
    """Tensors whose names differ only in layer and expert numbers. In `name`, `*` replaces these numbers.

    Attributes:
        dtype: dtype name or quantization format (`nf4`, `Q4_K`) of most tensors.
        shapes: stored shapes, with the most frequent first. Packed weights have a packed shape.
        values: number of weights. For a packed format, this is the number after unpacking.
        bytes: size of the tensors and their quantization constants in the files.
        mismatched: tensors that are stored in another dtype or format than `dtype`.
        unlike: the most common float dtype of the checkpoint, if this group has another float dtype; else None.
    """

    name: str
    count: int
    dtype: str
    shapes: tuple[tuple[int, ...], ...]
    values: int
    bytes: int
    mismatched: tuple[Mismatched, ...] = ()
    unlike: str | None = None


@dataclass(frozen=True)
class Total:
    """All tensors stored in one dtype or format."""

    dtype: str
    tensors: int
    values: int
    bytes: int


@dataclass(frozen=True)
class Inspection:
    """The content of one checkpoint.

    Attributes:
        format: `"safetensors"` or `"gguf"`.
        kind: `"model"` or `"adapter"`.
        groups: groups of tensors, sorted by name.
        totals: sums by dtype or format, with the most bytes first.
        quantization: the quantization in config.json, or else the formats of the tensors; "" if all weights are plain floats.
        config_dtype: the dtype in config.json, or None.
        notes: contradictions between weights and config.json.
    """

    path: str
    format: str
    kind: str
    groups: tuple[Group, ...]
    totals: tuple[Total, ...]
    quantization: str = ""
    config_dtype: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def whole(self) -> Total:
        """All tensors. A weight and its quantization constants count as one tensor."""
        tensors, values = sum(t.tensors for t in self.totals), sum(t.values for t in self.totals)
        return Total("all", tensors, values, sum(t.bytes for t in self.totals))


def inspect_checkpoint(path: str | Path, *, revision: str | None = None) -> Inspection:
    """Read the headers of a checkpoint and group its tensors.

    `path`: a directory, a .safetensors file, an index of shards, a .gguf file, `embedded:NAME` or a hub id.
    `revision`: branch, tag or commit of a hub id. Raises CheckpointError if the checkpoint does not exist, or is damaged,
    incomplete or pickled.
    """
    source = local_path(path)
    headers = hub_headers(str(path), revision) if source is None else read_headers(source)
    config = {} if source is None else _config(source)
    stored = stored_tensors(headers.tensors)
    main = main_form(tensor for tensor in stored if tensor.plain)
    together = grouped(stored, lambda tensor: starred(tensor.weight.name))
    groups = tuple(_group(name, together[name], main) for name in sorted(together))
    by_form = grouped(stored, lambda tensor: tensor.form).items()
    totals = [Total(f, len(ts), sum(t.values for t in ts), sum(t.bytes for t in ts)) for f, ts in by_form]
    named = next(iter(dtypes_named(config)), None)
    notes = []
    if named is not None and main is not None and named != main:
        notes.append(f"config.json names {named}, but most unquantized weights are {main}")
    return Inspection(
        path=str(path),
        format=headers.format,
        kind=headers.kind,
        groups=groups,
        totals=tuple(sorted(totals, key=lambda total: (-total.bytes, total.dtype))),
        quantization=_quantization(config, stored),
        config_dtype=named,
        notes=tuple(notes),
    )


def hub_headers(model_id: str, revision: str | None) -> CheckpointHeaders:
    """Return the headers of a model on the hub. They are read from the local cache, or else by range requests."""
    if (snapshot := local_snapshot(model_id, revision)) is not None:
        return read_headers(snapshot)
    remote = remote_headers(model_id, revision)
    if isinstance(remote, str):
        what, expected = f"{model_id}: {remote}", "a model on the hub, or an existing path"
        fix = "check the spelling and the network, or give a local path"
        raise CheckpointError.of("the headers on the hub cannot be read", what, expected, fix)
    return remote


def _config(source: Path) -> Mapping[str, Any]:
    path = (source if source.is_dir() else source.parent) / "config.json"
    return read_json(path) if path.is_file() and source.suffix != ".gguf" else {}


def _quantization(config: Mapping[str, Any], stored: Sequence[StoredTensor]) -> str:
    options = config.get("quantization_config")
    if isinstance(options, dict):
        method = str(options.get("quant_method", "bitsandbytes"))
        shown = _SHOWN_8BIT if options.get("load_in_8bit") else _SHOWN
        listed = ((n.removeprefix("bnb_4bit_"), v) for n, v in options.items() if n.startswith(shown))
        details = [f"{name}={value}" for name, value in listed if value not in (None, False)]
        return " ".join([method, *details])
    formats = Counter(tensor.form for tensor in stored if not tensor.plain)
    return ", ".join(name for name, _ in formats.most_common())


def _group(name: str, tensors: Sequence[StoredTensor], main: str | None) -> Group:
    dtype = Counter(tensor.form for tensor in tensors).most_common(1)[0][0]
    shapes = Counter(tensor.weight.shape for tensor in tensors)
    plain = any(tensor.plain for tensor in tensors if tensor.form == dtype)
    mismatched = [tensor for tensor in tensors if tensor.form != dtype]
    return Group(
        name=name,
        count=len(tensors),
        dtype=dtype,
        shapes=tuple(shape for shape, _ in shapes.most_common()),
        values=sum(tensor.values for tensor in tensors),
        bytes=sum(tensor.bytes for tensor in tensors),
        mismatched=tuple(
            Mismatched(tensor.weight.name, tensor.form)
            for tensor in sorted(mismatched, key=lambda t: _natural_order(t.weight.name))
        ),
        unlike=main if plain and dtype != main else None,
    )


def _natural_order(name: str) -> list[tuple[int, int, str]]:
    parts = filter(None, re.split(r"(\d+)", name))
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in parts]


# ------------------------------------------------------------------------------------------- the plan of a load

# A word for each operation of transformers' conversions.
_WORDS = {
    "MergeModulelist": "stacked", "SplitModulelist": "unstacked", "Concatenate": "joined", "Chunk": "split",
    "Split": "split", "Transpose": "transposed", "PermuteForRope": "permuted", "Interleave": "interleaved",
}  # fmt: skip


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
    """The plan for loading the tensors of a model. `match` names tensors that the checkpoint lacks, and surplus tensors."""

    tensors: tuple[PlannedTensor, ...]
    match: Match = field(repr=False)


def load_plan(model: nn.Module, headers: CheckpointHeaders, policy: PrecisionPolicy) -> LoadPlan:
    """Plan how a dense model gets its tensors from a checkpoint. Raise CheckpointError for an unknown quantization."""
    quantization = quantization_of(getattr(model, "config", None))
    if quantization is not None and unknown_quantization(quantization):
        what = f"{headers.path}, quantized by {quantization.method}"
        expected = f"weights in float dtypes, or quantized by {alternatives(METHODS)}"
        fix = "load it with transformers, or use the checkpoint before it was quantized"
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
                source.headers,
                stored,
                loaded,
                _conversion(name, source, stored, loaded),
                is_pinned(name, policy.pinned),
            )
        )
    return LoadPlan(tuple(tensors), matched)


def _storage(model: nn.Module, policy: PrecisionPolicy) -> dict[str, str]:
    """Return, by name, the dtype name or format in which the policy stores each float tensor of a dense model."""
    quantized = quantized_weights(model, policy) if policy.quantized else ()
    stacks = formats_of_stacks(model, policy, left_dense(model, policy.unquantized))
    dtypes = dtypes_of(model, policy, quantized, policy.pinned)
    formats = {name: policy.storage_of(name.removesuffix(".weight")) for name in quantized}
    return {name: dtype_name(dtype) for name, dtype in dtypes.items()} | formats | stacks


def _conversion(name: str, source: Source, stored: str, storage: str) -> tuple[str, ...]:
    words = []
    if not source.steps and source.tensors[0][0].name != name:
        words.append("renamed")
    dense = not any(tensor.quantized for tensor, _ in source.tensors)
    if stored != storage and not dense:
        words.append("dequantized")
    words += [_WORDS.get(step, f"converted by {step}") for step in source.steps]
    if stored != storage and storage in QUANTIZATIONS:
        words.append("quantized")
    elif stored != storage and dense:
        words.append("cast")
    return tuple(dict.fromkeys(words))


@dataclass(frozen=True)
class PlanGroup:
    """Tensors that have the same name (with `*` for layer and expert numbers) and are stored and converted in the
    same way.

    All these tensors have the same `stored`, `storage` and `pinned` (see `PlannedTensor`). `how`: their conversion.
    `shapes`: shapes in the model, with the most frequent first. `sources`: number of source tensors. `bytes`: their
    size.
    """

    name: str
    count: int
    stored: str
    storage: str
    how: str
    pinned: bool
    shapes: tuple[tuple[int, ...], ...]
    sources: int
    bytes: int


@dataclass(frozen=True)
class PlanInspection:
    """The plan for loading a checkpoint into a model of the class `model`. The order of `groups` is the order of the model."""

    path: str
    model: str
    policy: PrecisionPolicy
    plan: LoadPlan
    groups: tuple[PlanGroup, ...]
    loaded_bytes: int

    @property
    def file_bytes(self) -> int:
        """Bytes of the source tensors in the files. A tensor that two parameters of the model share counts once."""
        return sum({(s.file, s.name): s.bytes for t in self.plan.tensors for s in t.sources}.values())


def inspect_plan(path: str | Path, *, revision: str | None = None, **request: Any) -> PlanInspection:
    """Plan how a checkpoint is loaded. Only its headers and its config are read.

    Args:
        path: a directory, a .gguf file, `embedded:NAME` or a hub id.
        revision: branch, tag or commit of a hub id.
        **request: other arguments of `isotype.resolve_precision`.

    Raises:
        CheckpointError: the checkpoint does not exist, is damaged or is incomplete. The error names every problem.
        PrecisionError: the device or the library versions cannot run the requested policy.
    """
    checkpoint = open_checkpoint(path, revision)
    policy = resolve_precision(path, revision=revision, **request)
    headers = checkpoint.headers or hub_headers(checkpoint.name, revision)
    model = skeleton(checkpoint.model_config, policy)
    plan = load_plan(model, headers, policy)
    plan.match.require_complete()
    loaded = facts_of(store(model, policy)).parameter_bytes
    assert loaded is not None  # only the facts of a config lack this number
    return PlanInspection(str(path), plan.match.model, policy, plan, _groups(plan.tensors), loaded)


def _groups(tensors: Sequence[PlannedTensor]) -> tuple[PlanGroup, ...]:
    together = grouped(tensors, lambda t: (starred(t.name), t.stored, t.storage, t.how, t.pinned))
    return tuple(
        PlanGroup(
            name,
            len(some),
            stored,
            storage,
            how,
            pinned,
            tuple(shape for shape, _ in Counter(tensor.shape for tensor in some).most_common()),
            sum(len(tensor.sources) for tensor in some),
            sum(tensor.bytes for tensor in some),
        )
        for (name, stored, storage, how, pinned), some in together.items()
    )

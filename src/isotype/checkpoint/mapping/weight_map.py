"""Which tensors of a checkpoint each tensor of a model is made of, from names and shapes alone."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from isotype.checkpoint.formats.headers import CheckpointHeaders
from isotype.checkpoint.mapping.gguf_names import gguf_names
from isotype.checkpoint.mapping.stored import StoredTensor, dense_shape, stored_tensors, with_scheme

# How transformers' conversions fail on tensors of other shapes or numbers than they expect.
TURNED = "as transformers' `TensorProcessor`s turn those of a GGUF file"
"""The conversion of a GGUF file's tensors: into one tensor of as many values, in an order of its own."""
CONVERSION_ERRORS = (RuntimeError, ValueError, LookupError, TypeError, AttributeError, AssertionError)


@dataclass(frozen=True)
class Source:
    """Tensors of a checkpoint and what becomes of them in a model.

    Attributes:
        target: the name in the model that they are gathered under: one of `shapes`.
        tensors: each with the pattern by which the conversion asks for it.
        conversion: transformers' `WeightConverter`; None where one tensor only takes another name, if any; `TURNED` in
            a GGUF file.
        shapes: names in the model and their shapes after the conversion; None where no file says the shape.
        failure: how the conversion fails, or "".
    """

    target: str
    tensors: tuple[tuple[StoredTensor, str], ...]
    conversion: Any = None
    shapes: Mapping[str, tuple[int, ...] | None] = field(default_factory=dict)
    failure: str = ""


@dataclass(frozen=True)
class WeightMap:
    """The tensors of a checkpoint by what they become.

    Attributes:
        sources: for each name in the model what it is made of; several names may share one.
        surplus: what the model has no name for.
        doubled: what a tensor before it in `sources` is already taken for, by the name in the model.
    """

    sources: Mapping[str, Source]
    surplus: tuple[StoredTensor, ...]
    doubled: tuple[tuple[str, StoredTensor], ...]


def weight_map(model: nn.Module, headers: CheckpointHeaders) -> WeightMap:
    """How a model's tensors are made of those of a checkpoint.

    Models of transformers take renamed, split, stacked and turned tensors by its own conversions (`conversion_mapping`);
    any other module takes tensors of its own names.

    Args:
        model: dense, with the names and shapes wanted; it may lie on the meta device.
        headers: of the checkpoint.
    """
    stored = stored_tensors(headers.tensors, headers.quantization)
    gathered: dict[str, list[tuple[StoredTensor, str]]] = {}
    conversions: dict[str, Any] = {}
    surplus: list[StoredTensor] = []
    doubled: list[tuple[str, StoredTensor]] = []
    rename, in_order = _renaming(model, headers)
    for tensor in sorted(stored, key=lambda each: in_order(each.name)):
        target, pattern, conversion = rename(tensor.name)
        if tensor.quantized and target:
            tensor = with_scheme(tensor, headers.quantization, target, _classes(model, target))
        if not target:
            surplus.append(tensor)
        elif target not in gathered:
            gathered[target], conversions[target] = [(tensor, pattern)], conversion
        elif conversions[target] is None or conversion is None:
            doubled.append((target, tensor))
        else:
            gathered[target].append((tensor, pattern))
    sources: dict[str, Source] = {}
    for target, tensors in gathered.items():
        shaped = _shaped(model, Source(target, tuple(tensors), conversions[target]))
        sources.update(dict.fromkeys(shaped.shapes or (shaped.target,), shaped))
    return WeightMap(sources, tuple(surplus), tuple(doubled))


def _classes(model: nn.Module, name: str) -> Sequence[str]:
    """The names of the classes of the module that has a weight; experts are stacked of linear layers."""
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    return [each.__name__ for each in type(module).__mro__] if leaf == "weight" else ["Linear"]


Renaming = Callable[[str], tuple[str, str, Any]]


def _renaming(model: Any, headers: CheckpointHeaders) -> tuple[Renaming, Callable[[str], Any]]:
    """From a name in the checkpoint to (name in the model or "", pattern, conversion); and the order to ask in."""
    wanted = model.state_dict()
    if not hasattr(model, "base_model_prefix"):
        return lambda name: (name if name in wanted else "", name, None), str
    from transformers import core_model_loading as loading

    if headers.format == "gguf" and not _converts_gguf(headers.architecture):
        names = gguf_names(model, headers.architecture)

        def lookup(name: str) -> tuple[str, str, Any]:
            # The model's stacked experts have no `.weight`.
            return names.get(name) or names.get(name.removesuffix(".weight"), ""), name, TURNED

        return lookup, loading.dot_natural_key
    mapping = _conversions(model, headers)
    renamings = [each for each in mapping if isinstance(each, loading.WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, loading.WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    prefix = model.base_model_prefix

    def rename(name: str) -> tuple[str, str, Any]:
        # The steps of transformers' `convert_and_load_state_dict_in_model`.
        target, pattern = loading.rename_source_key(name, renamings, converters, prefix, wanted)
        if target not in wanted and name in wanted:
            target, pattern = loading.rename_source_key(
                name, [], [], base_model_prefix=prefix, meta_state_dict=wanted
            )
        if target not in wanted:
            return "", name, None
        return target, pattern or name, by_pattern[pattern] if pattern else None

    return rename, loading.dot_natural_key


def _conversions(model: Any, headers: CheckpointHeaders) -> Sequence[Any]:
    if headers.format == "gguf":
        from transformers.integrations.gguf import get_gguf_conversion_mapping

        mapping: Sequence[Any] = get_gguf_conversion_mapping(headers.architecture, model.config)
        return mapping
    from transformers.conversion_mapping import get_model_conversion_mapping

    conversions: Sequence[Any] = get_model_conversion_mapping(model)
    return conversions


def _converts_gguf(architecture: str) -> bool:
    """Whether transformers has conversions for a GGUF file of this architecture, as it has for other checkpoints."""
    from transformers import integrations

    return architecture in getattr(getattr(integrations, "gguf", None), "GGUF_ARCHS", ())


def _shaped(model: nn.Module, source: Source) -> Source:
    """The source with the shapes of what it makes, learned on the meta device."""
    if source.conversion is TURNED:
        return replace(source, shapes={source.target: None})
    shapes = [dense_shape(tensor) for tensor, _ in source.tensors]
    if None in shapes or source.conversion is None:
        return replace(source, shapes={source.target: shapes[0]})
    try:
        blank = {
            tensor.name: torch.empty(shape, dtype=_dense_dtype(tensor), device="meta")
            for (tensor, _), shape in zip(source.tensors, shapes, strict=True)
            if shape is not None
        }
        tensors = converted(model, source, blank)
    except CONVERSION_ERRORS as error:
        return replace(source, failure=str(error).strip() or type(error).__name__)
    return replace(source, shapes={name: tuple(value.shape) for name, value in tensors.items()})


def _dense_dtype(tensor: StoredTensor) -> torch.dtype:
    dtype = tensor.weight.dtype
    return torch.bfloat16 if tensor.quantized or dtype is None else dtype


def converted(model: Any, source: Source, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of the model that a source makes.

    Args:
        model: whose conversion it is.
        source: of the model's `weight_map`.
        values: dense tensors by the names of `source.tensors`.
    """
    if source.conversion is None:  # at most another name
        (value,) = values.values()
        return {source.target: value}
    conversion = copy.deepcopy(source.conversion)  # it collects what it is given
    for tensor, pattern in source.tensors:
        conversion.add_tensor(source.target, tensor.name, pattern, lambda held=values[tensor.name]: held)
    tensors = conversion.convert(source.target, model=model, config=model.config)
    return {name: value[0] if isinstance(value, list) else value for name, value in tensors.items()}


def steps(source: Source) -> Sequence[str]:
    """The names of the operations of a source's conversion (`MergeModulelist`, `Chunk`, …)."""
    return [type(step).__name__ for step in getattr(source.conversion, "operations", ())]

"""The sources in a checkpoint of each tensor of a model, from names and shapes alone."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from isotype.checkpoint.formats.headers import CheckpointHeaders
from isotype.checkpoint.mapping.stored import (
    StoredTensor,
    dense_dtype,
    dense_shape,
    stored_tensors,
    with_scheme,
)

# How transformers' conversions fail on tensors of other shapes or numbers than they expect.
TURNED = "as transformers' `TensorProcessor`s turn those of a GGUF file"
"""Conversion of a GGUF file's tensors: into one tensor of as many values, in another order."""
CONVERSION_ERRORS = (RuntimeError, ValueError, LookupError, TypeError, AttributeError, AssertionError)


@dataclass(frozen=True)
class Source:
    """Tensors of a checkpoint and their conversion.

    Attributes:
        target: the model's name under which they are gathered: one of `shapes`.
        tensors: each with its pattern in the conversion.
        conversion: transformers' `WeightConverter`; None if one tensor is at most renamed; `TURNED` in a GGUF file.
        shapes: names in the model and their shapes after the conversion; None if no file has the shape.
        failure: how the conversion fails, or "".
    """

    target: str
    tensors: tuple[tuple[StoredTensor, str], ...]
    conversion: Any = None
    shapes: Mapping[str, tuple[int, ...] | None] = field(default_factory=dict)
    failure: str = ""


@dataclass(frozen=True)
class WeightMap:
    """The tensors of a checkpoint by their use.

    Attributes:
        sources: source of each name in the model; several names may share one.
        surplus: tensors without a name in the model.
        doubled: tensors whose name in the model already has a source, by that name.
    """

    sources: Mapping[str, Source]
    surplus: tuple[StoredTensor, ...]
    doubled: tuple[tuple[str, StoredTensor], ...]


def weight_map(model: nn.Module, headers: CheckpointHeaders) -> WeightMap:
    """Return the sources of a model's tensors in a checkpoint.

    Models of transformers take renamed, split, stacked and turned tensors by its own conversions
    (`conversion_mapping`); any other module takes tensors of its own names. The model is dense and may be on the meta
    device.
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
            path, _, leaf = target.rpartition(".")
            # Experts are stacked of linear layers.
            classes = type(model.get_submodule(path)).__mro__ if leaf == "weight" else (nn.Linear,)
            tensor = with_scheme(tensor, headers.quantization, target, [each.__name__ for each in classes])
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


Renaming = Callable[[str], tuple[str, str, Any]]


def _renaming(model: Any, headers: CheckpointHeaders) -> tuple[Renaming, Callable[[str], Any]]:
    """Return a map from a checkpoint's name to (name in the model or "", pattern, conversion), and its order."""
    wanted = model.state_dict()
    if not hasattr(model, "base_model_prefix"):
        return lambda name: (name if name in wanted else "", name, None), str
    from transformers import core_model_loading as loading
    from transformers import integrations
    from transformers.conversion_mapping import get_model_conversion_mapping

    gguf: Any = getattr(integrations, "gguf", None)
    if headers.format != "gguf":
        mapping: Sequence[Any] = get_model_conversion_mapping(model)
    elif headers.architecture in getattr(gguf, "GGUF_ARCHS", ()):
        mapping = gguf.get_gguf_conversion_mapping(headers.architecture, model.config)
    else:
        names = gguf_names(model, headers.architecture)

        def lookup(name: str) -> tuple[str, str, Any]:
            # The model's stacked experts have no `.weight`.
            return names.get(name) or names.get(name.removesuffix(".weight"), ""), name, TURNED

        return lookup, loading.dot_natural_key
    renamings = [each for each in mapping if isinstance(each, loading.WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, loading.WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    prefix = model.base_model_prefix

    def rename(name: str) -> tuple[str, str, Any]:
        # The steps of transformers' `convert_and_load_state_dict_in_model`.
        target, pattern = loading.rename_source_key(name, renamings, converters, prefix, wanted)
        if target not in wanted and name in wanted:
            target, pattern = loading.rename_source_key(name, [], [], prefix, wanted)
        if target not in wanted:
            return "", name, None
        return target, pattern or name, by_pattern[pattern] if pattern else None

    return rename, loading.dot_natural_key


def gguf_names(model: Any, architecture: str) -> Mapping[str, str]:
    """Return the model's names of a GGUF file's tensors, `.weight` and `.bias` included.

    Like transformers' `get_gguf_hf_weights_map`, without its walk over all modules with a table per module, which
    takes seconds. gguf knows names in base models and in parts of models, so leading parts of a name are removed
    until the rest is known; the fewest win.
    """
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map
    from transformers import modeling_gguf_pytorch_utils as gguf

    processor = gguf.TENSOR_PROCESSORS.get(architecture, gguf.TensorProcessor)(config=model.config.to_dict())
    arch = next((arch for arch, name in MODEL_ARCH_NAMES.items() if name == architecture), None)
    if arch is None:
        return {}
    known = get_tensor_name_map(arch, model.config.get_text_config().num_hidden_layers)
    names: dict[str, tuple[int, str]] = {}
    for name in model.state_dict():
        parts = name.split(".")
        for skipped in range(len(parts)):
            outer = "".join(f"{part}." for part in parts[:skipped])
            inner = processor.preprocess_name(".".join(parts[skipped:]))
            stem, dot, last = inner.rpartition(".")
            suffix = dot + last if last in ("weight", "bias") else ""
            own = known.get_name(stem if suffix else inner)
            into: dict[str, str] = {}
            if own is not None:
                into[own + suffix] = outer + inner
            else:
                processor.perform_fallback_tensor_mapping(into, suffix, outer, inner)
            for each, target in into.items():
                if each not in names or skipped < names[each][0]:
                    names[each] = (skipped, target)
    return {each: target for each, (_, target) in names.items()}


def _shaped(model: nn.Module, source: Source) -> Source:
    if source.conversion is TURNED:
        return replace(source, shapes={source.target: None})
    shapes = [dense_shape(tensor) for tensor, _ in source.tensors]
    if None in shapes or source.conversion is None:
        return replace(source, shapes={source.target: shapes[0]})
    try:
        blank = {
            tensor.name: torch.empty(shape, dtype=dense_dtype(tensor), device="meta")
            for (tensor, _), shape in zip(source.tensors, shapes, strict=True)
            if shape is not None
        }
        tensors = converted(model, source, blank)
    except CONVERSION_ERRORS as error:
        return replace(source, failure=str(error).strip() or type(error).__name__)
    return replace(source, shapes={name: tuple(value.shape) for name, value in tensors.items()})


def converted(model: Any, source: Source, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Convert dense `values` (by the names of `source.tensors`) of a `weight_map`'s source into the model's tensors."""
    if source.conversion is None:  # at most another name
        (value,) = values.values()
        return {source.target: value}
    conversion = copy.deepcopy(source.conversion)  # it collects what it is given
    for tensor, pattern in source.tensors:
        conversion.add_tensor(source.target, tensor.name, pattern, lambda held=values[tensor.name]: held)
    tensors = conversion.convert(source.target, model=model, config=model.config)
    return {name: value[0] if isinstance(value, list) else value for name, value in tensors.items()}


def steps(source: Source) -> Sequence[str]:
    """Return the names of the operations of a source's conversion (`MergeModulelist`, `Chunk`, …)."""
    return [type(step).__name__ for step in getattr(source.conversion, "operations", ())]

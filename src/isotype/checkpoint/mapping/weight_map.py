"""Finds, by names and shapes, the tensors of a checkpoint from which the tensors of a model are made."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from isotype.checkpoint.formats.headers import CheckpointHeaders
from isotype.checkpoint.formats.tensor import TensorHeader
from isotype.checkpoint.mapping.stored import StoredTensor, blank_tensors, stored_tensors, with_scheme
from isotype.model.experts.stack import shape_of

FROM_GGUF = "by transformers' `TensorProcessor` for GGUF files"
"""Name of the conversion of a GGUF file's tensors. It may change the order of the values, but not their number."""
_CONVERSION_ERRORS = (RuntimeError, ValueError, LookupError, TypeError, AttributeError, AssertionError)
"""Exceptions that transformers' conversions raise if the shapes or the number of tensors are unexpected."""


@dataclass(frozen=True)
class Source:
    """Tensors of a checkpoint that one conversion turns into one or more tensors of the model.

    Attributes:
        target: the name in the model to which transformers renames all `tensors`; a key of `shapes`.
        tensors: pairs (tensor in the checkpoint, pattern of the conversion that matches the tensor's name).
        conversion: transformers' `WeightConverter`, or `FROM_GGUF` for a tensor of a GGUF file. None if the source is one
            tensor that is used as stored, or only renamed.
        shapes: name in the model -> shape after the conversion; None if the headers do not determine this shape.
        failure: error that the conversion raised, or "".
    """

    target: str
    tensors: tuple[tuple[StoredTensor, str], ...]
    conversion: Any = None
    shapes: Mapping[str, tuple[int, ...] | None] = field(default_factory=dict)
    failure: str = ""

    @property
    def headers(self) -> tuple[TensorHeader, ...]:
        """The headers of all tensors and of their quantization constants."""
        return tuple(part for tensor, _ in self.tensors for part in tensor.parts)

    @property
    def steps(self) -> list[str]:
        """The class names of the conversion's operations (`MergeModulelist`, `Chunk`, …)."""
        return [type(step).__name__ for step in getattr(self.conversion, "operations", ())]


@dataclass(frozen=True)
class WeightMap:
    """The tensors of a checkpoint by their use in a model.

    Attributes:
        sources: name of a tensor of the model -> its source. Several tensors may share a source.
        surplus: tensors without a name in the model.
        doubled: (name in the model, tensor) for each tensor whose name in the model another tensor has, too.
    """

    sources: Mapping[str, Source]
    surplus: tuple[StoredTensor, ...]
    doubled: tuple[tuple[str, StoredTensor], ...]


def weight_map(model: nn.Module, headers: CheckpointHeaders) -> WeightMap:
    """Return the sources of a model's tensors in a checkpoint. The model is dense and may be on the meta device.

    For a transformers model, the conversions in `transformers.conversion_mapping` rename, split, stack and transpose
    tensors. For any other module, the names in the checkpoint and in the module must be equal.
    """
    stored = stored_tensors(headers.tensors, headers.quantization)
    gathered: dict[str, list[tuple[StoredTensor, str]]] = {}
    conversions: dict[str, Any] = {}
    surplus: list[StoredTensor] = []
    doubled: list[tuple[str, StoredTensor]] = []
    rename, in_order = _renaming(model, headers)
    for tensor in sorted(stored, key=lambda tensor: in_order(tensor.name)):
        target, pattern, conversion = rename(tensor.name)
        if tensor.quantized and target:
            path, _, leaf = target.rpartition(".")
            # A stacked weight is made of linear layers' weights.
            classes = type(model.get_submodule(path)).__mro__ if leaf == "weight" else (nn.Linear,)
            tensor = with_scheme(tensor, headers.quantization, target, [cls.__name__ for cls in classes])
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
        source = shaped(model, Source(target, tuple(tensors), conversions[target]))
        sources.update(dict.fromkeys(source.shapes or (source.target,), source))
    return WeightMap(sources, tuple(surplus), tuple(doubled))


def _renaming(
    model: Any, headers: CheckpointHeaders
) -> tuple[Callable[[str], tuple[str, str, Any]], Callable[[str], Any]]:
    """Return two functions of a tensor's name: to (model's name or "", matching pattern, conversion), and to a sort key."""
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
            # Stacked experts have names without `.weight` in the model.
            return names.get(name) or names.get(name.removesuffix(".weight"), ""), name, FROM_GGUF

        return lookup, loading.dot_natural_key
    renamings = [step for step in mapping if isinstance(step, loading.WeightRenaming)]
    converters = [step for step in mapping if isinstance(step, loading.WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    prefix = model.base_model_prefix

    def rename(name: str) -> tuple[str, str, Any]:
        # As in transformers' `convert_and_load_state_dict_in_model`.
        target, pattern = loading.rename_source_key(name, renamings, converters, prefix, wanted)
        if target not in wanted and name in wanted:
            target, pattern = loading.rename_source_key(name, [], [], prefix, wanted)
        if target not in wanted:
            return "", name, None
        return target, pattern or name, by_pattern[pattern] if pattern else None

    return rename, loading.dot_natural_key


def gguf_names(model: Any, architecture: str) -> Mapping[str, str]:
    """Return a map from names in a GGUF file to names in the model; both end in `.weight` or `.bias`.

    The names in gguf's table have no prefix such as `model.`. Therefore, leading parts of a name in the model are removed
    until the table contains the rest of the name. If several names match a name in the file, the name with the fewest
    removed parts is used. The function `get_gguf_hf_weights_map` of transformers takes seconds for this map.
    """
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map
    from transformers import modeling_gguf_pytorch_utils as gguf

    processor = gguf.TENSOR_PROCESSORS.get(architecture, gguf.TensorProcessor)(config=model.config.to_dict())
    arch = next((arch for arch, name in MODEL_ARCH_NAMES.items() if name == architecture), None)
    if arch is None:
        return {}
    name_map = get_tensor_name_map(arch, model.config.get_text_config().num_hidden_layers)
    names: dict[str, tuple[int, str]] = {}
    for name in model.state_dict():
        parts = name.split(".")
        for skipped in range(len(parts)):
            outer = "".join(f"{part}." for part in parts[:skipped])
            inner = processor.preprocess_name(".".join(parts[skipped:]))
            stem, dot, last = inner.rpartition(".")
            suffix = dot + last if last in ("weight", "bias") else ""
            in_file = name_map.get_name(stem if suffix else inner)
            into: dict[str, str] = {}
            if in_file is not None:
                into[in_file + suffix] = outer + inner
            else:
                processor.perform_fallback_tensor_mapping(into, suffix, outer, inner)
            for key, target in into.items():
                if key not in names or skipped < names[key][0]:
                    names[key] = (skipped, target)
    return {key: target for key, (_, target) in names.items()}


def shaped(model: nn.Module, source: Source) -> Source:
    """Return a source with the `shapes` or the `failure` of its conversion. The conversion is run on the meta device."""
    if source.conversion is FROM_GGUF:
        return replace(source, shapes={source.target: None})
    shapes = [tensor.dense_shape for tensor, _ in source.tensors]
    if None in shapes or source.conversion is None:
        return replace(source, shapes={source.target: shapes[0]})
    try:
        tensors = converted(model, source, blank_tensors(tensor for tensor, _ in source.tensors))
    except _CONVERSION_ERRORS as error:
        return replace(source, failure=str(error).strip() or type(error).__name__)
    return replace(source, shapes={name: tuple(value.shape) for name, value in tensors.items()})


def converted(model: Any, source: Source, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Convert a source's dense `values` (by name in the files) into tensors of the model (by name in the model)."""
    if source.conversion is None:
        (value,) = values.values()
        return {source.target: value}
    conversion = copy.deepcopy(source.conversion)  # `add_tensor` changes the conversion
    for tensor, pattern in source.tensors:
        conversion.add_tensor(source.target, tensor.name, pattern, lambda value=values[tensor.name]: value)
    tensors = conversion.convert(source.target, model=_Shapes(model, source.shapes), config=model.config)
    return {name: value[0] if isinstance(value, list) else value for name, value in tensors.items()}


class _Shapes:
    """Replaces the model for a conversion that reads a dense weight's shape (`Transpose(check_dims=True)`). The weight
    of the model may have another shape, because it is quantized already, or has more rows than the part to convert.
    """

    def __init__(self, model: nn.Module, shapes: Mapping[str, tuple[int, ...] | None]) -> None:
        self._model, self._shapes = model, shapes

    def get_parameter(self, name: str) -> torch.Tensor:
        owner, _, leaf = name.rpartition(".")
        shape = self._shapes.get(name) or shape_of(self._model.get_submodule(owner), leaf)
        return torch.empty(shape, device="meta")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

"""The weights of a checkpoint by the names that the model has for them, read one at a time."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from isotype.checkpoint.blank import NoDraws
from isotype.checkpoint.formats.config import BUILD_ERRORS
from isotype.checkpoint.formats.headers import CheckpointHeaders, read_headers
from isotype.checkpoint.formats.tensor import TensorHeader
from isotype.checkpoint.load import concrete_class
from isotype.core.errors import CheckpointError, Problem


@dataclass(frozen=True)
class _Source:
    """What one or several tensors of a model are made of: transformers' conversion, if any, and the tensors it takes."""

    conversion: Any
    target: str
    tensors: tuple[tuple[TensorHeader, str], ...]


class StoredWeights:
    """The tensors of a checkpoint by the names that `model` has for them.

    transformers renames, splits, stacks and turns tensors while it loads them; the steps are its own
    (`transformers.core_model_loading`), for one tensor of the model at a time.

    Attributes:
        shapes: shape of every tensor of the model that the checkpoint has.
    """

    def __init__(self, model: Any, headers: CheckpointHeaders) -> None:
        self._model = model
        self._sources = _sources(model, headers)
        self._made_by: dict[str, _Source] = {}
        self.shapes: dict[str, torch.Size] = {}
        for source in self._sources.values():
            # On the meta device, to learn the names and shapes of the tensors that it makes.
            blank = {header.name: _blank(header) for header, _ in source.tensors}
            for name, value in _converted(model, source, blank).items():
                self._made_by[name] = source
                self.shapes[name] = value.shape

    def read(self, name: str) -> torch.Tensor:
        """The tensor that the model calls `name`, in the dtype it is stored in; memory-mapped where it is stored so."""
        source = self._made_by[name]
        values = {header.name: _read(header) for header, _ in source.tensors}
        return _converted(self._model, source, values)[name]


def _sources(model: Any, headers: CheckpointHeaders) -> dict[str, _Source]:
    """What transformers' loader gathers (`convert_and_load_state_dict_in_model`), with headers for tensors."""
    from transformers import core_model_loading as loading
    from transformers.conversion_mapping import get_model_conversion_mapping

    mapping = get_model_conversion_mapping(model)
    renamings = [each for each in mapping if isinstance(each, loading.WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, loading.WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    wanted, prefix = model.state_dict(), model.base_model_prefix
    found: dict[str, _Source] = {}
    for header in sorted(headers.tensors, key=lambda each: loading.dot_natural_key(each.name)):
        target, pattern = loading.rename_source_key(header.name, renamings, converters, prefix, wanted)
        if target not in wanted and header.name in wanted:
            target, pattern = loading.rename_source_key(
                header.name, [], [], base_model_prefix=prefix, meta_state_dict=wanted
            )
        if target not in wanted:
            continue
        known = found.get(target) or _Source(by_pattern[pattern] if pattern else None, target, ())
        found[target] = _Source(known.conversion, target, (*known.tensors, (header, pattern or header.name)))
    return found


def _converted(model: Any, source: _Source, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    if source.conversion is None:  # at most another name
        (value,) = values.values()
        return {source.target: value}
    conversion = copy.deepcopy(source.conversion)  # it collects what it is given
    for header, pattern in source.tensors:
        conversion.add_tensor(source.target, header.name, pattern, lambda held=values[header.name]: held)
    made = conversion.convert(source.target, model=model, config=model.config)
    return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def _blank(header: TensorHeader) -> torch.Tensor:
    return torch.empty(header.shape, dtype=header.dtype, device="meta")


def _read(header: TensorHeader) -> torch.Tensor:
    # Opened for each tensor: pages of a file that stays mapped count as memory in use.
    with safe_open(header.file, framework="pt") as file:
        value: torch.Tensor = file.get_tensor(header.name)
    return value


def blank_model(config: Any) -> Any:
    """The model of a config with parameters on the meta device and real buffers, float32, in evaluation mode.

    Raises:
        CheckpointError: the config names no class that transformers has, or one that it does not fit.
    """
    from accelerate import init_empty_weights
    from transformers.initialization import no_init_weights

    config = copy.deepcopy(config)
    cls = concrete_class(config)
    config.dtype = torch.float32
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with init_empty_weights(include_buffers=False), no_init_weights(), NoDraws():
            model = cls(config)
    except BUILD_ERRORS as error:
        given = f"{cls.__name__} fails with {type(error).__name__}: {error}"
        fix = "take config.json and transformers as the checkpoint was published with"
        expected = "a config that the class can be built from"
        raise CheckpointError(
            "the config does not fit its model class", [Problem(given, expected, fix)]
        ) from error
    finally:
        torch.set_default_dtype(before)
    model.tie_weights()
    return model.eval()


def fill_buffers(model: nn.Module, stored: StoredWeights) -> None:
    """Give a model's buffers the values that the checkpoint has for them."""
    for name, buffer in model.named_buffers():
        if name in stored.shapes:
            buffer.copy_(stored.read(name))


def stored_weights(model: Any, directory: Path) -> StoredWeights:
    """The weights in `directory` for `model`, which may lie on the meta device."""
    return StoredWeights(model, read_headers(directory))

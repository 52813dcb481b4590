"""Loads a checkpoint, and stores each weight in the dtype or format that the policy determines.

transformers' `from_pretrained` builds the model, and isotype streams the weights from the files.
"""

import copy
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from isotype.checkpoint.block_streaming import DeferredBlocks
from isotype.checkpoint.checkpoint import Checkpoint, open_checkpoint
from isotype.checkpoint.facts import quantization_options
from isotype.checkpoint.fill import Filler
from isotype.checkpoint.formats.headers import CheckpointHeaders, headers_of_files, read_headers
from isotype.checkpoint.formats.hub import commit_of
from isotype.checkpoint.formats.mapped import MappedFiles
from isotype.checkpoint.formats.tensor import TensorHeader
from isotype.checkpoint.mapping.match import Match, match
from isotype.checkpoint.mapping.stored import blank_tensors, stored_tensors
from isotype.checkpoint.stored_weights import StoredWeights
from isotype.checkpoint.values import dense
from isotype.checkpoint.weightless import (
    concrete_class,
    forget_quantization,
    note_quantization,
    quantized_weights,
    wanted_quantization,
)
from isotype.compat.hub import asking
from isotype.compat.transformers import (
    class_for_load,
    conversions,
    mark_as_loaded,
    own_class_again,
    rename,
    set_conversions,
    without_bars,
)
from isotype.core.dtypes import to_safetensors_name
from isotype.core.errors import CheckpointError, PrecisionError
from isotype.core.formats import QUANTIZATIONS
from isotype.core.names import listed
from isotype.core.pretrained import pretrained
from isotype.core.threads import undisturbed
from isotype.model.boundary_choice import float32_by_ranges
from isotype.model.enforce import contradiction, enforce_model
from isotype.model.experts.quantize import formats_of_stacks
from isotype.model.experts.stack import quantized_stack, stacked_weights
from isotype.model.finite import not_finite, refuse
from isotype.model.quantized import leave_dense, store_layers
from isotype.model.targets import remember_drawn
from isotype.model.walk import places
from isotype.precision.policy import PrecisionPolicy

_CHOICES = frozenset({"attn_implementation", "experts_implementation"})
"""Arguments that are passed to `from_pretrained`, although the config has fields with these names."""


def load(
    path: str | Path | Checkpoint,
    policy: PrecisionPolicy,
    *,
    model_class: type | None = None,
    device_map: Any = None,
    deferred: DeferredBlocks | None = None,
    **kwargs: Any,
) -> Any:
    """Load a model (not an adapter), with the arguments and errors of `isotype.load`. `path` may be an open
    checkpoint.

    If `deferred` is not None, it gets the sources of the blocks' weights, and reads these weights later.
    """
    checkpoint = open_checkpoint(path, kwargs.pop("revision", None))
    source, facts = checkpoint.source, checkpoint.facts
    if facts.saved_format not in (None, policy.storage):
        raise contradiction(f"{facts.source}, saved in {facts.saved_format},", policy)
    headers = checkpoint.headers if checkpoint.gguf else None
    config = copy.deepcopy(checkpoint.model_config)
    name: Path | str | None = source
    if headers is not None or (facts.quantization is not None and facts.saved_format is None):
        forget_quantization(config)
        for key in {key for key in kwargs if hasattr(config, key)} - _CHOICES:
            setattr(config, key, kwargs.pop(key))
        kwargs["config"] = config
    if headers is not None:
        name, kwargs["state_dict"] = None, {}  # with a state dict, transformers does not search for files
    if isinstance(source, str) and checkpoint.revision is not None:
        kwargs["revision"] = checkpoint.revision
    if (quantization := wanted_quantization(policy, facts.saved_format)) is not None:
        kwargs.setdefault("quantization_config", quantization)
    cls = concrete_class(config, model_class)
    reading = _Reading(checkpoint.name, policy, headers, deferred)
    loading = class_for_load(cls, partial(float32_by_ranges, policy=policy), reading)
    if not device_map and torch.cuda.is_available() and policy.device != "cpu":
        device_map = {"": torch.cuda.current_device()}
    with without_bars(), asking(source):
        model = pretrained(loading, name, dtype=policy.plain, device_map=device_map or None, **kwargs)
    own_class_again(model)
    refuse(checkpoint.name, reading.broken)
    remember_drawn(model, reading.lacking)
    if policy.trainable == "lora":
        model.requires_grad_(False)
    note_quantization(model, policy)
    if policy.experts and not policy.quantized:
        # The experts are saved in the checkpoint's format.
        model.config.quantization_config = dict(quantization_options(checkpoint.model_config))
    _save_stacks_whole(model)
    if headers is not None:
        model.name_or_path = checkpoint.name  # PEFT saves this name as the adapter's base
        rename(model.config, checkpoint.name)
    if isinstance(source, str):
        model.loaded_commit = commit_of(source, checkpoint.revision)  # for the adapter's `revision`
    enforce_model(model, policy)
    return model


@dataclass
class _Reading:
    """Reads the weights for `from_pretrained` from the files of `headers`, or from the files that transformers finds.

    Attributes:
        broken: name of a parameter that is not finite -> problem.
        lacking: names of the tensors that no file contains.
    """

    source: str
    policy: PrecisionPolicy
    headers: CheckpointHeaders | None
    deferred: DeferredBlocks | None
    broken: Mapping[str, str] = field(default_factory=dict)
    lacking: Collection[str] = ()

    def __call__(
        self, model: Any, state_dict: Any, files: Any, settings: Any, load: Callable[[], Any]
    ) -> Any:
        if self.headers is not None or can_stream(state_dict, files, settings):
            headers = self.headers or headers_of_files(self.source, files)
            info, self.broken = stream(model, headers, settings, self.policy, self.deferred)
            self.lacking = info.missing_keys
            return info, None
        if self.policy.layers or _quantized(self.source, files):
            raise _not_streamed(self.source, self.policy)
        loaded = load()
        self.lacking = loaded[0].missing_keys
        self.broken = not_finite(model.named_parameters())  # not buffers: masks may contain infinity
        return loaded


def _quantized(source: str, files: Sequence[str] | None) -> bool:
    """Return True if a weight is stored in a quantized format that isotype dequantizes, and not transformers."""
    readable = [file for file in files or () if str(file).endswith((".safetensors", ".bin"))]
    headers = headers_of_files(source, readable) if readable else None
    stored = stored_tensors(headers.tensors, headers.quantization) if headers else ()
    return any(tensor.scheme is not None or tensor.problem is not None for tensor in stored)


def _not_streamed(source: object, policy: PrecisionPolicy) -> PrecisionError:
    what, mixed, fix = "quantized checkpoint", "saved quantized", "load it without these arguments"
    if policy.layers:
        what, mixed, fix = "mixed base", "under a policy of mixed storage", f"{fix}, or with quantization nf4"
    request = f"{source}, {mixed}, with a device map to disk, ignore_mismatched_sizes or a state_dict"
    expected = "arguments that let isotype read each weight from a file"
    return PrecisionError.of(f"a {what} cannot be loaded with these arguments", request, expected, fix)


# ------------------------------------------------------------------------------------------------------ streaming
# transformers finds and downloads files, builds the class, chooses the layers to quantize, ties weights, computes buffers
# and sets generation settings; `isotype.checkpoint.fill` reads the weights.


def can_stream(state_dict: object, files: Sequence[str] | None, settings: Any) -> bool:
    """Return True if isotype can stream the weights for `from_pretrained`; otherwise transformers must load them."""
    from transformers.integrations import is_deepspeed_zero3_enabled, is_fsdp_enabled

    elsewhere = "disk" in (settings.device_map or {}).values() or settings.device_mesh is not None
    quantizer = settings.hf_quantizer
    foreign = quantizer is not None and quantizer.quantization_config.quant_method != "bitsandbytes"
    return (
        state_dict is None
        and bool(files)
        and all(str(file).endswith((".safetensors", ".bin")) for file in files or ())
        and not (elsewhere or foreign or settings.ignore_mismatched_sizes or settings.disable_mmap)
        and not (is_deepspeed_zero3_enabled() or is_fsdp_enabled())
    )


def stream(
    model: Any,
    headers: CheckpointHeaders,
    settings: Any,
    policy: PrecisionPolicy,
    deferred: DeferredBlocks | None = None,
) -> tuple[Any, dict[str, str]]:
    """Fill a model from the files of a checkpoint. The model is on the meta device, and has bitsandbytes' quantized
    layers.

    Returns transformers' `LoadStateDictInfo`, and name -> problem for each parameter that is not finite. Raises
    CheckpointError if a file is damaged, or tensors are missing, duplicate or of another shape than the model's.
    """
    store_layers(model, policy)
    matched = match(model, headers)
    matched.require_complete()
    leave_dense(model, matched.initialised, policy.plain)
    expected = set(model.state_dict())  # before quantized layers add their constants
    stored = StoredWeights(model, headers, matched.weights)
    filler = _filler(stored, settings, policy)
    filled, broken = filler.fill(stored.sources if deferred is None else deferred.take(filler))
    filled |= set() if deferred is None else deferred.names
    for name in filled:
        # transformers would draw new values for parameters without this mark.
        stacked = name in filler.stacks
        mark_as_loaded(filler.owner(name)[0] if stacked else model.get_parameter_or_buffer(name))
    return _loading_info(expected - filled, matched), broken


def _filler(stored: StoredWeights, settings: Any, policy: PrecisionPolicy) -> Filler:
    from transformers.integrations.accelerate import get_device

    model: Any = stored.model
    quantizer, device_map = settings.hf_quantizer, settings.device_map or {"": "cpu"}
    other = {f"{layer.module}.weight" for layer in policy.layers if layer.storage in QUANTIZATIONS}
    names = () if quantizer is None else model.state_dict()
    quantized = {n for n in names if quantizer.param_needs_quantization(model, n) or n in other}
    skipped = () if quantizer is None else quantizer.modules_to_not_convert or ()
    stacks = {} if quantizer is None and policy.quantized else formats_of_stacks(model, policy, skipped)
    device = partial(get_device, device_map, valid_torch_device=True)
    return Filler(stored, policy, quantized, tuple(settings.dtype_plan), stacks, device)


def _save_stacks_whole(model: Any) -> None:
    """Remove the conversions that would split a quantized weight of stacked experts when the model is saved."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange

    stacks = [f"{path}.{leaf}" for path, m, leaf in stacked_weights(model) if quantized_stack(m, leaf)]
    if not stacks:
        return
    # The default is that of transformers' `revert_weight_conversion`.
    steps = conversions(model) or get_model_conversion_mapping(model, add_legacy=False)

    def splits(step: Any) -> bool:
        # A renaming has no operations. Its new name is not a pattern, because it may contain `\1`, a group of the old name.
        if not hasattr(step, "operations"):
            return False
        patterns = [pattern.replace("*", ".*") for pattern in step.target_patterns]
        return any(re.search(f"{pattern}$", name) for pattern in patterns for name in stacks)

    set_conversions(model, [s for s in steps if not isinstance(s, PrefixChange) and not splits(s)])


def _loading_info(missing: set[str], matched: Match) -> Any:
    from transformers.modeling_utils import LoadStateDictInfo

    empty = {"error_msgs": list, "conversion_errors": dict}
    info = {field.name: empty.get(field.name, set)() for field in fields(LoadStateDictInfo)}
    info["missing_keys"] = missing
    info["unexpected_keys"] = {tensor.weight.name for tensor in matched.surplus}
    return LoadStateDictInfo(**info)


# ------------------------------------------------------------------------------------- modules of other libraries


class StateDictAdapter(Protocol):
    """Converts the tensors of a checkpoint into the tensors of a module, and back: `to_hf(from_hf(state))` equals
    `state`.

    The conversion may rename, split, join, stack and transpose tensors.
    """

    def from_hf(self, state: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Convert the checkpoint's tensors, which may be on the meta device, into the module's tensors by name."""

    def to_hf(self, state: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Convert the module's tensors back into the checkpoint's tensors by name."""


@undisturbed
def load_module(
    model: nn.Module,
    path: Path,
    policy: PrecisionPolicy,
    *,
    adapter: StateDictAdapter | None = None,
    device: Any = "cpu",
) -> None:
    """Fill `model` from the checkpoint at `path` in place, and enforce the policy.

    If the policy is quantized, bitsandbytes layers replace linear layers.

    Args:
        model: any module. Parameters may be on the meta device, and so may buffers that the checkpoint contains.
        path: checkpoint directory or .safetensors file.
        policy: from `isotype.resolve_precision`.
        adapter: conversion of the tensors. It is needed if the names or shapes of the module differ from those of the
            checkpoint.

    Raises:
        CheckpointError: a tensor is missing, duplicate, not finite or wrongly shaped, or a buffer on the meta device is in
            no file.
    """
    headers = read_headers(path)
    matched = match(model, _adapted(headers, adapter) if adapter is not None else headers)
    matched.require_complete()
    blank = [name for name in matched.buffers if model.get_buffer(name).is_meta]
    if blank:
        what = f"{type(model).__name__} with {listed(blank, 6)} on the meta device and in no file"
        fix = "build the module with accelerate.init_empty_weights(include_buffers=False), or on the CPU"
        raise CheckpointError.of("buffers without values", what, "buffers with values", fix)
    if policy.quantized:
        _quantize(model, policy)
    kinds = ("linear4bit", "linear8bit")
    quantized = frozenset(f"{place.name}.weight" for place in places(model) if place.kind in kinds)
    stacks = formats_of_stacks(model, policy)
    stored = StoredWeights(model, headers, matched.weights)
    filler = Filler(stored, policy, quantized, policy.pinned, stacks, lambda _: device)
    if adapter is None:
        _, broken = filler.fill(stored.sources)
    else:
        files = MappedFiles()
        weights = stored_tensors(headers.tensors, headers.quantization)
        state = {tensor.name: dense(tensor, files.tensor, policy.plain) for tensor in weights}
        tensors = {name: filler.place(name, value) for name, value in adapter.from_hf(state).items()}
        broken = not_finite((n, value) for n, value in tensors.items() if isinstance(value, nn.Parameter))
    refuse(path, broken)
    for name, source in matched.tied.items():
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, model.get_parameter(source))
    model.requires_grad_(policy.trainable != "lora")
    model.eval()
    enforce_model(model, policy)


def restore(model: nn.Module, path: Path, place: Callable[[torch.Tensor, torch.Tensor], object]) -> None:
    """Call `place(tensor, weight)` for each tensor of the model, with the weight that `save_pretrained` has saved at `path`.

    Raises CheckpointError if a weight is missing or has another shape than the model's tensor.
    """
    headers, files = read_headers(path), MappedFiles()
    matched = match(model, headers)
    matched.require_complete()
    stored, state = StoredWeights(model, headers, matched.weights), model.state_dict()
    for source in {id(source): source for source in stored.sources.values()}.values():
        for name, value in stored.read_source(source, files, torch.float32).items():
            place(state[name], value)


def _adapted(headers: CheckpointHeaders, adapter: StateDictAdapter) -> CheckpointHeaders:
    """Apply `adapter` to meta tensors with the checkpoint's shapes, and return headers of the resulting tensors."""
    adapted = adapter.from_hf(blank_tensors(stored_tensors(headers.tensors, headers.quantization)))
    tensors = tuple(
        TensorHeader(name, to_safetensors_name(value.dtype), tuple(value.shape), value.nbytes, headers.path)
        for name, value in adapted.items()
    )
    return CheckpointHeaders(headers.path, headers.format, headers.kind, tensors, headers.metadata)


def _quantize(model: nn.Module, policy: PrecisionPolicy) -> None:
    from transformers.integrations import replace_with_bnb_linear

    chosen = {name.removesuffix(".weight") for name in quantized_weights(model, policy)}
    linear = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    wanted = wanted_quantization(policy, None)
    replace_with_bnb_linear(model, modules_to_not_convert=list(linear - chosen), quantization_config=wanted)
    store_layers(model, policy)

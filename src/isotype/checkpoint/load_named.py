"""`isotype.load`: loads a model, or a saved adapter and its base, and fills modules that are not from transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from isotype.checkpoint.adapter import (
    attach,
    base_policy,
    inference_policy,
    is_adapter,
    load_base,
    read_adapter,
)
from isotype.checkpoint.fill import Placement, fill
from isotype.checkpoint.formats.headers import CheckpointHeaders, read_headers
from isotype.checkpoint.formats.mapped import MappedFiles
from isotype.checkpoint.formats.tensor import TensorHeader
from isotype.checkpoint.load import load as load_model
from isotype.checkpoint.load import tokenizer_source
from isotype.checkpoint.load_plan import quantized_weights
from isotype.checkpoint.mapping.match import match
from isotype.checkpoint.mapping.stored import blank_tensors, stored_tensors
from isotype.checkpoint.opened import open_checkpoint
from isotype.checkpoint.stored_weights import StoredWeights
from isotype.checkpoint.tokenizer import tokenizer_of
from isotype.checkpoint.values import dense
from isotype.checkpoint.weightless import wanted_quantization
from isotype.compat.bitsandbytes import hide_missing_kernel
from isotype.core.dtypes import to_safetensors_name
from isotype.core.errors import CheckpointError
from isotype.core.names import listed
from isotype.model.enforce import enforce_model
from isotype.model.experts.quantize import formats_of_stacks
from isotype.model.finite import not_finite, refuse
from isotype.model.quantized import store_layers
from isotype.model.walk import places
from isotype.precision.devices.probe import require_present
from isotype.precision.policy import PrecisionPolicy


def load(
    path: str | Path,
    policy: PrecisionPolicy | None = None,
    *,
    model_class: type | None = None,
    device_map: Any = None,
    **kwargs: Any,
) -> Any:
    """Load the model at `path` under `policy`, in evaluation mode. If `path` is an adapter, load it on its base model.

    The policy gives the dtype or format of each weight. A checkpoint that is already quantized keeps its quantization
    states, constants and compute dtype. The model's attribute `precision_policy` is the policy.

    The adapter may be saved by isotype or by PEFT. Its adapter_config.json names the base model and the base model's
    commit. The adapter's values are not rounded and can be trained further.

    Args:
        path: checkpoint directory, GGUF file, hub id, `embedded:smollm2`, or an adapter's directory.
        policy: policy from `isotype.resolve_precision`; for an adapter, the policy of the base. Default: the directory's
            precision_policy.json, adapted to this machine, else `resolve_precision`'s choice.
        model_class: a transformers model class or auto class; default: the class that the config names, or the head
            that the adapter was trained with.
        device_map: as in `from_pretrained`; default: the policy's device if this machine has it.
        **kwargs: arguments of the (base) model's `from_pretrained`, such as `revision` and `attn_implementation`, but
            not `trust_remote_code`.

    Raises:
        CheckpointError: `path` is not a checkpoint, its format is unsupported, its shapes contradict its config, or values
            are not finite; or an adapter's base does not exist or does not fit.
        PrecisionError: the checkpoint is already quantized, in another format than the policy's storage.
    """
    hide_missing_kernel()
    revision = kwargs.pop("revision", None)
    kwargs |= {"model_class": model_class, "device_map": device_map}
    if not is_adapter(path):
        policy = policy or inference_policy(path, PrecisionPolicy.read(path), revision=revision)
        return load_model(path, policy, revision=revision, **kwargs)
    adapter = read_adapter(path, revision)
    # `base_policy` also raises the error for an adapter whose config names no base.
    policy = policy if policy and adapter.base else base_policy(adapter)
    return attach(load_base(adapter, policy, **kwargs), adapter).eval()


def load_for_inference(
    path: str | Path,
    dtype: str = "auto",
    quantization: str | None = None,
    device: str = "auto",
    revision: str | None = None,
) -> tuple[Any, Any, PrecisionPolicy]:
    """Load a model, or an adapter on its base, for calls without autocast; return (model, tokenizer, policy).

    The tokenizer is None if neither the adapter nor the base has one.

    Args:
        path: directory of an adapter or a model, GGUF file, hub id or `embedded:smollm2`.
        dtype: compute dtype; `"auto"` means the dtype of the training.
        quantization: storage of the base weights; None for the storage of the training, `"none"` for no quantization.
        revision: branch, tag or commit of a model on the hub. For an adapter, the revision of its base; default: the
            commit that the adapter was trained on.

    Raises:
        CheckpointError: there is no model, or adapter and base do not fit.
        PrecisionError: the device or the libraries cannot run the requested policy.
        UsageError: the device is not in this machine.
    """
    profile = require_present(device)
    adapter = read_adapter(path, revision) if is_adapter(path) else None
    tokenizer, base = None, path
    if adapter is None:
        saved = PrecisionPolicy.read(path)
        policy = inference_policy(path, saved, dtype, quantization, profile.name, revision)
        policy = replace(policy, master=torch.float32)
    else:
        policy, revision = base_policy(adapter, dtype, quantization, profile.name), adapter.revision
        tokenizer, base = tokenizer_of(adapter.directory), str(adapter.base)
    tokenizer = tokenizer or tokenizer_of(tokenizer_source(open_checkpoint(base, revision)), revision)
    device_map = None if profile.kind == "cpu" else {"": profile.name}
    return load(path, policy, device_map=device_map, revision=revision).eval(), tokenizer, policy


class StateDictAdapter(Protocol):
    """Converts a checkpoint's tensors into a module's tensors, and back: `to_hf(from_hf(state))` equals `state`.

    The conversion may rename, split, join, stack and transpose tensors.
    """

    def from_hf(self, state: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Convert the checkpoint's tensors, which may be on the meta device, into the module's tensors by name."""

    def to_hf(self, state: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Convert the module's tensors back into the checkpoint's tensors by name."""


def load_module(
    model: nn.Module,
    path: Path,
    policy: PrecisionPolicy,
    *,
    adapter: StateDictAdapter | None = None,
    device: Any = "cpu",
) -> None:
    """Fill `model` from the checkpoint at `path` in place, and enforce the policy.

    If the policy is quantized, linear layers are replaced by bitsandbytes layers.

    Args:
        model: any module. Its parameters, and the buffers that the checkpoint contains, may be on the meta device.
        path: checkpoint directory or .safetensors file.
        policy: from `isotype.resolve_precision`.
        adapter: conversion of the tensors, needed if the module's names or shapes differ from the checkpoint's.

    Raises:
        CheckpointError: a tensor is missing, duplicate, not finite or wrongly shaped, or no file has the values of a
            buffer that is on the meta device.
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
    placement = Placement(model, policy, quantized, policy.pinned, stacks, lambda _: device)
    if adapter is None:
        stored = StoredWeights(model, headers, matched.weights)
        _, broken = fill(stored, stored.sources, placement)
    else:
        files = MappedFiles()
        held = stored_tensors(headers.tensors, headers.quantization)
        state = {tensor.name: dense(tensor, files.tensor, policy.plain) for tensor in held}
        tensors = {name: placement.place(name, value) for name, value in adapter.from_hf(state).items()}
        broken = not_finite((n, value) for n, value in tensors.items() if isinstance(value, nn.Parameter))
    refuse(path, broken)
    for name, source in matched.tied.items():
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, model.get_parameter(source))
    model.requires_grad_(policy.trainable != "lora")
    model.eval()
    enforce_model(model, policy)


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

"""`isotype.load`: loads a model, or a saved adapter and its base."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from isotype.checkpoint.adapter import (
    attach,
    base_policy,
    inference_policy,
    is_adapter,
    load_base,
    read_adapter,
)
from isotype.checkpoint.load import load as load_model
from isotype.checkpoint.opened import open_checkpoint
from isotype.compat.bitsandbytes import hide_missing_kernel
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
    """Load a model, or an adapter on its base, for calls without autocast; return (model, tokenizer or None, policy).

    `dtype` and `quantization` are arguments of `inference_policy`. `load` describes the other arguments and the errors.
    Raises UsageError if the device is not in this machine.
    """
    profile = require_present(device)
    adapter = read_adapter(path, revision) if is_adapter(path) else None
    if adapter is None:
        saved = PrecisionPolicy.read(path)
        policy = inference_policy(path, saved, dtype, quantization, profile.name, revision)
        policy = replace(policy, master=torch.float32)
        tokenizer = open_checkpoint(path, revision).tokenizer()
    else:
        policy = base_policy(adapter, dtype, quantization, profile.name)
        tokenizer = adapter.tokenizer()
    device_map = None if profile.kind == "cpu" else {"": profile.name}
    return load(path, policy, device_map=device_map, revision=revision).eval(), tokenizer, policy

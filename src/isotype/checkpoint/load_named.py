"""`isotype.load`: load a model, or a saved adapter on its base, from any name; and for a chat."""

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
from isotype.checkpoint.load import tokenizer_source
from isotype.checkpoint.opened import open_checkpoint
from isotype.checkpoint.tokenizer import tokenizer_of
from isotype.core.errors import UsageError
from isotype.precision.devices.profile import device_profile
from isotype.precision.policy import PrecisionPolicy


def load(
    path: str | Path,
    policy: PrecisionPolicy | None = None,
    *,
    model_class: type | None = None,
    device_map: Any = None,
    **kwargs: Any,
) -> Any:
    """Load the model at `path` under `policy`; an adapter's folder becomes a PEFT model, the adapter on its base.

    Quantized, pinned and plain weights take the policy's dtypes; a checkpoint saved quantized keeps its quantization
    states, constants and compute dtype. The model's attribute `precision_policy` is the policy.

    An adapter (`runs/sft`, one of its checkpoint folders, or any saved by PEFT) is put on the base, at the commit,
    that its adapter_config.json names. Its trained values are not rounded and can be trained further; `enforce`,
    `fuse` and PEFT's own methods work as after `add_lora`. Like any loaded model it is in evaluation mode.

    Args:
        path: checkpoint directory, GGUF file, hub id, `embedded:smollm2`, or an adapter's directory.
        policy: from `isotype.resolve_precision`, for an adapter of its base. Default: the directory's
            precision_policy.json, adapted to this machine, else `resolve_precision`'s choice.
        model_class: a transformers model class or auto class; default: the class that the config names, or the head
            that the adapter was trained with.
        device_map: as in `from_pretrained`; default: the policy's device if it is present.
        **kwargs: passed to `from_pretrained` (`revision`, `attn_implementation`, …; not `trust_remote_code`), of the
            base for an adapter.

    Raises:
        CheckpointError: `path` is no checkpoint, or has an unsupported format, shapes that differ from its config's,
            or values that are not finite; an adapter's base does not exist or does not fit.
        PrecisionError: the checkpoint is saved quantized in another format than the policy's storage.
    """
    revision = kwargs.pop("revision", None)
    more = {**kwargs, "model_class": model_class}
    if not is_adapter(path):
        if policy is None:
            saved = PrecisionPolicy.read(Path(path)) if Path(path).is_dir() else None
            policy = inference_policy(path, saved, revision=revision)
        return load_model(path, policy, device_map=device_map, revision=revision, **more)
    adapter = read_adapter(path)
    revision = revision or adapter.revision
    # Without a policy this also reports, with a file to correct, a config without a base.
    policy = policy if policy and adapter.base else base_policy(adapter, "auto", None, "auto", revision)
    base = load_base(adapter, str(adapter.base), policy, device_map, revision, **more)
    return attach(base, adapter).eval()


def load_for_inference(
    path: str | Path,
    dtype: str = "auto",
    quantization: str | None = None,
    device: str = "auto",
    revision: str | None = None,
) -> tuple[Any, Any, PrecisionPolicy]:
    """Load a model or an adapter on its base, ready to be called without autocast, in evaluation mode.

    Args:
        path: directory of an adapter or a model, GGUF file, hub id or `embedded:smollm2`.
        dtype: compute dtype; `"auto"`: as trained.
        quantization: storage of the base weights; None: as trained, `"none"`: not quantized.
        revision: branch, tag or commit of a hub id: of `path`, or of an adapter's base instead of the one it was
            trained on.

    Returns:
        (model, tokenizer, policy); tokenizer is None if neither adapter nor base has one.

    Raises:
        CheckpointError: there is no model, or adapter and base do not fit.
        PrecisionError: the device or the libraries cannot run it as requested.
        UsageError: the device is not in this machine.
    """
    profile = device_profile(device)
    if not profile.present:
        headline, what = f"{profile.title} is not in this machine", f"device {device}"
        raise UsageError.of(headline, what, "a device that is here", "leave the device out")
    adapter = read_adapter(path) if is_adapter(path) else None
    tokenizer, base = None, path
    if adapter is None:
        saved = PrecisionPolicy.read(path) if Path(path).is_dir() else None
        policy = inference_policy(path, saved, dtype, quantization, profile.name, revision)
        policy = replace(policy, master=torch.float32)
    else:
        revision = revision or adapter.revision
        policy = base_policy(adapter, dtype, quantization, profile.name, revision)
        tokenizer, base = tokenizer_of(adapter.directory), str(adapter.base)
    tokenizer = tokenizer or tokenizer_of(tokenizer_source(open_checkpoint(base, revision)), revision)
    device_map = None if profile.kind == "cpu" else {"": profile.name}
    return load(path, policy, device_map=device_map, revision=revision).eval(), tokenizer, policy

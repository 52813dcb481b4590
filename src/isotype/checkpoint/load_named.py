"""A model, or a saved adapter on its base, by whatever names it: `isotype.load`, and as a chat wants it."""

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
    """Load the model at `path` under `policy`; of an adapter's folder a PEFT model, the adapter on its base.

    Quantized, pinned and plain weights take the dtypes the policy names; a checkpoint that is saved quantized
    has its quantization states, constants and compute dtype brought along. The policy is left on the model as
    the attribute `precision_policy`.

    An adapter (`runs/sft`, one of its checkpoint folders, or any that PEFT has saved) is put on the base that its
    adapter_config.json names, at the commit that it names. Its trained values keep every digit of their file and can be trained
    further; `enforce`, `fuse` and PEFT's own methods take the model as they take one of `add_lora`. It is in evaluation mode, as is
    any model that was loaded.

    Args:
        path: checkpoint directory, GGUF file, hub id, `embedded:smollm2`, or an adapter's directory.
        policy: from `isotype.resolve_precision`, for an adapter that of its base. By default the one in the directory's
            precision_policy.json, brought to this machine; without such a file `resolve_precision`'s own choice.
        model_class: a transformers model class or auto class; by default the class that the config names, or the head that
            the adapter was trained with.
        device_map: as in `from_pretrained`; by default the policy's device when it is here.
        **kwargs: passed on to `from_pretrained` (`revision`, `attn_implementation`, …; not `trust_remote_code`), for an adapter
            that of its base.

    Raises:
        CheckpointError: `path` is no checkpoint, holds a format that cannot be loaded as asked, tensors of other
            shapes than its config says, or values that are not finite; an adapter whose base is not there or does not fit.
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
    # Without a policy this also says, with a file to correct, that the config names no base.
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
    """A model or an adapter on its base, ready to be called without autocast, in evaluation mode.

    Args:
        path: directory of an adapter or a model, GGUF file, hub id or `embedded:smollm2`.
        dtype: compute dtype; `"auto"`: the one it was trained in.
        quantization: storage of the base weights; None: as it was trained, `"none"`: not quantized.
        device: a device of this machine.
        revision: branch, tag or commit of a hub id: of `path`, or of the base that the adapter names, instead of the
            one it was trained on.

    Returns:
        (model, tokenizer, policy); tokenizer is None where neither adapter nor base has one.

    Raises:
        CheckpointError: there is no model, or adapter and base do not fit.
        PrecisionError: the device or the libraries cannot run it as asked.
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

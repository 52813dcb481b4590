"""Restore the policy on a model or a trainer that other code has changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from isotype.compat.torch_scaler import sharded_scaler
from isotype.core.errors import PrecisionError
from isotype.model.enforce import Change, enforce_model, policy_of
from isotype.model.shard import has_shards
from isotype.precision.policy import DEFAULT_LOSS_SCALE, PrecisionPolicy


def enforce(model: Any, policy: PrecisionPolicy | None = None) -> tuple[Change, ...]:
    """Restore `policy` in place and return the changes (an empty tuple if there were none).

    Args:
        model: a model, or a transformers/TRL trainer before `train()`; then also its GradScaler and autocast, which
            accelerate omits for float16 on a CPU.
        policy: default: the model's (set by `isotype.load` and `isotype.add_lora`).

    Raises:
        PrecisionError: no policy was given and the model has none; a quantization state is lost; or the trainer was
            built for another mixed precision.
    """
    is_trainer = hasattr(model, "accelerator") and hasattr(model, "model")
    policy = policy or policy_of(model.model if is_trainer else model)
    if policy is None:
        raise PrecisionError.of(
            "no policy to enforce",
            f"{type(model).__name__} without a precision_policy",
            "a policy",
            "pass one: isotype.enforce(model, isotype.resolve_precision(model, …))",
        )
    return enforce_trainer(model, policy) if is_trainer else enforce_model(model, policy)


def enforce_trainer(
    trainer: Any, policy: PrecisionPolicy, masters: Mapping[str, torch.Tensor] | None = None
) -> tuple[Change, ...]:
    """Bring a trainer that has just been built under `policy`: its model, its autocast and its GradScaler.

    Liger's kernels, which the trainer would install when training begins, are switched off: see
    `isotype.compat.liger`.

    Args:
        trainer: a transformers or TRL trainer, before `train()`.
        policy: from `isotype.resolve_precision`.
        masters: trainable parameters by name, from before the trainer was built. TRL casts those of a quantized model
            to bfloat16; these values restore the lost digits.
    """
    parameters = dict(trainer.model.named_parameters())
    for name, values in (masters or {}).items():
        if parameters[name].dtype != values.dtype:
            parameters[name].data = values
    changes = enforce_model(trainer.model, policy)
    reference = getattr(trainer, "ref_model", None)
    if reference is not None:
        # Its forward is the model's, so that the two agree at the first step; its weights stay as exact as those that are trained.
        enforce_model(reference, replace(policy, keep_frozen=True))
    if getattr(trainer.args, "use_liger_kernel", False):
        trainer.args.use_liger_kernel = False
        changes = (
            *changes,
            Change("use_liger_kernel", "True -> False: Liger's forwards would hide those of the policy"),
        )
    _mixed_precision(trainer, policy)
    return changes


def masters_of(model: Any) -> dict[str, torch.Tensor]:
    """Return the trainable parameters' storage by name for `enforce_trainer` (references, no copies)."""
    return {name: p.data for name, p in model.named_parameters() if p.requires_grad}


def mixed_precision_name(policy: PrecisionPolicy) -> str:
    """Return accelerate's name for the policy's autocast: `"no"`, `"bf16"` or `"fp16"`."""
    return {None: "no", torch.bfloat16: "bf16", torch.float16: "fp16"}[policy.autocast]


def precision_arguments(policy: PrecisionPolicy) -> dict[str, Any]:
    """Return the policy's attributes of transformers' TrainingArguments: `fp16`, `bf16` and dependent ones."""
    return {
        "bf16": policy.compute == torch.bfloat16,
        "fp16": policy.compute == torch.float16,
        "mixed_precision": mixed_precision_name(policy),
    }


def _mixed_precision(trainer: Any, policy: PrecisionPolicy) -> None:
    accelerator = trainer.accelerator
    wanted = mixed_precision_name(policy)
    if accelerator.state.mixed_precision != wanted:
        raise PrecisionError.of(
            "the trainer and the policy disagree",
            f"a trainer with mixed precision {accelerator.state.mixed_precision!r}",
            f"{wanted!r}, for compute {policy.rows()[1][1]}",
            f"build it with fp16={wanted == 'fp16'}, bf16={wanted == 'bf16'} in its arguments",
        )
    if policy.loss_scaling and accelerator.scaler is None:
        # accelerate 1.15 leaves out both autocast and the scaler for float16 on a CPU, without a word
        # (Accelerator.__init__: `self.device.type != "cpu"`); torch has both for it.
        accelerator.scaler = torch.amp.GradScaler(accelerator.device.type)
        accelerator.native_amp = True
    if policy.loss_scaling and has_shards(trainer.model):
        # Every process has to skip a step that overflows in one of them.
        accelerator.scaler = sharded_scaler(accelerator.device.type)
    if policy.loss_scaling:
        begin_loss_scale(accelerator.scaler, policy)


def begin_loss_scale(scaler: Any, policy: PrecisionPolicy) -> None:
    """Set the policy's loss scale on a GradScaler with default settings that has made no step."""
    if scaler.get_scale() == DEFAULT_LOSS_SCALE != policy.loss_scale:
        scaler.load_state_dict({**scaler.state_dict(), "scale": policy.loss_scale})

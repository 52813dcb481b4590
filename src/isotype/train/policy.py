"""Decides the policy of a run, and enforces it on a trainer. Measured value ranges decide a float16 policy."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from isotype.checkpoint.checkpoint import Checkpoint
from isotype.checkpoint.damage import measure_quality
from isotype.checkpoint.measure_ranges import measure_ranges
from isotype.checkpoint.resolve import read_measurement, resolve_request, with_storage_reason
from isotype.compat.torch_fsdp import sharded_scaler
from isotype.core.errors import PrecisionError, Problem
from isotype.core.formats import MIXED
from isotype.model.enforce import Change, enforce_model, policy_of
from isotype.model.shard import has_shards
from isotype.precision.damages import Damages, as_decided
from isotype.precision.decide import PrecisionRequest
from isotype.precision.devices.attention import has_faulty_cudnn
from isotype.precision.devices.profile import DeviceProfile, device_profile
from isotype.precision.policy import DEFAULT_LOSS_SCALE, PrecisionPolicy, read_moments
from isotype.precision.ranges import FLOAT16_LARGEST, Ranges
from isotype.train.launched import from_rank_0, processes

Result = TypeVar("Result", bound=Ranges | Damages)


def policy_by_ranges(
    checkpoint: Checkpoint, request: PrecisionRequest, device: str, *, when: str = "measure"
) -> tuple[PrecisionPolicy, Ranges | None]:
    """Return the policy, and the value ranges that decided the policy (None without ranges).

    With `when="measure"`, the ranges of a local checkpoint are read from the cache or measured. With `when="known"`, only
    cached ranges are used.
    """
    profile = device_profile(device)
    measure = partial(_measured, measure_ranges, checkpoint, profile) if when == "measure" else None
    damages = partial(_measured, measure_quality, checkpoint, profile)
    measures: dict[str, Any] = {"measure": measure, "measure_damages": damages}
    policy, ranges = resolve_request(checkpoint.facts, request, device, checkpoint, **measures)
    _require_float16_range(policy, ranges)
    return policy, ranges


def _require_float16_range(policy: PrecisionPolicy, ranges: Ranges | None) -> None:
    """Raise PrecisionError if a module with weights above 65504 would run in float16.

    The policy runs linear layers and embeddings with such weights in float32. A norm with such weights is refused even if
    its measured results fit into float16, because an update can add a multiple of the weight.
    """
    if policy.compute != torch.float16 or ranges is None:
        return
    wide = {exception.module for exception in policy.exceptions if exception.how == "float32"}
    fix = "--dtype bfloat16 or --dtype float32"
    large = (m for m in ranges.modules if m.weight > FLOAT16_LARGEST and m.name not in wide)
    problems = [Problem(f"{m.name}: values up to {m.weight:,.0f}", "at most 65,504", fix) for m in large]
    if problems:
        raise PrecisionError("parameters are beyond float16's range", problems)


def policy_of_run(
    checkpoint: Checkpoint, request: PrecisionRequest, device: str, *, when: str = "measure"
) -> tuple[PrecisionPolicy, Ranges | None]:
    """Return the result of `policy_by_ranges` in all processes of a run. Only rank 0 measures."""
    if processes() == 1:
        return policy_by_ranges(checkpoint, request, device, when=when)
    policy, ranges = from_rank_0(lambda: policy_by_ranges(checkpoint, request, device, when=when))
    known = None if ranges is None else (lambda measured=ranges: measured)
    # All processes use the layers' formats of rank 0, because each process may have measured other values.
    mixed = request.quantization == MIXED
    request = as_decided(request, policy) if mixed else request
    mine, ranges = resolve_request(checkpoint.facts, request, device, checkpoint, measure=known)
    return with_storage_reason(mine, policy.reasons["storage"]) if mixed else mine, ranges


def moments_of_run(checkpoint: Checkpoint, device: str) -> dict[str, torch.Tensor]:
    """Return the second moments (`[in]`) of each linear layer's input. Rank 0 reads them from the cache or measures them."""

    def measured() -> dict[str, str]:
        local = checkpoint.downloaded()
        damages = None if local.fingerprint is None else read_measurement(Damages, local.fingerprint)
        damages = damages or _measured(measure_quality, local, device_profile(device))
        return {layer.module: layer.moments for layer in damages.layers}

    return {name: read_moments(text) for name, text in from_rank_0(measured).items()}


def _measured(measure: Callable[..., Result], checkpoint: Checkpoint, profile: DeviceProfile) -> Result:
    """Measure block by block on the GPU of the training. Without a GPU or enough GPU memory, measure on the CPU."""
    if not profile.present or profile.kind not in ("cuda", "rocm", "xpu"):
        return measure(checkpoint)
    device = torch.device(profile.name)
    try:
        return measure(checkpoint, device=device)
    except torch.OutOfMemoryError:
        note = f"measured on the CPU, because the memory of {profile.title} was too small"
    finally:
        torch.get_device_module(device).empty_cache()  # later choices depend on the free memory
    result = measure(checkpoint)
    return replace(result, notes=(*result.notes, note))


def enforce(model: Any, policy: PrecisionPolicy | None = None) -> tuple[Change, ...]:
    """Apply `policy` to a model or a trainer in place, and return the changes.

    Args:
        model: a model, or a trainer of transformers or TRL before `train()`. A trainer also gets a GradScaler and autocast,
            because accelerate creates neither for float16 on a CPU.
        policy: the policy to apply. The default is the model's policy (set by `isotype.load` and `isotype.add_lora`).

    Raises:
        PrecisionError: there is no policy, a quantization state is lost, or the trainer was built for another mixed precision.
    """
    is_trainer = hasattr(model, "accelerator") and hasattr(model, "model")
    policy = policy or policy_of(model.model if is_trainer else model)
    if policy is None:
        what = f"{type(model).__name__} without a precision_policy"
        fix = "pass a policy: isotype.enforce(model, isotype.resolve_precision(model, …))"
        raise PrecisionError.of("no policy to enforce", what, "a policy", fix)
    return enforce_trainer(model, policy) if is_trainer else enforce_model(model, policy)


def enforce_trainer(
    trainer: Any, policy: PrecisionPolicy, masters: Mapping[str, torch.Tensor] | None = None
) -> tuple[Change, ...]:
    """Apply `policy` to the model, the autocast and the GradScaler of a newly built trainer.

    `use_liger_kernel` is turned off, because the trainer would install Liger's kernels (see `isotype.compat.liger`).

    Args:
        masters: values that the trainable parameters had before the trainer was built, by name. These values are restored,
            because TRL rounds the trainable parameters of a quantized model to bfloat16.
    """
    parameters = dict(trainer.model.named_parameters())
    for name, values in (masters or {}).items():
        if parameters[name].dtype != values.dtype:
            parameters[name].data = values
    changes = enforce_model(trainer.model, policy)
    reference = getattr(trainer, "ref_model", None)
    if reference is not None:
        # With the same casts of activations, both models agree at the first step. The reference's weights are not cast.
        enforce_model(reference, replace(policy, keep_frozen=True))
    if getattr(trainer.args, "use_liger_kernel", False):
        trainer.args.use_liger_kernel = False
        what = "True -> False: Liger's forwards would replace the policy's forwards"
        changes = (*changes, Change("use_liger_kernel", what))
    _mixed_precision(trainer, policy)
    return changes


_ALL_BUT_CUDNN = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def sound_attention(profile: DeviceProfile) -> AbstractContextManager[None]:
    """Return a context that disables cuDNN attention on devices on which its gradients can be NaN (IST812)."""
    return sdpa_kernel(_ALL_BUT_CUDNN) if has_faulty_cudnn(profile) else nullcontext()


def masters_of(model: Any) -> dict[str, torch.Tensor]:
    """Return the data of the trainable parameters by name, without a copy, for `enforce_trainer`."""
    return {name: p.data for name, p in model.named_parameters() if p.requires_grad}


def mixed_precision_name(policy: PrecisionPolicy) -> str:
    return {None: "no", torch.bfloat16: "bf16", torch.float16: "fp16"}[policy.autocast]


def precision_arguments(policy: PrecisionPolicy) -> dict[str, Any]:
    return {
        "bf16": policy.compute == torch.bfloat16,
        "fp16": policy.compute == torch.float16,
        "mixed_precision": mixed_precision_name(policy),
    }


def _mixed_precision(trainer: Any, policy: PrecisionPolicy) -> None:
    accelerator = trainer.accelerator
    wanted = mixed_precision_name(policy)
    if accelerator.state.mixed_precision != wanted:
        what = f"a trainer with mixed precision {accelerator.state.mixed_precision!r}"
        expected = f"{wanted!r}, for compute {policy.rows()[1][1]}"
        fix = f"build the trainer with fp16={wanted == 'fp16'}, bf16={wanted == 'bf16'} in its arguments"
        raise PrecisionError.of("the trainer and the policy disagree", what, expected, fix)
    if policy.loss_scaling and accelerator.scaler is None:
        # accelerate 1.15 creates neither autocast nor GradScaler for float16 on a CPU (`self.device.type != "cpu"` in
        # `Accelerator.__init__`), although torch has both.
        accelerator.scaler = torch.amp.GradScaler(accelerator.device.type)
        accelerator.native_amp = True
    if policy.loss_scaling and has_shards(trainer.model):
        # Every process must skip a step that overflows in one process.
        accelerator.scaler = sharded_scaler(accelerator.device.type)
    if policy.loss_scaling:
        begin_loss_scale(accelerator.scaler, policy)


def begin_loss_scale(scaler: Any, policy: PrecisionPolicy) -> None:
    """If a GradScaler still has PyTorch's default scale, set the scale to the policy's loss scale."""
    if scaler.get_scale() == DEFAULT_LOSS_SCALE != policy.loss_scale:
        scaler.load_state_dict({**scaler.state_dict(), "scale": policy.loss_scale})

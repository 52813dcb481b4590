"""resolve_precision: gather the facts, then decide. The one place where checkpoint, device and versions meet."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypedDict, Unpack

import torch

from isotype.checkpoint.facts import facts_of
from isotype.checkpoint.measured import fingerprint, kept_ranges
from isotype.core.errors import Problem
from isotype.precision.decide import PrecisionRequest, decide
from isotype.precision.devices.profile import DeviceProfile, device_profile
from isotype.precision.facts import ModelFacts
from isotype.precision.policy import PrecisionPolicy
from isotype.precision.ranges import Ranges
from isotype.precision.versions import incompatible_here, installed


class StorageOptions(TypedDict, total=False):
    """What is asked for rarely: the rest of a `PrecisionRequest`."""

    master: str | torch.dtype | None
    double_quant: bool | None
    quant_storage: str | torch.dtype | None
    storage: str | torch.dtype | None


def resolve_precision(
    model: Any,
    dtype: str | torch.dtype = "auto",
    quantization: str | None = None,
    device: str | torch.device = "auto",
    trainable: str = "lora",
    *,
    revision: str | None = None,
    ranges: Ranges | None = None,
    **storage: Unpack[StorageOptions],
) -> PrecisionPolicy:
    """Decide the dtype of every role of a training run, once, with the reason for each.

    Args:
        model: an `nn.Module`, a transformers config, a checkpoint directory, a GGUF file or a hub id.
        dtype: compute dtype (`"bfloat16"`, `"bf16"`, `torch.bfloat16`, …) or `"auto"`: the dtype the checkpoint
            was trained in where the device runs it natively, else the best the device has.
        quantization: `"nf4"`, `"fp4"`, `"int8"` or None for weights in the compute dtype.
        device: a device profile's name (`"t4"`, `"h100"`, …), a real device (`"cpu"`, `"cuda"`), or `"auto"` for
            the best one here.
        trainable: `"lora"` for adapters on a frozen base, `"full"` for every weight.
        revision: branch, tag or commit of a hub id; of no meaning for anything else.
        ranges: from `isotype.measure_ranges`: for float16 they decide the residual stream's dtype, exceptions and the
            first loss scale. Without them, an earlier measurement of the same checkpoint does, else what is publicly
            known of the model's family, else the dtype it was trained in.
        **storage: by keyword, see `StorageOptions`:

            - `master`: dtype of trainable parameters; float32 unless asked.
            - `double_quant`: quantize the quantization constants too (nf4, fp4).
            - `quant_storage`: dtype of the packed 4-bit bytes; uint8 unless asked.
            - `storage`: float dtype of the frozen weights (`trainable="lora"` without quantization); the compute
              dtype unless asked. Another one relies on autocast, which casts the weights in every step.

    Returns:
        The policy: every role's dtype, each with its reason, and warnings of what the choice costs.

    Raises:
        PrecisionError: every conflict at once, each with what to change, and the nearest policy that works.
        CheckpointError: `model` names no checkpoint.
    """
    request = PrecisionRequest(dtype, quantization, trainable, **storage)
    policy, _ = resolve_request(model, request, device, revision, ranges=ranges)
    return policy


def resolve_request(
    model: Any,
    request: PrecisionRequest,
    device: str | torch.device = "auto",
    revision: str | None = None,
    *,
    ranges: Ranges | None = None,
    measure: Callable[[], Ranges] | None = None,
) -> tuple[PrecisionPolicy, Ranges | None]:
    """`resolve_precision` of what was asked as one value, with the measurement that it was decided by.

    Args:
        model, device, revision, ranges: as of `resolve_precision`.
        request: what was asked.
        measure: measures the checkpoint; called where float16 needs a measurement, the weights are on this machine, and
            none was kept.

    Returns:
        The policy and the measurement; None where there is none or none is needed.

    Raises:
        PrecisionError, CheckpointError: as `resolve_precision`, and what `measure` raises.
    """
    facts, profile = facts_of(model, revision=revision), device_profile(device)
    obstacles = _obstacles(facts, profile, request.quantization)
    policy = decide(facts, profile, request, obstacles, ranges)
    if policy.compute != torch.float16 or ranges is not None or not isinstance(model, (str, Path)):
        return policy, ranges
    key = fingerprint(model, revision)
    if key is None:
        return policy, None
    found = kept_ranges(key)
    if found is None and measure is not None:
        found = measure()
    return (policy if found is None else decide(facts, profile, request, obstacles, found)), found


def _obstacles(facts: ModelFacts, profile: DeviceProfile, quantization: str | None) -> list[Problem]:
    """Library versions that make the run impossible here; for a device that is elsewhere they say nothing."""
    if not profile.present:
        return []
    versions = installed()
    problems = [
        Problem(
            " and ".join(incompatibility.packages),
            f"versions that fit: {incompatibility.fact}",
            incompatibility.change,
        )
        for incompatibility in incompatible_here(profile.kind)
        if incompatibility.severity == "error"
    ]
    saved = facts.quantization.method if facts.quantization else None
    if (quantization or saved == "bitsandbytes") and versions.get("bitsandbytes") is None:
        problems.append(
            Problem(
                f"quantization {quantization or saved} without bitsandbytes",
                "the library that stores the quantized weights",
                "pip install 'isotype[train]'",
            )
        )
    return problems

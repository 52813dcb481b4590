"""resolve_precision: gather the facts, then decide. The one place where checkpoint, device and versions meet."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypedDict, Unpack

import torch

from isotype.checkpoint.facts import facts_of
from isotype.checkpoint.measured import cached_ranges
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
    return resolve_request(
        model, PrecisionRequest(dtype, quantization, trainable, **storage), device, revision, ranges
    )


def resolve_request(
    model: Any,
    request: PrecisionRequest,
    device: str | torch.device = "auto",
    revision: str | None = None,
    ranges: Ranges | None = None,
) -> PrecisionPolicy:
    """`resolve_precision` of what was asked as one value; the same errors."""
    facts, profile = facts_of(model, revision=revision), device_profile(device)
    obstacles = _obstacles(facts, profile, request.quantization)
    policy = decide(facts, profile, request, obstacles, ranges)
    if policy.compute != torch.float16 or ranges is not None or not isinstance(model, (str, Path)):
        return policy
    known = cached_ranges(model, revision)
    return policy if known is None else decide(facts, profile, request, obstacles, known)


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

"""`resolve_precision` gathers facts about checkpoint, device and library versions, and then decides the policy."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypedDict, TypeVar, Unpack

import torch

from isotype.checkpoint.checkpoint import Checkpoint, open_checkpoint
from isotype.checkpoint.facts import facts_of
from isotype.core.cache import default_cache_dir
from isotype.core.errors import PrecisionError, Problem, SaveError
from isotype.core.formats import MIXED
from isotype.precision.damages import Damages, first_request, mix
from isotype.precision.decide import PrecisionRequest, decide
from isotype.precision.devices.profile import DeviceProfile, device_profile
from isotype.precision.facts import ModelFacts
from isotype.precision.policy import PrecisionPolicy
from isotype.precision.ranges import Ranges
from isotype.precision.versions import installed, version_problems

Measurement = TypeVar("Measurement", Ranges, Damages)


class StorageOptions(TypedDict, total=False):
    """Type of the keyword arguments `**storage` of `resolve_precision`."""

    master: str | torch.dtype | None
    double_quant: bool | None
    quant_storage: str | torch.dtype | None
    storage: str | torch.dtype | None
    base_memory: int | None
    quantized_parts: str


def resolve_precision(
    model: Any,
    dtype: str | torch.dtype = "auto",
    quantization: str | None = None,
    device: str | torch.device = "auto",
    trainable: str = "lora",
    *,
    revision: str | None = None,
    ranges: Ranges | None = None,
    damages: Damages | None = None,
    **storage: Unpack[StorageOptions],
) -> PrecisionPolicy:
    """Decide the dtype of each role of a training run (weights, compute, adapters, …), and give the reasons.

    Args:
        model: an `nn.Module`, a transformers config, a checkpoint directory, a GGUF file or a hub id.
        dtype: compute dtype (`"bfloat16"`, `"bf16"`, `torch.bfloat16`, …) or `"auto"`. `"auto"` is the dtype in which the
            checkpoint was trained if the device supports it natively, else the best dtype of the device.
        quantization: `"nf4"`, `"fp4"`, `"int8"`, or None for weights in the compute dtype. `"mixed"` stores each linear layer
            in nf4, int8 or 16 bits, depending on how much this changes the output of the model.
        device: a device profile's name (`"t4"`, `"h100"`, …), a real device (`"cpu"`, `"cuda"`), or `"auto"` for the best
            device of this machine.
        trainable: `"lora"` for adapters on a frozen base, `"full"` for every weight.
        revision: branch, tag or commit of a hub id; ignored if `model` is not a hub id.
        ranges: result of `isotype.measure_ranges`. For float16, the ranges decide the dtype of the residual stream, the modules
            that compute in another dtype, and the first loss scale. The default is a cached measurement of the same checkpoint.
            Without a cached measurement, published facts about the model's family are used, or the dtype of its training.
        damages: result of `isotype.measure_quality`, for `"mixed"`. The default is a cached measurement of the same checkpoint.
        **storage: keyword arguments:

            - `master`: dtype of trainable parameters; default float32.
            - `double_quant`: also quantize the quantization constants (nf4, fp4).
            - `quant_storage`: dtype of the packed 4-bit bytes; default uint8.
            - `storage`: float dtype of the frozen weights (`trainable="lora"` without quantization); default: the
              compute dtype. If the two differ, autocast casts the weights in every step.
            - `base_memory`: maximum bytes of the base's weights (`quantization="mixed"`). By default, linear layers may
              need a tenth more memory than in nf4.
            - `quantized_parts`: `"language"`, or `"all"`, which also quantizes vision and audio towers and projectors.

    Returns:
        The policy: the dtype of each role with its reason, and warnings about costs.

    Raises:
        PrecisionError: arguments conflict. The error has a fix for each conflict, and the nearest policy that works.
        CheckpointError: `model` is the name of a checkpoint that does not exist.
    """
    request = PrecisionRequest(dtype, quantization, trainable, **storage)
    checkpoint = open_checkpoint(model, revision) if isinstance(model, (str, Path)) else None
    facts = facts_of(model) if checkpoint is None else checkpoint.facts
    policy, _ = resolve_request(facts, request, device, checkpoint, ranges=ranges, damages=damages)
    return policy


def resolve_request(
    facts: ModelFacts,
    request: PrecisionRequest,
    device: str | torch.device,
    checkpoint: Checkpoint | None,
    *,
    ranges: Ranges | None = None,
    measure: Callable[[], Ranges] | None = None,
    damages: Damages | None = None,
    measure_damages: Callable[[], Damages] | None = None,
) -> tuple[PrecisionPolicy, Ranges | None]:
    """Return (policy for a `PrecisionRequest`, value ranges that decided the policy or None).

    Args:
        device, ranges, damages: as in `resolve_precision`. This function also raises the errors of `resolve_precision`.
        checkpoint: checkpoint whose cached measurements are used; None for a model in memory or a config.
        measure: function that measures the ranges of the checkpoint. float16 needs it if the weights are local and no ranges
            are cached.
        measure_damages: function that measures the damages of the checkpoint. Mixed storage needs it.
    """
    profile = device_profile(device)
    obstacles = _obstacles(facts, profile, request.quantization)
    reason = None
    if request.quantization == MIXED:
        plain = decide(facts, profile, first_request(request), obstacles)
        if damages is None and checkpoint is not None:
            damages = _cached_or_measured(Damages, checkpoint, measure_damages)
        if damages is None or facts.parameters is None:
            headline = "quantization damages of this model were not measured"
            expected = "measured damages of its layers"
            fix = f"run isotype quality {facts.source} on a machine that has the weights, or set --quantization nf4"
            raise PrecisionError.of(headline, f"quantization mixed for {facts.source}", expected, fix)
        request, reason = mix(damages, plain, facts.parameters, request)
    policy = decide(facts, profile, request, obstacles, ranges)
    if policy.compute == torch.float16 and ranges is None and checkpoint is not None:
        ranges = _cached_or_measured(Ranges, checkpoint, measure)
        policy = policy if ranges is None else decide(facts, profile, request, obstacles, ranges)
    return (policy if reason is None else with_storage_reason(policy, reason)), ranges


def with_storage_reason(policy: PrecisionPolicy, reason: str) -> PrecisionPolicy:
    return replace(policy, reasons={**policy.reasons, "storage": reason})


def _cached_or_measured(
    kind: type[Measurement], checkpoint: Checkpoint, measure: Callable[[], Measurement] | None
) -> Measurement | None:
    """Return the cached measurement of a checkpoint, or else the result of `measure`; None without local weights."""
    if checkpoint.fingerprint is None:
        return None
    cached = read_measurement(kind, checkpoint.fingerprint)
    return measure() if cached is None and measure is not None else cached


def _obstacles(facts: ModelFacts, profile: DeviceProfile, quantization: str | None) -> list[Problem]:
    """If the device is in this machine, return a problem for each library version that makes the training impossible."""
    if not profile.present:
        return []
    problems = version_problems()
    saved = facts.quantization.method if facts.quantization else None
    if (quantization or saved == "bitsandbytes") and installed().get("bitsandbytes") is None:
        what = f"quantization {quantization or saved} without bitsandbytes"
        expected = "the library that stores the quantized weights"
        problems.append(Problem(what, expected, "pip install 'isotype[train]'"))
    return problems


def read_measurement(kind: type[Measurement], key: str) -> Measurement | None:
    """Return the cached `Ranges` or `Damages` for the fingerprint of a checkpoint; None if no file can be read."""
    path = _path(kind, key)
    if not path.is_file():
        return None
    try:
        measurement = kind.from_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return measurement if measurement.key == key else None


def save_measurement(measurement: Ranges | Damages) -> Path:
    """Cache a measurement under its `key`. Raise ValueError for a model in memory, and SaveError if the write fails."""
    if not measurement.key:
        raise ValueError(f"a model in memory has no cache key, so its {measurement.subject} cannot be cached")
    path = _path(type(measurement), measurement.key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return measurement.save(path)
    except OSError as error:
        headline, what = f"the measurement of {measurement.subject} cannot be cached", f"{path}: {error}"
        expected = "a folder that can be written"
        raise SaveError.of(headline, what, expected, f"set ISOTYPE_CACHE to {expected}") from error


def saved_or_noted(measurement: Measurement) -> Measurement:
    """Cache a measurement, and return it. If the cache cannot be written, the returned measurement has a note about this."""
    try:
        save_measurement(measurement)
    except SaveError as error:
        note = f"the measurement was not cached: {error.problems[0].given}"
        return replace(measurement, notes=(*measurement.notes, note))
    return measurement


def _path(kind: type[Ranges | Damages], key: str) -> Path:
    return default_cache_dir() / kind.subject / f"{key}.json"

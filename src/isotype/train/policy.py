"""The policy of a checkpoint, with measured value ranges if float16 needs them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch

from isotype.checkpoint.damage.measure import measure_damages
from isotype.checkpoint.kept import kept
from isotype.checkpoint.measure_ranges import measure_checkpoint
from isotype.checkpoint.opened import Checkpoint, downloaded
from isotype.checkpoint.resolve import resolve_request, with_storage_reason
from isotype.core.errors import PrecisionError, Problem
from isotype.core.formats import MIXED
from isotype.precision.by_damage import as_decided
from isotype.precision.damages import Damages
from isotype.precision.decide import PrecisionRequest
from isotype.precision.devices.profile import DeviceProfile, device_profile
from isotype.precision.policy import PrecisionPolicy, read_moments
from isotype.precision.ranges import FLOAT16_LARGEST, Ranges
from isotype.train.launched import from_first, processes

Result = TypeVar("Result", bound=Ranges | Damages)


def policy_by_ranges(
    checkpoint: Checkpoint, request: PrecisionRequest, device: str, *, when: str = "measure"
) -> tuple[PrecisionPolicy, Ranges | None]:
    """Return the policy and the measured ranges behind it; None if not measured or not needed.

    `when`: `measure` a local checkpoint without a cached measurement, or use only what is `known`.

    Raises:
        PrecisionError, CheckpointError: as `resolve_precision` and `measure_ranges`; parameters beyond float16's
            range.
    """
    profile = device_profile(device)
    measure = partial(_measured, measure_checkpoint, checkpoint, profile) if when == "measure" else None
    damages = partial(_measured, measure_damages, checkpoint, profile)
    policy, ranges = resolve_request(
        checkpoint.facts, request, device, checkpoint, measure=measure, measure_damages=damages
    )
    _check_held(policy, ranges)
    return policy, ranges


def _check_held(policy: PrecisionPolicy, ranges: Ranges | None) -> None:
    """Refuse to train in float16 if a norm or another parameter multiplies by more than 65504.

    Linear layers and embeddings of that kind run in float32. The measured values after a norm fit, but the first
    update of an adapter changes results by such a factor times the learning rate, which is not measured.
    """
    if policy.compute != torch.float16 or ranges is None:
        return
    wide = {each.module for each in policy.exceptions if each.how == "float32"}
    beyond = [each for each in ranges.modules if each.weight > FLOAT16_LARGEST and each.name not in wide]
    if problems := [
        Problem(
            f"{each.name}: values up to {each.weight:,.0f}",
            "at most 65,504",
            "--dtype bfloat16 or --dtype float32",
        )
        for each in beyond
    ]:
        raise PrecisionError("parameters are beyond float16's range", problems)


def policy_of_run(
    checkpoint: Checkpoint, request: PrecisionRequest, device: str, *, when: str = "measure"
) -> tuple[PrecisionPolicy, Ranges | None]:
    """Return `policy_by_ranges` for all processes of a run, measured and decided by the first."""
    if processes() == 1:
        return policy_by_ranges(checkpoint, request, device, when=when)
    policy, ranges = from_first(lambda: policy_by_ranges(checkpoint, request, device, when=when))
    known = None if ranges is None else partial(_same, ranges)
    if request.quantization != MIXED:
        return resolve_request(checkpoint.facts, request, device, checkpoint, measure=known)
    # The layers' formats are the first process's, whatever another one has measured.
    mine, ranges = resolve_request(
        checkpoint.facts, as_decided(request, policy), device, checkpoint, measure=known
    )
    return with_storage_reason(mine, policy.reasons["storage"]), ranges


def moments_of_run(checkpoint: Checkpoint, device: str) -> dict[str, torch.Tensor]:
    """Return the second moments `[in]` of each linear layer's input channels, cached or measured by rank 0."""

    def measured() -> dict[str, str]:
        here = downloaded(checkpoint)
        damages = None if here.fingerprint is None else kept(Damages, here.fingerprint)
        damages = damages or _measured(measure_damages, here, device_profile(device))
        return {layer.module: layer.moments for layer in damages.layers}

    written = measured() if processes() == 1 else from_first(measured)
    return {name: read_moments(text) for name, text in written.items()}


def _measured(measure: Callable[..., Result], checkpoint: Checkpoint, profile: DeviceProfile) -> Result:
    """Measure block by block on the GPU that will train; on the CPU if there is none, or no room on it."""
    if not profile.present or profile.kind not in ("cuda", "rocm", "xpu"):
        return measure(checkpoint)
    device = torch.device(profile.name)
    try:
        return measure(checkpoint, device=device)
    except torch.OutOfMemoryError:
        note = f"measured on the CPU: there was no room on {profile.title}"
    finally:
        torch.get_device_module(device).empty_cache()  # later choices depend on the free memory
    result = measure(checkpoint)
    return replace(result, notes=(*result.notes, note))


def _same(ranges: Ranges) -> Ranges:
    return ranges

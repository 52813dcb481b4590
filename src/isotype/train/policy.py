"""The policy of a checkpoint whose value ranges are measured where float16 needs to know them."""

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
    """The policy, and the measurement that it was decided by; None where there is none or none is needed.

    Args:
        checkpoint: whose weights are measured, if they are on this machine.
        request: what was asked of the precision.
        device: name of a device or of a profile.
        when: `measure`: measure a checkpoint whose weights are on this machine and that nobody has measured; `known`: do not.

    Raises:
        PrecisionError, CheckpointError: as `resolve_precision` and `measure_ranges`; parameters that float16 does not hold.
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
    """Refuse to train in float16 behind a norm, or another parameter, that multiplies by more than it holds.

    Linear layers and embeddings of that kind run in float32. What follows a norm may, too, and what was measured fits; but the first update
    of an adapter moves results by such a factor times the learning rate, which no measurement before it has seen.
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
    """`policy_by_ranges` for one of the processes of a run: the first measures, and all decide by what it has found."""
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
    """`[in]` second moments of each linear layer's input channels, as they were measured, or are now: by the first process of several."""

    def measured() -> dict[str, str]:
        here = downloaded(checkpoint)
        damages = None if here.fingerprint is None else kept(Damages, here.fingerprint)
        damages = damages or _measured(measure_damages, here, device_profile(device))
        return {layer.module: layer.moments for layer in damages.layers}

    written = measured() if processes() == 1 else from_first(measured)
    return {name: read_moments(text) for name, text in written.items()}


def _measured(measure: Callable[..., Result], checkpoint: Checkpoint, profile: DeviceProfile) -> Result:
    """Measured on the GPU that is about to train, block by block; on the CPU where there is none, or no room on it."""
    if not profile.present or profile.kind not in ("cuda", "rocm", "xpu"):
        return measure(checkpoint)
    device = torch.device(profile.name)
    try:
        return measure(checkpoint, device=device)
    except torch.OutOfMemoryError:
        note = f"measured on the CPU: there was no room on {profile.title}"
    finally:
        torch.get_device_module(device).empty_cache()  # what is free decides what else is done
    result = measure(checkpoint)
    return replace(result, notes=(*result.notes, note))


def _same(ranges: Ranges) -> Ranges:
    return ranges

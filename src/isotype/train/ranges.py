"""The policy of a checkpoint whose value ranges are measured where float16 needs to know them."""

from __future__ import annotations

import torch

from isotype.checkpoint.measured import cached_ranges, fingerprint
from isotype.checkpoint.resolve import resolve_request
from isotype.precision.decide import PrecisionRequest
from isotype.precision.policy import PrecisionPolicy
from isotype.precision.ranges import Ranges
from isotype.ranges.measure import measure_ranges

WHEN = ("measure", "known")
"""`measure`: measure a checkpoint whose weights are on this machine and that nobody has measured; `known`: do not."""


def policy_by_ranges(
    source: str, request: PrecisionRequest, device: str, revision: str | None = None, *, when: str = "measure"
) -> tuple[PrecisionPolicy, Ranges | None]:
    """The policy, and the measurement that it was decided by; None where there is none or none is needed.

    Args:
        source: checkpoint directory, GGUF file, `embedded:NAME` or hub id.
        request: what was asked of the precision.
        device: name of a device or of a profile.
        revision: branch, tag or commit of a hub id.
        when: see `WHEN`.

    Raises:
        PrecisionError, CheckpointError: as `resolve_precision` and `measure_ranges`.
    """
    policy = resolve_request(source, request, device, revision)
    if policy.compute != torch.float16 or fingerprint(source, revision) is None:
        return policy, None
    ranges = cached_ranges(source, revision)
    if ranges is None and when == "measure":
        ranges = measure_ranges(source, revision=revision)
        policy = resolve_request(source, request, device, revision, ranges)
    return policy, ranges

"""The policy of a checkpoint whose value ranges are measured where float16 needs to know them."""

from __future__ import annotations

from functools import partial

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
    measure = partial(measure_ranges, source, revision=revision) if when == "measure" else None
    return resolve_request(source, request, device, revision, measure=measure)

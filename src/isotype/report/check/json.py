"""A check as JSON; `schema.json` beside this file describes it, written from the records by `python -m tools.schemas`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from isotype.contracts.contract import doubts, judged_by
from isotype.core.json_records import Names, text_of
from isotype.core.package import VERSION
from isotype.precision.devices.profile import DeviceProfile
from isotype.precision.policy import PrecisionPolicy
from isotype.records.finding import Finding, Fix
from isotype.records.memory import MemoryKind, Phase
from isotype.records.step_time import Products, StepTime
from isotype.records.trace import Failure, Origin, Setup
from isotype.report.check.record import Known, Outlook, Record, Status, repair_outlook
from isotype.report.check.text import sharding_notes, verdict

SCHEMA_VERSION = 1
"""Version of the JSON form; it grows when a reader of the former version would misread the new one."""


@dataclass(frozen=True)
class Check:
    """One training step traced on fake tensors and judged, as `isotype check --json` and `Report.to_json()` write it. Numbers are not rounded.

    Attributes:
        isotype: version of isotype that wrote it.
        model: name of the model; empty where it has none.
        ok: whether there is no error finding; `complete` says whether the step was traced to its end.
        complete: whether the step was traced to its end.
        fits: whether the peak is within what a step may take of the device's memory; null if either is not known.
        status: the worst that is known.
        ranges: what is known of the values of a step with float16 in it: they were measured, something is publicly known of the
            model's family, or nothing; null without float16.
        headroom: 65504 over the largest measured value that the forward holds in float16; null where none was measured.
        measured_at: date and time of the measurement, ISO 8601 in UTC; null without one.
        verdict: the same in a sentence.
        seconds: wall-clock time of the check, in seconds.
        setup: how the step is run.
        findings: errors first, then by code.
        resolved_by: how many errors and warnings are resolved by whom, each with its first fix tried alone: by `isotype.repair`, by
            `isotype.repair(unsafe=True)`, by fixes that no second trace has tried, by a change of a setting or of code, or by no known fix.
        peak_bytes: bytes at the worst moment of any step and evaluation; 0 where not measured.
        peak_phase: phase of the overall peak; null where not measured.
        capacity_bytes: bytes of the device's memory; null where not known.
        room_bytes: bytes of it that a step may take; null where not known.
        room: what these are a part of, in words.
        phases: bytes of tensors alive at the worst moment of each phase, by kind.
        flops: FLOPs of the matmul-like operators of one step, by the dtype they run in.
        time: null where the device has no published rates or the step was not traced to its end.
        operators: operators in a step of the real model.
        assumed: operators whose broken contract was taken from their family's rule, not measured on the device.
        contracts: the measured table that says which operands the device accepts, or what does in its place.
        doubts: why the table that the device is judged by may be wrong there.
        not_traced: what the trace did not see.
        failure: null where the step was traced to its end.
    """

    isotype: str
    model: str
    ok: bool
    complete: bool
    fits: bool | None
    status: Status
    ranges: Known | None
    headroom: float | None
    measured_at: str | None
    verdict: str
    seconds: float
    setup: Setup
    findings: tuple[Finding, ...]
    resolved_by: Mapping[Outlook, int]
    peak_bytes: int
    peak_phase: Phase | None
    capacity_bytes: int | None
    room_bytes: int | None
    room: str
    phases: Mapping[Phase, Mapping[MemoryKind, int]]
    flops: Mapping[torch.dtype, int]
    time: StepTime | None
    operators: int
    assumed: tuple[str, ...]
    contracts: str
    doubts: tuple[str, ...]
    not_traced: tuple[str, ...]
    failure: Failure | None


NAMES: Names = {
    Check: "isotype model ok complete fits status ranges headroom measured_at verdict seconds setup findings resolved_by "
    "memory.peak_bytes=peak_bytes memory.peak_phase=peak_phase memory.capacity_bytes=capacity_bytes memory.room_bytes=room_bytes memory.room=room memory.phases=phases "
    "flops time operators assumed contracts doubts not_traced failure",
    Setup: "device=profile autocast autocast_eval scaler optimizer learning_rate compute phases fsdp devices reshard batch details "
    "data policy",
    DeviceProfile: "name title memory_bytes",
    PrecisionPolicy: "compute storage master reduce loss_scaling trainable device pinned double_quant quant_storage wide_residual "
    "layers=layer_formats exceptions loss_scale keep_frozen experts routers reasons warnings",
    Finding: "code severity message module op phase source cause evidence notes operands places cost fixes",
    Origin: "kind name module source",
    Fix: "description=text scope safety verified outcome actions",
    Products: "flops flops_per_second emulated_in seconds",
    StepTime: "seconds traced_seconds bound tokens_per_second products traffic.bytes=bytes traffic.bytes_per_second=bytes_per_second "
    "traffic.seconds=traffic_seconds launches.count=launches launches.seconds_each=launch_seconds",
    Failure: "phase module source error dtype_related",
}


def to_json(report: Record) -> str:
    """Strict JSON; `schema_version` says which schema. Bytes, FLOPs, shares and seconds stay unrounded numbers."""
    trace, memory = report.trace, report.memory
    setup = trace.setup
    check = Check(
        isotype=VERSION,
        model=trace.model,
        ok=report.ok,
        complete=report.complete,
        fits=report.fits,
        status=report.status,
        ranges=report.ranges,
        headroom=None if report.largest is None else report.largest.headroom,
        measured_at=None if setup.ranges is None else setup.ranges.when,
        verdict=verdict(report),
        seconds=report.seconds,
        setup=setup,
        findings=report.findings,
        resolved_by={kind: len(some) for kind, some in repair_outlook(report).items()},
        peak_bytes=memory.peak,
        peak_phase=memory.peak_phase,
        capacity_bytes=setup.profile.memory_bytes,
        room_bytes=setup.limit.size,
        room=setup.limit.words,
        phases=memory.phases,
        flops=report.flops,
        time=report.time,
        operators=sum(call.repeats for call in trace.calls),
        assumed=report.assumed,
        contracts=judged_by(setup.profile),
        doubts=tuple(doubts(setup.profile)),
        not_traced=(*sharding_notes(setup), *trace.notes),
        failure=trace.failure,
    )
    return text_of(check, SCHEMA_VERSION, NAMES)

"""The report of a check as JSON. `python -m tools.schemas` writes `schema.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from isotype.contracts.contract import doubts, judged_by
from isotype.core import VERSION
from isotype.core.json_records import Names, text_of
from isotype.precision.devices.profile import DeviceProfile
from isotype.precision.policy import PrecisionPolicy
from isotype.records.finding import Finding, Fix
from isotype.records.memory import Products, StepTime
from isotype.records.trace import Failure, Origin, Setup
from isotype.report.check.record import Outlook, Record, repair_outlook
from isotype.report.check.text import sharding_notes, verdict

SCHEMA_VERSION = 1
"""Version of the JSON format. The version increases when a program for the old format would misread the new format."""


@dataclass(frozen=True)
class Check(Record):
    """The result of a check in the JSON format of `isotype check --json` and `Report.to_json()`."""

    @property
    def isotype(self) -> str:
        """Version of isotype that wrote the report."""
        return VERSION

    @property
    def headroom(self) -> float | None:
        """65504 divided by the largest float16 value that was measured in the forward. null if no values were measured."""
        return None if self.largest is None else self.largest.headroom

    @property
    def measured_at(self) -> str | None:
        """Date and time at which the values were measured, ISO 8601 in UTC. null if no values were measured."""
        ranges = self.trace.setup.ranges
        return None if ranges is None else ranges.when

    @property
    def verdict(self) -> str:
        """Sentence that states the result of the check."""
        return verdict(self)

    @property
    def resolved_by(self) -> Mapping[Outlook, int]:
        """Number of errors and warnings in each of the groups below. A finding's first fix decides its group.

        `repair`: `isotype.repair` applies the fix. `unsafe`: `isotype.repair` applies the fix with `unsafe=True`.
        `caller`: the user applies the fix. `untried`: the fix was not verified. `left`: no fix is known.
        """
        return {kind: len(findings) for kind, findings in repair_outlook(self).items()}

    @property
    def contracts(self) -> str:
        """Source of the contracts (the dtypes that operators accept): a measured table, or rules for operator families."""
        return judged_by(self.trace.setup.profile)

    @property
    def doubts(self) -> tuple[str, ...]:
        """Reasons why the contracts may be wrong for the device."""
        return tuple(doubts(self.trace.setup.profile))

    @property
    def not_traced(self) -> tuple[str, ...]:
        """Descriptions of the parts of the step that the trace does not contain."""
        return (*sharding_notes(self.trace.setup), *self.trace.untraced_parts())

    @property
    def facts(self) -> tuple[str, ...]:
        """Other facts about the step, such as the effect of a setting."""
        return self.trace.notes


NAMES: Names = {
    Check: "isotype model=trace.model ok complete fits status ranges headroom measured_at verdict seconds setup=trace.setup "
    "findings resolved_by memory.peak_bytes=trace.memory.peak memory.peak_phase=trace.memory.peak_phase "
    "memory.capacity_bytes=trace.setup.profile.memory_bytes memory.room_bytes=trace.setup.limit.size "
    "memory.room=trace.setup.limit.words memory.phases=trace.memory.phases flops time operators assumed contracts doubts "
    "not_traced notes=facts failure=trace.failure",
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
    """Return the result of a check as strict JSON with a `schema_version`. Numbers are not rounded."""
    return text_of(Check(report.trace, report.findings, report.seconds), SCHEMA_VERSION, NAMES)

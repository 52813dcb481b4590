"""The report of a check as JSON and SARIF. `python -m tools.schemas` writes `schema.json`."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PureWindowsPath
from typing import Any
from urllib.parse import quote

from isotype.contracts.contract import doubts, judged_by
from isotype.core import VERSION
from isotype.core.dtypes import dtype_name
from isotype.core.json_records import Names, text_of
from isotype.precision.devices.profile import DeviceProfile
from isotype.precision.policy import PrecisionPolicy
from isotype.records.finding import Finding, Fix
from isotype.records.memory import Products, StepTime
from isotype.records.request import Setup
from isotype.records.trace import Failure, Origin
from isotype.report.check.record import Outlook, Record, repair_outlook
from isotype.report.check.text import cost_clauses, fix_standing, sharding_notes, verdict
from isotype.rules import Rule, all_rules

SCHEMA_VERSION = 1
"""Version of the JSON format. The version increases when programs for the old format would misread the new format."""


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
        """A sentence that states the result of the check."""
        return verdict(self)

    @property
    def resolved_by(self) -> Mapping[Outlook, int]:
        """Number of errors and warnings in each of the groups below. The first fix of a finding decides the group of
        the finding.

        `repair`: `isotype.repair` applies the fix. `unsafe`: `isotype.repair` applies the fix with `unsafe=True`.
        `caller`: the user applies the fix. `untried`: the fix was not verified. `left`: no known fix works.
        """
        return {kind: len(findings) for kind, findings in repair_outlook(self).items()}

    @property
    def contracts(self) -> str:
        """Source of the contracts (the dtypes that operators accept): a measured table, or rules for operator families."""
        return judged_by(self.trace.setup.profile)

    @property
    def doubts(self) -> tuple[str, ...]:
        """Reasons why these contracts may be wrong for the device."""
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


SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_SOURCE = re.compile(r"(?P<path>.+):(?P<line>[1-9]\d*)")


def to_sarif(report: Record) -> str:
    """Return the check as a SARIF log with one run: the findings, their rules, and the error that ended the trace."""
    known = {rule.code: rule for rule in all_rules()}
    codes = sorted({finding.code for finding in report.findings})
    index = {code: position for position, code in enumerate(codes)}
    driver = {
        "name": "isotype",
        "semanticVersion": VERSION,
        "rules": [_rule(code, known.get(code)) for code in codes],
    }
    run = {
        "tool": {"driver": driver},
        "invocations": [_invocation(report)],
        "results": [_result(finding, index, report) for finding in report.findings],
        "properties": {"model": report.trace.model, "verdict": verdict(report), "status": report.status},
    }
    log = {"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}
    return json.dumps(log, indent=1, allow_nan=False) + "\n"


def _rule(code: str, rule: Rule | None) -> dict[str, Any]:
    """Describe a rule for SARIF by the rule's page. For a rule of another package, return only the code of the rule."""
    described: dict[str, Any] = {"id": code}
    if rule is not None:
        plain = f"{rule.title}. Run `isotype explain {code}` for the whole page."
        described |= {
            "shortDescription": {"text": rule.title},
            "fullDescription": {"text": rule.page.split("\n\n")[0].replace("\n", " ") or rule.title},
            "help": {"text": plain, "markdown": rule.page or plain},
        }
    return described


def _invocation(report: Record) -> dict[str, Any]:
    failure = report.trace.failure
    texts = (*(f"not traced: {part}" for part in report.trace.untraced_parts()), *report.trace.notes)
    notices = [{"level": "note", "message": {"text": text}} for text in texts]
    if failure is not None:
        at = f"{failure.phase} {failure.module}".rstrip()
        text = f"the step was traced only up to {at}: {failure.error}"
        notices.append({"level": "error", "message": {"text": text}})
    invocation: dict[str, Any] = {"executionSuccessful": report.complete}
    return invocation | ({"toolExecutionNotifications": notices} if notices else {})


def _result(finding: Finding, index: Mapping[str, int], report: Record) -> dict[str, Any]:
    cost = cost_clauses(finding.cost, report.trace.setup.profile.title) if finding.cost is not None else []
    properties: dict[str, Any] = {
        "op": finding.op,
        "phase": finding.phase,
        "cause": finding.cause,
        "evidence": list(finding.evidence),
        "places": list(finding.places),
        "operands": [f"{o.role} {dtype_name(o.dtype)} {list(o.shape)}" for o in finding.operands],
        "fixes": [f"{fix.text} ({fix_standing(fix)})" for fix in finding.fixes],
    }
    lines = [
        finding.message,
        *([f"Cause: {finding.cause}"] if finding.cause else []),
        *([f"Cost: {'; '.join(cost)}"] if cost else []),
        *finding.notes,
        *(f"Fix: {text}" for text in properties["fixes"]),
    ]
    return {
        "ruleId": finding.code,
        "ruleIndex": index[finding.code],
        "level": finding.severity,
        "message": {"text": "\n".join(lines)},
        "locations": [_location(finding)],
        # Code scanning matches findings of two commits by this key. Lines move, but cause and place stay.
        "partialFingerprints": {"isotype/v1": "|".join(finding.key)},
        "properties": properties,
    }


def _location(finding: Finding) -> dict[str, Any]:
    name = finding.module or "model"
    logical = {"fullyQualifiedName": name, "name": name.rpartition(".")[2], "kind": "module"}
    location: dict[str, Any] = {"logicalLocations": [logical]}
    match = _SOURCE.fullmatch(finding.source)
    if match:
        location["physicalLocation"] = {
            "artifactLocation": {"uri": _uri(match["path"])},
            "region": {"startLine": int(match["line"])},
        }
    return location


def _uri(path: str) -> str:
    """Return a path as a URI reference. Absolute paths get the scheme `file:`, and relative paths get no scheme."""
    windows = PureWindowsPath(path)
    if windows.drive:
        host = "" if windows.drive.startswith("\\\\") else "///"
        return f"file:{host}{quote(windows.as_posix(), safe='/:')}"
    return f"file://{quote(path)}" if path.startswith("/") else quote(path)

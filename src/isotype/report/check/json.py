"""The report of a check as JSON and as SARIF. `python -m tools.schemas` writes `schema.json` from the records."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any
from urllib.parse import quote

import torch

from isotype.contracts.contract import doubts, judged_by
from isotype.core import VERSION
from isotype.core.dtypes import dtype_name
from isotype.core.json_records import Names, text_of
from isotype.precision.devices.profile import DeviceProfile
from isotype.precision.policy import PrecisionPolicy
from isotype.records.finding import Finding, Fix
from isotype.records.memory import MemoryKind, Phase, Products, StepTime
from isotype.records.trace import Failure, Origin, Setup
from isotype.report.check.record import Known, Outlook, Record, Status, repair_outlook
from isotype.report.check.text import cost_clauses, fix_standing, sharding_notes, verdict
from isotype.rules import Rule, all_rules

SCHEMA_VERSION = 1
"""Version of the JSON form. It is raised if a reader of the previous version would misread the new one."""


@dataclass(frozen=True)
class Check:
    """A traced and judged training step, in the JSON form of `isotype check --json` and `Report.to_json()`.

    Numbers are not rounded.

    Attributes:
        isotype: version of isotype that wrote the report.
        model: name of the model; empty if the model has no name.
        ok: true if no finding is an error, even if the trace ended early; see `complete`.
        complete: true if the step was traced to its end.
        fits: true if `peak_bytes` is at most `room_bytes`; null if `peak_bytes` was not measured or `room_bytes` is
            unknown.
        status: the worst known result.
        ranges: source of the value ranges of a step with float16: measured, published for the model's family, or
            unknown; null without float16.
        headroom: 65504 divided by the largest measured float16 value of the forward; null if not measured.
        measured_at: date and time at which the values were measured, ISO 8601 in UTC; null if they were not.
        verdict: the status in a sentence.
        seconds: wall-clock time of the check, in seconds.
        setup: settings of the step.
        findings: findings of the rules, errors first, then sorted by code.
        resolved_by: number of errors and warnings by who can apply their first fix: `repair` is `isotype.repair`,
            `unsafe` is `isotype.repair` with `unsafe=True`, and `caller` is the user; `untried` counts fixes that were
            not verified, `left` findings without a known fix.
        peak_bytes: bytes at the peak of any step and evaluation; 0 if not measured.
        peak_phase: phase of the overall peak; null if not measured.
        capacity_bytes: bytes of the device's memory; null if unknown.
        room_bytes: bytes of the device's memory that a step may take; null if unknown.
        room: description of `room_bytes`: its size, and how it was determined.
        phases: bytes of the tensors alive at the peak of each phase, by kind.
        flops: FLOPs of the matmul-like operators of one step, by compute dtype.
        time: least time of the step; null if the device has no published rates or the step was not traced to its end.
        operators: number of operators in a step of the real model.
        assumed: operators whose operands a rule for their family refuses, without a measurement on the device.
        contracts: source of the operands that the device accepts: a measured table, or its substitute.
        doubts: reasons why that table may be wrong for the device.
        not_traced: descriptions of what the trace does not contain.
        failure: the error that ended the trace; null if the step was traced to its end.
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
    """Return a check as strict JSON with a `schema_version`; bytes, FLOPs, shares and seconds are not rounded."""
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
        resolved_by={kind: len(findings) for kind, findings in repair_outlook(report).items()},
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


SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_SOURCE = re.compile(r"(?P<path>.+):(?P<line>[1-9]\d*)")


def to_sarif(report: Record) -> str:
    """Return a check as a SARIF log with one run: the rules with findings, the findings, and how the trace ended."""
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
    """Return SARIF's description of a rule: its page, or only the code if the rule belongs to another package."""
    described: dict[str, Any] = {"id": code}
    if rule is not None:
        page = rule.page.strip()
        plain = f"{rule.title}. Run `isotype explain {code}` for the whole page."
        described |= {
            "shortDescription": {"text": rule.title},
            "fullDescription": {"text": page.split("\n\n")[0].replace("\n", " ") or rule.title},
            "help": {"text": plain, "markdown": page or plain},
        }
    return described


def _invocation(report: Record) -> dict[str, Any]:
    failure = report.trace.failure
    notices = [{"level": "note", "message": {"text": note}} for note in report.trace.notes]
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
        # Code scanning matches findings of two commits by this key: lines move, but cause and place stay.
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
    """Return a path as a URI reference; only absolute paths get the scheme `file:`."""
    windows = PureWindowsPath(path)
    if windows.drive:
        return windows.as_uri()
    return PurePosixPath(path).as_uri() if path.startswith("/") else quote(path)

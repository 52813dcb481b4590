"""A check as JSON; `schema.json` beside this file describes it."""

from __future__ import annotations

import json
from typing import Any

from isotype.contracts.contract import doubts, judged_by
from isotype.core.dtypes import dtype_name
from isotype.core.package import VERSION
from isotype.records.finding import Cost, Finding, Fix
from isotype.records.step_time import StepTime
from isotype.records.trace import Operand, Setup
from isotype.report.check.record import Record, repair_outlook
from isotype.report.check.text import sharding_notes, verdict

SCHEMA_VERSION = 1
"""Version of the JSON form; it grows when a reader of the former version would misread the new one."""


def to_json(report: Record) -> str:
    """Strict JSON; `schema_version` says which schema. Bytes, FLOPs, shares and seconds stay unrounded numbers."""
    return json.dumps(_encode(report), indent=1, allow_nan=False) + "\n"


def _encode(report: Record) -> dict[str, Any]:
    trace, memory, failure = report.trace, report.memory, report.trace.failure
    return {
        "schema_version": SCHEMA_VERSION,
        "isotype": VERSION,
        "model": trace.model,
        "ok": report.ok,
        "complete": report.complete,
        "fits": report.fits,
        "status": report.status,
        "ranges": report.ranges,
        "headroom": None if report.largest is None else report.largest.headroom,
        "measured_at": None if trace.setup.ranges is None else trace.setup.ranges.when,
        "verdict": verdict(report),
        "seconds": report.seconds,
        "setup": _setup(trace.setup),
        "findings": [_finding(finding) for finding in report.findings],
        "resolved_by": {kind: len(some) for kind, some in repair_outlook(report).items()},
        "memory": {
            "peak_bytes": memory.peak,
            "peak_phase": memory.peak_phase,
            "capacity_bytes": trace.setup.profile.memory_bytes,
            "phases": {phase: dict(kinds) for phase, kinds in memory.phases.items()},
        },
        "flops": {dtype_name(dtype): count for dtype, count in report.flops.items()},
        "time": _time(report.time),
        "operators": sum(call.repeats for call in trace.calls),
        "assumed": list(report.assumed),
        "contracts": judged_by(trace.setup.profile),
        "doubts": doubts(trace.setup.profile),
        "not_traced": [*sharding_notes(trace.setup), *trace.notes],
        "failure": None
        if failure is None
        else {
            "phase": failure.phase,
            "module": failure.module,
            "source": failure.source,
            "error": failure.error,
            "dtype_related": failure.dtype_related,
        },
    }


def _time(time: StepTime | None) -> dict[str, Any] | None:
    if time is None:
        return None
    return {
        "seconds": time.seconds,
        "traced_seconds": time.traced_seconds,
        "bound": time.bound,
        "tokens_per_second": time.tokens_per_second,
        "products": {
            dtype_name(dtype): {
                "flops": each.flops,
                "flops_per_second": each.flops_per_second,
                "emulated_in": None if each.emulated_in is None else dtype_name(each.emulated_in),
                "seconds": each.seconds,
            }
            for dtype, each in time.products.items()
        },
        "traffic": {
            "bytes": time.bytes,
            "bytes_per_second": time.bytes_per_second,
            "seconds": time.traffic_seconds,
        },
        "launches": {"count": time.launches, "seconds_each": time.launch_seconds},
    }


def _setup(setup: Setup) -> dict[str, Any]:
    profile = setup.profile
    return {
        "device": {"name": profile.name, "title": profile.title, "memory_bytes": profile.memory_bytes},
        "autocast": None if setup.autocast is None else dtype_name(setup.autocast),
        "autocast_eval": setup.autocast_eval,
        "scaler": setup.scaler,
        "optimizer": setup.optimizer,
        "learning_rate": setup.learning_rate,
        "compute": dtype_name(setup.compute),
        "phases": list(setup.phases),
        "fsdp": setup.fsdp,
        "devices": setup.devices,
        "reshard": setup.reshard,
        "batch": {name: list(shape) for name, shape in setup.batch.items()},
        "details": list(setup.details),
        "data": setup.data,
        "policy": None if setup.policy is None else setup.policy.summary(),
    }


def _finding(finding: Finding) -> dict[str, Any]:
    return {
        "code": finding.code,
        "severity": finding.severity,
        "message": finding.message,
        "module": finding.module,
        "op": finding.op,
        "phase": finding.phase,
        "source": finding.source,
        "cause": finding.cause,
        "evidence": list(finding.evidence),
        "notes": list(finding.notes),
        "operands": [_operand(operand) for operand in finding.operands],
        "places": list(finding.places),
        "cost": None if finding.cost is None else _cost(finding.cost),
        "fixes": [_fix(fix) for fix in finding.fixes],
    }


def _operand(operand: Operand) -> dict[str, Any]:
    origin = operand.origin
    return {
        "role": operand.role,
        "dtype": dtype_name(operand.dtype),
        "shape": list(operand.shape),
        "origin": {
            "kind": origin.kind,
            "name": origin.name,
            "module": origin.module,
            "source": origin.source,
        },
    }


def _cost(cost: Cost) -> dict[str, Any]:
    return {
        "flops_share": cost.flops_share,
        "cast_bytes": cost.cast_bytes,
        "memory_bytes": cost.memory_bytes,
        "slowdown": cost.slowdown,
    }


def _fix(fix: Fix) -> dict[str, Any]:
    actions = [{"kind": a.kind, "target": a.target, "value": a.value} for a in fix.actions]
    return {
        "description": fix.description,
        "scope": fix.scope,
        "safety": fix.safety,
        "verified": fix.verified,
        "outcome": fix.outcome,
        "actions": actions,
    }

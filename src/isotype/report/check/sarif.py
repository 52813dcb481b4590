"""A check as SARIF 2.1.0 (OASIS, 2020), the format of code scanning and editors.

A finding has a line, no column or region. A source outside of the user's project (an installed library) keeps its
path; one without a file has logical locations only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any
from urllib.parse import quote

from isotype.core.dtypes import dtype_name
from isotype.records.finding import Finding
from isotype.report.check.record import Record
from isotype.report.check.text import cost_clauses, fix_standing, verdict
from isotype.rules import Rule, all_rules

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_SOURCE = re.compile(r"(?P<path>.+):(?P<line>[1-9]\d*)")


def to_sarif(report: Record) -> str:
    """Return a log with one run: rules with findings, findings with their places, the end of the trace."""
    from isotype.core.package import VERSION

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
    return (
        json.dumps({"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}, indent=1, allow_nan=False) + "\n"
    )


def _rule(code: str, rule: Rule | None) -> dict[str, Any]:
    """Return the rule's page; an unknown code (of another package) is represented by the code alone."""
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
        at = f"{failure.phase} {failure.module}".strip()
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
        # Lines move and layers are renamed; the cause and the place are what makes it the same finding tomorrow.
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
    """Return a path as a URI reference: absolute paths with their scheme, relative ones unchanged."""
    windows = PureWindowsPath(path)
    if windows.drive:
        return windows.as_uri()
    return PurePosixPath(path).as_uri() if path.startswith("/") else quote(path)

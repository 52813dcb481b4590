"""The SARIF form of a check, against what the 2.1.0 specification asks for."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from isotype import __version__
from isotype.report.check.json import SCHEMA
from isotype.rules import all_rules
from tests.report.check_samples import SAMPLES, costly, crash, not_traced

LEVELS = {"none", "note", "warning", "error"}  # 3.27.10


def run_of(name: str) -> dict[str, Any]:
    log = json.loads(SAMPLES[name]().to_sarif())
    assert (log["$schema"], log["version"]) == (SCHEMA, "2.1.0")
    (run,) = log["runs"]
    assert isinstance(run, dict)
    return run


@pytest.mark.parametrize("name", SAMPLES)
def test_log_is_valid(name: str) -> None:
    run = run_of(name)
    driver = run["tool"]["driver"]
    assert (driver["name"], driver["semanticVersion"]) == ("isotype", __version__)
    codes = [rule["id"] for rule in driver["rules"]]
    assert len(set(codes)) == len(codes)
    for invocation in run["invocations"]:
        assert isinstance(invocation["executionSuccessful"], bool)  # 3.20.14: required
    for result in run["results"]:
        assert result["level"] in LEVELS
        assert result["message"]["text"]
        assert codes[result["ruleIndex"]] == result["ruleId"]
        for location in result["locations"]:
            (logical,) = location["logicalLocations"]
            assert logical["fullyQualifiedName"].endswith(logical["name"])


def test_every_finding_is_a_result() -> None:
    found = [(result["ruleId"], result["level"]) for result in run_of("costly")["results"]]
    assert found == [(finding.code, finding.severity) for finding in costly().findings]


def test_places_and_fixes() -> None:
    (result,) = run_of("crash")["results"]
    (location,) = result["locations"]
    assert location["physicalLocation"] == {
        "artifactLocation": {"uri": "transformers/models/llama/modeling_llama.py"},
        "region": {"startLine": 243},
    }
    assert location["logicalLocations"][0]["fullyQualifiedName"] == "model.layers.0.self_attn.q_proj"
    assert "Fix: return each norm's output in float16 (safe; verified: the step then runs clean)" in (
        result["message"]["text"].splitlines()
    )


@pytest.mark.parametrize(
    ("source", "uri"),
    [
        ("/home/me/my model.py:3", "file:///home/me/my%20model.py"),
        ("my model.py:3", "my%20model.py"),
        (r"C:\me\my model.py:3", "file:///C:/me/my%20model.py"),
        (r"\\host\shared\model.py:3", "file://host/shared/model.py"),
        ("model.py", None),
        ("model.py:0", None),
        ("", None),
    ],
)
def test_files_are_uris_and_nothing_else_is_a_file(source: str, uri: str | None) -> None:
    report = replace(crash(), findings=(replace(crash().findings[0], source=source),))
    location = json.loads(report.to_sarif())["runs"][0]["results"][0]["locations"][0]
    assert location.get("physicalLocation", {}).get("artifactLocation", {}).get("uri") == uri


def test_rules_bring_their_pages() -> None:
    known = {rule.code: rule for rule in all_rules()}
    assert known
    code, rule = next(iter(known.items()))
    report = replace(crash(), findings=(replace(crash().findings[0], code=code),))
    (described,) = json.loads(report.to_sarif())["runs"][0]["tool"]["driver"]["rules"]
    assert described["shortDescription"]["text"] == rule.title
    assert described["help"]["markdown"] == rule.page.strip()
    assert f"isotype explain {code}" in described["help"]["text"]


def test_a_code_of_no_shipped_rule_is_given_without_a_page() -> None:
    report = replace(crash(), findings=(replace(crash().findings[0], code="ACME1"),))
    (described,) = json.loads(report.to_sarif())["runs"][0]["tool"]["driver"]["rules"]
    assert described == {"id": "ACME1"}


def test_a_step_not_traced_is_an_unsuccessful_execution() -> None:
    (invocation,) = run_of("not_traced")["invocations"]
    assert invocation["executionSuccessful"] is False
    texts = [notice["message"]["text"] for notice in invocation["toolExecutionNotifications"]]
    failure = not_traced().trace.failure
    assert failure is not None
    assert [*not_traced().trace.notes] == texts[:-1]
    assert texts[-1].endswith(failure.error)


def test_fingerprint_survives_another_line() -> None:
    moved = replace(crash(), findings=(replace(crash().findings[0], source="elsewhere.py:9"),))
    prints = [
        json.loads(report.to_sarif())["runs"][0]["results"][0]["partialFingerprints"]
        for report in (crash(), moved)
    ]
    assert prints[0] == prints[1]

"""The published JSON Schemas: what reports write is valid, and nothing else is."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import resources
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match
from tools.schemas import texts

import isotype
from isotype.report.run.record import DataSummary, RunRecord
from isotype.report.run.record import to_json as run_to_json
from tests.report import test_run_report
from tests.report.check_samples import SAMPLES, costly, crash, not_traced

Content = dict[str, Any]
Path = tuple[str | int, ...]


def schema(kind: str) -> Content:
    text = resources.files("isotype.report").joinpath(kind, "schema.json").read_text(encoding="utf-8")
    content: Content = json.loads(text)
    return content


CHECK, RUN = (Draft202012Validator(schema(kind)) for kind in ("check", "run"))


def full_check() -> Content:
    """A report with something in every field."""
    trace = costly().trace
    model = torch.nn.Linear(4, 4)
    policy = isotype.resolve_precision(model, dtype="float16", device="t4")
    seen = replace(
        trace, failure=not_traced().trace.failure, setup=replace(trace.setup, policy=policy, details=("rank 8",))
    )  # fmt: skip
    report = replace(costly(), trace=seen, findings=(*crash().findings, *costly().findings))
    content: Content = json.loads(report.to_json())
    return content


def full_run() -> Content:
    """A run with something in every field."""
    steps = tuple(
        replace(step, metrics=(("rewards/margins", 0.1),))
        for step in test_run_report.step_records(3, scaled=True)
    )
    data = DataSummary(1840, 96, 16, 1.3, (180, 420, 997), 37, 0.021, 0.31)
    record = test_run_report.realistic(
        steps=steps,
        data=data,
        resumed_from=5,
        error="RuntimeError: none left",
        headroom=test_run_report.sampled(),
    )
    content: Content = json.loads(run_to_json(record))
    return content


@pytest.mark.parametrize("validator", [CHECK, RUN])
def test_the_schemas_are_schemas(validator: Draft202012Validator) -> None:
    Draft202012Validator.check_schema(validator.schema)
    assert validator.schema["$schema"] == Draft202012Validator.META_SCHEMA["$id"]


@pytest.mark.parametrize("name", SAMPLES)
def test_reports_of_checks_are_valid(name: str) -> None:
    CHECK.validate(json.loads(SAMPLES[name]().to_json()))


def test_the_report_of_a_real_check_is_valid() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4).to(torch.bfloat16))
    report = isotype.check(model, {"input": torch.zeros(2, 4)}, device="cpu")
    assert not report.ok
    CHECK.validate(json.loads(report.to_json()))


@given(test_run_report.records)
@settings(max_examples=50)
def test_reports_of_runs_are_valid(record: RunRecord) -> None:
    RUN.validate(json.loads(run_to_json(record)))


def objects(content: Any, at: Path = ()) -> Iterator[tuple[Path, Content]]:
    """Every object inside of `content`, of a list only those in its first item, with its place."""
    if isinstance(content, dict):
        yield at, content
        for name, value in content.items():
            yield from objects(value, (*at, name))
    elif isinstance(content, list):
        for value in content[:1]:
            yield from objects(value, (*at, 0))


MAPPINGS = {
    "resolved_by",
    "layers",
    "phases",
    "flops",
    "batch",
    "reasons",
    "forward",
    "backward",
    "unscale",
    "optimizer",
}
"""Objects whose keys are names of the run at hand."""


def changed(content: Content, at: Path, change: Callable[[Content], object]) -> Content:
    content = copy.deepcopy(content)
    place: Any = content
    for step in at:
        place = place[step]
    change(place)
    return content


@pytest.mark.parametrize(("validator", "make"), [(CHECK, full_check), (RUN, full_run)])
def test_every_field_is_needed_typed_and_known(
    validator: Draft202012Validator, make: Callable[[], Content]
) -> None:
    content = make()
    validator.validate(content)
    accepted, tried = [], 0
    for at, fields_there in objects(content):
        if at and at[-1] in MAPPINGS:
            continue
        for name in fields_there:
            wrong = changed(content, at, lambda place, name=name: place.update({name: {"no": ["such"]}}))
            missing = changed(content, at, lambda place, name=name: place.pop(name))
            accepted += [(*at, name, "wrong")] if validator.is_valid(wrong) else []
            accepted += [(*at, name, "missing")] if validator.is_valid(missing) else []
            tried += 1
        unknown = changed(content, at, lambda place: place.update(colour="red"))
        accepted += [(*at, "unknown")] if validator.is_valid(unknown) else []
    assert accepted == []
    assert tried > 50


@pytest.mark.parametrize(
    ("validator", "make", "at", "value"),
    [
        (CHECK, full_check, ("schema_version",), 2),
        (CHECK, full_check, ("status",), "fine"),
        (CHECK, full_check, ("findings", 0, "code"), "IST1"),
        (CHECK, full_check, ("findings", 0, "severity"), "fatal"),
        (CHECK, full_check, ("findings", 1, "cost", "flops_share"), 62),
        (CHECK, full_check, ("memory", "peak_bytes"), 1.5),
        (CHECK, full_check, ("memory", "phases"), {"middle": {}}),
        (CHECK, full_check, ("flops", "float16"), -1),
        (RUN, full_run, ("schema_version",), 3),
        (RUN, full_run, ("status",), "done"),
        (RUN, full_run, ("steps", 1, "loss"), "nan"),
        (RUN, full_run, ("steps", 1, "step"), True),
        (RUN, full_run, ("versions", 0), ["torch"]),
        (RUN, full_run, ("versions", 0), ["torch", "2", "3"]),
        (RUN, full_run, ("notes",), "a"),
        (RUN, full_run, ("data", "lengths"), [1, 2]),
    ],
)
def test_a_wrong_value_is_refused_at_its_place(
    validator: Draft202012Validator, make: Callable[[], Content], at: Path, value: object
) -> None:
    content = changed(make(), at[:-1], lambda place: place.__setitem__(at[-1], value))
    error = best_match(validator.iter_errors(content))
    assert error is not None
    assert tuple(error.absolute_path)[: len(at)] == at


def test_the_schemas_are_those_of_the_records() -> None:
    for path, text in texts().items():
        assert path.read_text(encoding="utf-8") == text, "python -m tools.schemas"


@pytest.mark.parametrize("validator", [CHECK, RUN])
def test_every_byte_count_and_duration_names_its_unit(validator: Draft202012Validator) -> None:
    for _, part in objects(validator.schema):
        for name, field in part.get("properties", {}).items():
            if name.endswith("_bytes") and field.get("type") != "array":
                assert "ytes" in field["description"], name
            if name == "seconds":
                assert "seconds" in field["description"]

"""Who measures the values of a float16 step: the check itself where it is cheap; what it says where nobody did."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

import isotype
from isotype.preflight import run as preflight_run
from isotype.preflight.check import check
from isotype.preflight.run import run
from isotype.ranges import measure as ranges_measure
from isotype.records.request import LossOf, StepRequest
from isotype.report.check.report import Report
from tests.model.test_boundary_choice import llama

IDS = torch.arange(24).reshape(2, 12)
BATCH = {"input_ids": IDS, "labels": IDS}


def model(scale: float = 1.0) -> Any:
    made = llama(scale)
    made.lm_head.requires_grad_(True)
    return made


def checked(made: nn.Module, **options: Any) -> Report:
    return check(made, BATCH, device="t4", **{"autocast": "float16", "verify": False, **options})


def codes(report: Report) -> set[str]:
    return {finding.code for finding in report.findings}


def test_a_float16_step_is_measured_on_its_own_inputs() -> None:
    made = model()
    before = {name: value.clone() for name, value in made.state_dict().items()}
    state = torch.get_rng_state()
    report = checked(made)
    ranges = report.trace.setup.ranges
    assert ranges is not None
    assert (ranges.text, ranges.tokens) == ("the batch given", 24)
    assert (report.ranges, "IST809" in codes(report)) == ("measured", False)
    assert report.largest is not None
    assert report.largest.headroom > 2
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(before[name], value) for name, value in made.state_dict().items())
    assert all(parameter.grad is None for parameter in made.parameters())


def test_what_overflows_is_found_without_being_asked() -> None:
    assert "IST809" in codes(checked(model(2.0**14)))


def test_a_fix_that_computes_in_float16_runs_clean_only_if_its_values_are_measured() -> None:
    layers = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    report = check(layers, {"input": torch.zeros(4, 64)}, device="t4", autocast="bfloat16")
    (finding,) = report.findings
    assert [(fix.outcome, fix.verified) for fix in finding.fixes] == [
        ("nothing else is found", True),  # in float16
        ("the step then runs clean", True),  # in float32
    ]


@pytest.mark.parametrize("autocast", ["bfloat16", False])
def test_other_steps_are_not_measured(autocast: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("measured")

    monkeypatch.setattr(ranges_measure, "measure", refuse)
    report = checked(model(), autocast=autocast)
    assert (report.ranges, report.trace.setup.ranges, report.trace.notes) == (None, None, ())


def test_what_would_take_long_is_left_to_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight_run, "_WEIGHTS_A_SECOND", 100.0)
    report = checked(model())
    assert report.ranges == "unknown"
    (note,) = report.trace.notes
    assert note.startswith("value ranges: a measurement on this machine would take about ")
    assert "runs clean" not in str(report)
    assert "isotype.measure_ranges(model, batch)" in str(report)
    content = json.loads(report.to_json())
    assert (content["ranges"], content["headroom"], content["measured_at"]) == ("unknown", None, None)


def test_a_model_without_weights_is_not_measured() -> None:
    with torch.device("meta"):
        weightless = model()
    report = checked(weightless)
    assert (report.ranges, report.trace.notes) == ("unknown", ())
    assert "runs clean" not in str(report)


def test_what_is_publicly_known_of_a_family_is_said() -> None:
    with torch.device("meta"):
        weightless = model()
    weightless.config.model_type = "gemma3_text"
    report = checked(weightless)
    assert report.ranges == "known"
    assert "known of the model's family: " in " ".join(str(report).split())


def test_inputs_that_the_model_does_not_take_are_said() -> None:
    """A loss that calls the model in a way of its own: the measurement cannot, and the check goes on."""

    def loss(twin: Any, given: Any) -> torch.Tensor:
        return twin(input_ids=given["tokens"], labels=given["tokens"]).loss  # type: ignore[no-any-return]

    request = StepRequest(model(), LossOf(loss, {"tokens": IDS}), device="t4", autocast="float16")
    report = run(request, verify=False)
    assert report.ranges == "unknown"
    assert any("the model could not be measured on these inputs" in note for note in report.trace.notes)


def test_given_ranges_are_used() -> None:
    made = model(2.0**14)
    ranges = isotype.measure_ranges(made, BATCH, progress=False)
    report = checked(made.to("meta"), ranges=ranges)
    assert report.trace.setup.ranges is ranges
    assert "IST809" in codes(report)


class _NamesGpu(nn.Module):
    """Code that was written for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.to("cuda")).sum()  # type: ignore[no-any-return]


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs there")
def test_code_that_names_a_gpu_is_not_measured_without_one() -> None:
    report = check(_NamesGpu(), {"x": torch.ones(2, 4)}, device="t4", autocast="float16", verify=False)
    assert report.ranges == "unknown"
    assert any("the model could not be measured on these inputs" in note for note in report.trace.notes)


def test_a_model_that_is_not_finite_in_float32_is_said() -> None:
    """Its float16 values are measured, without those that are not finite: the report must not say less."""
    made = model()
    with torch.no_grad():
        made.model.layers[0].mlp.down_proj.weight.fill_(torch.inf)
    report = checked(made)
    (note,) = [note for note in report.trace.notes if note.startswith("value ranges: not finite in float32")]
    assert "model.layers.0.mlp.down_proj" in note
    assert note.split(":", 1)[1].strip()[:30] in " ".join(str(report).split())

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from isotype.precision.versions import Incompatibility, incompatibilities
from isotype.preflight.setup import setup_of
from isotype.records.request import StepRequest
from isotype.records.trace import Trace
from tests.rules.traces import found, traced

RULE = "ist603_versions"

REQUIRES = {"transformers": ["torch>=2.6"]}
OLD = incompatibilities({"torch": "2.4.0", "transformers": "5.23.0", "peft": "0.21.2"}, REQUIRES)


def among(incompatible: list[Incompatibility]) -> Trace:
    trace = traced(nn.Linear(4, 4), {"input": torch.ones(2, 4)})
    return replace(trace, setup=replace(trace.setup, incompatible=tuple(incompatible)))


def test_an_old_torch_under_a_new_transformers() -> None:
    first = found(RULE, among(OLD))[0]
    assert first.severity == "error"
    assert first.message == "transformers 5.23.0 requires torch>=2.6, not 2.4.0"
    assert first.cause == "transformers 5.23.0 and torch 2.4.0"
    assert first.fixes[0].description == 'pip install --upgrade "torch>=2.6"'


def test_libraries_that_fit() -> None:
    fitting = incompatibilities({"torch": "2.13.0", "transformers": "5.23.0"}, REQUIRES)
    assert found(RULE, among(fitting)) == []


def test_a_step_knows_the_libraries_of_its_own_machine_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("isotype.preflight.setup.incompatible_here", lambda: tuple(OLD))
    model, inputs = nn.Linear(4, 4), {"input": torch.ones(2, 4)}
    assert setup_of(StepRequest(model, inputs, device="cpu")).incompatible == tuple(OLD)
    assert setup_of(StepRequest(model, inputs, device="t4")).incompatible == ()

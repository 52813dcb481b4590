from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from isotype.precision.versions import incompatibilities
from isotype.rules import ist603_versions
from isotype.trace.record import Trace
from tests.rules.traces import found, on, traced

RULE = "ist603_versions"


@pytest.fixture
def trace() -> Trace:
    return traced(nn.Linear(4, 4), {"input": torch.ones(2, 4)})


@pytest.fixture
def old_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"torch": "2.4.0", "transformers": "5.23.0", "peft": "0.21.2"}
    monkeypatch.setattr(ist603_versions, "installed", lambda: versions)
    # What the installed packages declare depends on the machine; the known pairs do not.
    monkeypatch.setattr(ist603_versions, "incompatibilities", partial(incompatibilities, requires={}))
    monkeypatch.setattr(ist603_versions, "_incompatible", ist603_versions._incompatible.__wrapped__)


@pytest.mark.usefixtures("old_torch")
def test_an_old_torch_under_a_new_transformers(trace: Trace) -> None:
    first = found(RULE, trace)[0]
    assert first.severity == "error"
    assert first.message == "transformers 5.23.0 needs torch>=2.6, not 2.4.0: it disables torch below"
    assert first.cause == "transformers 5.23.0 and torch 2.4.0"
    assert first.fixes[0].description == 'pip install --upgrade "torch>=2.6"'


@pytest.mark.usefixtures("old_torch")
def test_another_machines_libraries_are_not_judged(trace: Trace) -> None:
    assert found(RULE, on(trace, "t4")) == []


def test_libraries_that_fit(trace: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ist603_versions, "installed", lambda: {"torch": "2.13.0", "transformers": "5.23.0"})
    monkeypatch.setattr(ist603_versions, "_incompatible", ist603_versions._incompatible.__wrapped__)
    assert trace.setup.profile.present
    assert [finding for finding in found(RULE, trace) if finding.severity == "error"] == []

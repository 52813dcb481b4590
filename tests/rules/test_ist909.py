from __future__ import annotations

from dataclasses import replace

from isotype.rules.ist909_stale_casts import find
from tests.rules.samples import trace


def test_casts_of_before_a_step_are_an_error() -> None:
    (finding,) = find(replace(trace(), stale_casts=True))
    assert finding.severity == "error"
    assert finding.message == "a forward computes with the weights from before the optimizer's step"
    assert finding.fixes[0].description.startswith("leave the autocast region before optimizer.step()")


def test_other_steps_are_silent() -> None:
    assert not list(find(trace()))

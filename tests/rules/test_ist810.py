"""Gradients that float16 flushes to zero: foretold shares against those of real float16 tensors."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch

from isotype.preflight.check import check
from isotype.report.check.report import Report
from isotype.rules.ist810_underflow import find
from isotype.rules.kit.value_ranges import flushed
from tests.model.test_boundary_choice import llama

IDS = torch.arange(24).reshape(2, 12)


@functools.cache
def checked(k: int, scaler: bool = True) -> Report:
    """The check of a tiny Llama whose loss is 2^-k of what it was."""
    model: Any = llama()
    model.lm_head.requires_grad_(True)
    forward = type(model).forward

    class Small(type(model)):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output = forward(self, *args, **kwargs)
            output.loss = output.loss * 2.0**-k
            return output

    model.__class__ = Small
    batch = {"input_ids": IDS, "labels": IDS}
    phases = ("forward", "backward")
    return check(
        model,
        batch,
        device="t4",
        autocast="float16",
        scaler=scaler,
        phases=phases,
        wiring=False,
        verify=False,
    )


def codes(report: Report) -> set[str]:
    return {finding.code for finding in report.findings}


def test_a_loss_of_ordinary_size_is_silent() -> None:
    assert "IST810" not in codes(checked(0))


def test_gradients_below_the_first_loss_scale() -> None:
    report = checked(40)
    (finding,) = [each for each in report.findings if each.code == "IST810"]
    assert finding.message == "100 % of the gradients' values become zero in float16 at a loss scale of 65536"
    (fix,) = finding.fixes
    assert fix.description == "begin with a larger loss scale: torch.amp.GradScaler(init_scale=2.0**24)"


def test_a_gradient_that_overflowed_in_the_measurement_does_not_count() -> None:
    trace = checked(40).trace
    ranges = trace.setup.ranges
    assert ranges is not None
    overflowed = tuple(
        replace(each, output=float("inf")) if each.phase == "backward" and each.matmul else each
        for each in ranges.operators
    )
    setup = replace(trace.setup, ranges=replace(ranges, operators=overflowed))
    (finding,) = find(replace(trace, setup=setup))
    assert finding.fixes[0].description.endswith("(init_scale=2.0**24)")


def test_a_step_without_scaler_is_told_both_shares() -> None:
    report = checked(16, scaler=False)
    assert "IST810" not in codes(report)
    (finding,) = [each for each in report.findings if each.code == "IST303"]
    assert finding.notes[0].startswith("measured: ")
    shares = flushed(report.trace)
    assert shares is not None
    assert shares.scaled < 0.2 < shares.plain


@pytest.mark.parametrize("k", [0, 10, 20])
def test_shares_are_those_of_a_real_backward(k: int) -> None:
    """Of the one gradient of the logits: what float16 makes of it."""
    report = checked(k)
    ranges = report.trace.setup.ranges
    assert ranges is not None
    measured = [each for each in ranges.operators if each.phase == "backward" and "log_softmax" in each.op]
    assert len(measured) == 1
    model: Any = llama().eval()
    logits = model(input_ids=IDS).logits.detach().requires_grad_()
    shifted = torch.nn.functional.cross_entropy(logits[:, :-1].reshape(-1, 64), IDS[:, 1:].reshape(-1))
    (shifted * 2.0**-k).backward()
    gradient = logits.grad
    assert gradient is not None
    nonzero = gradient[gradient != 0]
    for share, scale in ((measured[0].flushed, 1.0), (measured[0].flushed_scaled, 2.0**16)):
        lost = ((nonzero * scale).half() == 0).float().mean()
        assert share == pytest.approx(float(lost), abs=0.02)

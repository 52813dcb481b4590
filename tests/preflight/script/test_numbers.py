"""`isotype run --watch`: a script ends before the update whose loss or gradient is no number, with the operator to blame."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator

import pytest
import torch
from torch.optim import optimizer as optimizers

from isotype.cli.run import parse
from isotype.preflight.script.numbers import Numbers
from tests.preflight.script.test_run import _run, _script


@pytest.fixture(autouse=True)
def _lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("COLUMNS", "130")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def watched(capsys: pytest.CaptureFixture[str], kind: str) -> tuple[int, str, str]:
    """Status, last line of the script's own output, and what was said up to the summary."""
    own = (torch.autograd.backward, torch.amp.GradScaler.step, len(optimizers._global_optimizer_pre_hooks))
    status, out, err = _run(capsys, "--watch", "--no-preflight", *_script("diverges", kind))
    left = (torch.autograd.backward, torch.amp.GradScaler.step, len(optimizers._global_optimizer_pre_hooks))
    assert own == left
    said = re.sub(r"(diverges.py):\d+", r"\1:LINE", err)
    return status, out.splitlines()[-1], said.partition("isotype: step 1 watched")[0].partition("warning[")[0]


def test_a_poisoned_batch(capsys: pytest.CaptureFixture[str]):
    assert watched(capsys, "batch") == (
        1,
        "step 4",
        "isotype: the loss is not finite: the script was stopped before the update of step 5 "
        "(loss nan, gradient norm nan)\n"
        "isotype: the step, run again:\n"
        "  - the input x holds 1 NaN of 32 values\n"
        "      --> up   aten.addmm.default   forward   scripts/diverges.py:LINE\n"
        "       |   self    float32 [32]   largest 0.3504   up.bias\n"
        "       |   mat1    float32 [4, 8]   1 NaN of 32 values, others up to 2.6   x\n"
        "       |   mat2    float32 [8, 32]   largest 0.3528   up.weight\n"
        "       |   result  float32 [4, 32]   32 NaN of 128 values, others up to 1.762\n"
        "    expected  finite numbers\n"
        "    fix       look at row 2 of the batch (of 4, counted from 0) and at the code that computes the input\n",
    )


@pytest.mark.parametrize(
    ("kind", "last", "lines"),
    [
        (
            "rate",
            "step 1",
            ("the gradient is not finite", "--> the model or its loss   aten._foreach_norm.Scalar"),
        ),
        ("half", "step 6", ("step 7 (loss nan", "pow gives infinity: ", " is beyond float16")),
        ("scaled", "step 6", ("step 7 (loss nan, loss scale ", "pow gives infinity: ", " is beyond float16")),
        (
            "loss",
            "step 3",
            (
                "step 4 (loss inf",
                "the loss that the script computes from them is not (backward at scripts/diverges.py:LINE)",
            ),
        ),
        (
            "hopeless",
            "step 17",
            (
                "the gradient is not finite at any loss scale: 17 steps were skipped in a row",
                "backward   scripts/",
            ),
        ),
    ],
)
def test_what_is_said(capsys: pytest.CaptureFixture[str], kind: str, last: str, lines: tuple[str, ...]):
    status, done, said = watched(capsys, kind)
    assert (status, done) == (1, last)
    flat = " ".join(said.split())
    assert all(" ".join(line.split()) in flat for line in lines), said


@pytest.mark.parametrize("kind", ["sound", "skips"])
def test_a_sound_script_ends_as_ever(capsys: pytest.CaptureFixture[str], kind: str):
    assert watched(capsys, kind) == (0, "done", "")


def test_children_are_asked_for_the_same():
    assert "--watch" in parse(["--watch", __file__]).flags()
    assert "--watch" not in parse([__file__]).flags()


def test_what_goes_wrong_in_the_watch_is_a_line(monkeypatch: pytest.MonkeyPatch):
    said: list[str] = []
    numbers = Numbers(said.append, lambda: None)
    model = torch.nn.Linear(2, 2)
    numbers.attach(model, (torch.ones(1, 2),), {})
    monkeypatch.setattr(Numbers, "_read", lambda *_: 1 / 0)
    model(torch.ones(1, 2)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert said == ["isotype no longer checks the values: ZeroDivisionError: division by zero"]
    assert not model._forward_pre_hooks

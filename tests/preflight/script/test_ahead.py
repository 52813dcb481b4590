"""The trace of a script's step before it runs, and again after a crash."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from isotype.preflight import run
from isotype.preflight.script import ahead
from isotype.preflight.script.ahead import TRIED_AFTER, look_ahead
from isotype.records.request import LossOf, StepRequest
from isotype.trace import script


def test_a_step_is_traced_once_before_its_fixes_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    traced, trace = [], run._Step.trace

    def counted(step: run._Step, actions: tuple[object, ...] = (), *args: object, **kwargs: object) -> object:
        traced.append(tuple(actions))
        return trace(step, actions, *args, **kwargs)

    monkeypatch.setattr(run._Step, "trace", counted)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8).bfloat16())
    loss = LossOf(lambda model, inputs: model(**inputs).float().sum(), {"input": torch.ones(2, 8)})
    report = look_ahead(StepRequest(model, loss, device="h100", autocast=False), TRIED_AFTER)
    (error,) = report.errors
    assert any(fix.verified for fix in error.fixes)
    assert len(traced) > 2
    assert traced.count(()) == 1


@pytest.mark.parametrize(
    ("step", "scaled"),
    [
        ("loss.backward(); optimizer.step()", False),
        ("scaler.scale(loss).backward(); scaler.step(optimizer)", True),
        ("accelerator = Accelerator(mixed_precision='fp16'); accelerator.backward(loss)", True),
    ],
)
def test_a_gradscaler_that_the_script_never_calls(
    step: str, scaled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a script whose files call `scale` trains with loss scaling."""
    path = tmp_path / "train.py"
    path.write_text(f"scaler = torch.amp.GradScaler('cuda')\n{step}\n", encoding="utf-8")
    of_script = SimpleNamespace(modules={"__main__": SimpleNamespace(__file__=str(path))})
    monkeypatch.setattr(script, "sys", of_script)
    scaler, model = torch.amp.GradScaler("cpu"), nn.Linear(2, 2).half()
    optimizer = torch.optim.SGD(model.parameters())
    request = ahead.request_of_script(ahead.Beginning(model, {}, (), {}), None, "t4")
    assert request.scaler is scaled
    del scaler, optimizer


def test_the_values_of_integer_inputs_are_kept_for_a_trace_after_a_crash() -> None:
    """Grids of image patches decide shapes."""
    grid, pixels = torch.tensor([[1, 4, 4]]), torch.ones(16, 8)
    loss = LossOf(lambda model, inputs: model(**inputs), {"grid": grid, "pixels": pixels})
    kept = (
        ahead.without_tensors(StepRequest(nn.Linear(8, 8), loss, device="t4", autocast=False))
        .keywords["inputs"]
        .inputs
    )
    grid.zero_()
    assert kept["grid"].tolist() == [[1, 4, 4]]
    assert kept["pixels"].is_meta

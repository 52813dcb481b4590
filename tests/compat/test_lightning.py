"""Traces of Lightning's models. Lightning is not installed: the modules below do what it does."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import isotype

WRAPPERS = """
_in_fabric_backward = False

def _backward_hook(*_):
    if not _in_fabric_backward:
        raise RuntimeError("call `fabric.backward(loss)` instead of `loss.backward()`")
"""


class Wrapped(nn.Module):
    def __init__(self, wrappers: Any) -> None:
        super().__init__()
        self.inner, self._hook = nn.Linear(4, 4), wrappers._backward_hook

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = self.inner(x)
        output.register_hook(self._hook)
        return output


@pytest.mark.parametrize("package", ["lightning.fabric", "lightning_fabric"])
def test_the_backward_of_a_wrapped_model_is_traced(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wrappers: Any = ModuleType(f"{package}.wrappers")
    exec(WRAPPERS, vars(wrappers))
    monkeypatch.setitem(sys.modules, wrappers.__name__, wrappers)
    report = isotype.check(Wrapped(wrappers), {"x": torch.ones(2, 4)}, device="cpu")
    assert report.trace.failure is None
    assert not wrappers._in_fabric_backward


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_a_traced_training_step_logs_nothing(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[Any] = []

    class LightningModule(nn.Linear):
        log = log_dict = lambda _, *values: logged.append(values)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            loss = super().forward(x).mean()
            self.log("loss", loss)
            self.log_dict({"loss": loss})
            return loss

    module: Any = ModuleType(f"{package}.core.module")
    module.LightningModule = LightningModule
    monkeypatch.setitem(sys.modules, module.__name__, module)
    model = LightningModule(4, 4)
    assert isotype.check(model, {"x": torch.ones(2, 4)}, device="cpu").trace.failure is None
    assert not logged
    model(torch.ones(2, 4))
    assert len(logged) == 2

"""Traces of code that calls kernels of triton, and the end of a process that has loaded triton."""

from __future__ import annotations

import gc
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from packaging.version import Version
from torch import nn

from isotype.compat.triton import leave_garbage
from tests.rules.traces import found, traced


def _installed() -> Version:
    try:
        return Version(version("triton"))
    except PackageNotFoundError:
        return Version("0")


@pytest.mark.parametrize(
    ("loaded", "freezes"), [(None, True), ("3.8.0", True), ("3.9.0", False), ("3.10.1", False)]
)
def test_the_last_collection_is_spared_unless_triton_prints_what_remains(
    loaded: str | None, freezes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    if loaded is not None:
        monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__=loaded))
    frozen: list[bool] = []
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(True))
    leave_garbage()
    assert frozen == [True] * freezes


@pytest.mark.lacking("" if _installed() >= Version("3.9") else "no triton that prints what a process leaves")
@pytest.mark.parametrize("ending", ["gc.freeze", "leave_garbage"])
def test_triton_still_prints_what_a_process_leaves(ending: str) -> None:
    """If `gc.freeze` no longer makes triton print, the module can go."""
    program = (
        "import atexit, gc, sys, triton\nfrom isotype.compat.triton import leave_garbage\n"
        f"gc.disable(); cycle = [triton.jit]; cycle.append(cycle); del cycle\natexit.register({ending})"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ("nanobind: leaked" in ended.stderr) == (ending == "gc.freeze")


class Kernel:
    """What triton makes of a function: `kernel[grid](…)` launches it."""

    __name__ = "scale"

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **kwargs: "launched"


class Scaled(nn.Module):
    """A model that calls a kernel, which writes into a tensor of another dtype than the next layer's."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.kernel = nn.Linear(4, 4, dtype=torch.bfloat16), Kernel()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x, dtype=torch.float32)
        self.kernel[(1,)](x, out, BLOCK=4)
        y: torch.Tensor = self.layer(out)
        return y


def test_a_trace_passes_over_kernels_and_knows_their_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton.runtime.jit", SimpleNamespace(KernelInterface=Kernel))
    model, inputs = Scaled(), {"x": torch.ones(2, 4, dtype=torch.bfloat16)}
    trace = traced(model, inputs)
    assert trace.failure is None
    assert trace.without_effect == ()
    (finding,) = found("ist101_operands", trace)
    assert finding.cause.startswith("a cast to float32 at test_triton.py:")
    assert model.kernel[(1,)](*inputs.values()) == "launched"

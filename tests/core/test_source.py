"""Reported source lines: frames of torch itself are passed over, frames of packages beside torch are not."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any

import pytest
import torch
from torch import nn

import isotype
from isotype.core.source import line_of, tensors_at_hand
from tests.small import BF16

CODE = """
def forward(self, x):
    return x.float() @ self.proj.weight
"""


class Projected(nn.Module):
    """A forward that is compiled as if it stood in `file`."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.proj = nn.Linear(8, 8).to(BF16)
        made: dict[str, Any] = {}
        exec(compile(CODE, str(file), "exec"), made)
        self.act = made["forward"]

    def forward(self, x: torch.Tensor) -> Any:
        return self.act(self, x)


@pytest.mark.parametrize("package", ["torchvision", "torchtune", "torchaudio", "torch_geometric", "torchao"])
def test_packages_named_like_torch_are_not_torch(package: str) -> None:
    file = Path(torch.__file__).parents[1] / package / "ops" / "misc.py"
    (finding,) = isotype.check(Projected(file), {"x": torch.ones(2, 8, dtype=BF16)}, device="cpu").errors
    assert finding.source == f"{file}:3"
    assert finding.cause == "a cast to float32 at misc.py:3"
    lines = [a.target for fix in finding.fixes for a in fix.actions if a.kind == "line"]
    assert set(lines) == {f"{file}:3"}


def test_torch_itself_is_passed_over() -> None:
    file = Path(torch.__file__).parent / "nn" / "misc.py"
    (finding,) = isotype.check(Projected(file), {"x": torch.ones(2, 8, dtype=BF16)}, device="cpu").errors
    assert finding.source.rpartition("/")[2].startswith("test_source.py:")


def test_what_torch_fx_writes_is_passed_over() -> None:
    """Its file is a name with a number, another one in each process and copy."""
    model = torch.fx.symbolic_trace(Projected(Path("misc.py")))
    (finding,) = isotype.check(
        model, lambda model: model(torch.ones(2, 8, dtype=BF16)).sum(), device="cpu"
    ).errors
    assert finding.source.rpartition("/")[2].startswith("test_source.py:")
    assert not any("<" in a.target for fix in finding.fixes for a in fix.actions)


def test_an_error_is_at_the_line_that_raised_not_at_the_end_of_its_finally() -> None:
    x, closed = torch.ones(2), []

    def forward() -> None:
        try:
            x.view(3)
        finally:
            closed.append(x)

    with pytest.raises(RuntimeError) as caught:
        forward()
    file, _, line = line_of(caught.value).rpartition(":")
    assert Path(file).read_text().splitlines()[int(line) - 1].strip() == "x.view(3)"
    assert dict(tensors_at_hand(caught.value)) == {"x": x}


def test_the_tensors_of_a_failing_expression_are_found_by_the_names_in_it() -> None:
    """Lightning-AI/litgpt #542: the float32 cache is an attribute, and other variables are not in the expression."""

    class Cache(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("held", torch.zeros(2, 4))
            self.weight = nn.Parameter(torch.zeros(2, 4))

    def write(cache: Cache, unused: torch.Tensor) -> None:
        new, rows = unused * 2, torch.arange(1)
        cache.held[rows] = new[rows] + cache.weight.grad[rows]

    cache, unused = Cache(), torch.zeros(2, 4, dtype=BF16)
    cache.weight.grad = torch.ones(2, 4)
    cache.held = cache.held.half()
    with pytest.raises(RuntimeError) as caught:
        write(cache, unused)
    at_hand = dict(tensors_at_hand(caught.value))
    assert list(at_hand) == ["cache.held", "rows", "new", "cache.weight.grad"]
    assert at_hand["cache.weight.grad"] is cache.weight.grad


def test_a_traceback_without_an_instruction_has_tensors_at_hand() -> None:
    """Code that sends exceptions between processes constructs such tracebacks."""

    def fail(x: torch.Tensor) -> None:
        raise RuntimeError(x.dtype)

    with pytest.raises(RuntimeError) as caught:
        fail(torch.ones(2))
    frame = caught.traceback[-1].frame.raw
    error = caught.value.with_traceback(TracebackType(None, frame, -1, frame.f_lineno))
    assert [name for name, _ in tensors_at_hand(error)] == ["x"]

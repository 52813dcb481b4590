"""A traced step as text: what `print(report.trace)` shows."""

from __future__ import annotations

import re
from dataclasses import replace

import torch
from torch import nn

from isotype.preflight.check import check
from isotype.records.trace import Failure
from tests.rules.samples import BF16, FP32, call, operand, refused, trace, with_modules


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x.float()).to(x.dtype)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = Norm()
        self.up = nn.Linear(8, 4, bias=False, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(self.norm(x)).sum()  # type: ignore[no-any-return]


def test_modules_are_a_tree_and_casts_are_marked() -> None:
    step = check(
        Net(), {"x": torch.ones(2, 8, dtype=BF16)}, phases=("forward", "backward"), device="t4"
    ).trace
    lines = re.sub(r"test_text\.py:\d+", "test_text.py", str(step)).splitlines()
    assert "\n".join(lines[: lines.index("backward") + 1]) == (
        "Net on NVIDIA T4   autocast off   scaler off\n"
        "forward\n"
        "  norm (Norm)\n"
        "    aten._to_copy.default(self: bfloat16[2, 8]) -> float32[2, 8]   test_text.py   cast\n"
        "    aten.mul.Tensor(self: float32[8], other: float32[2, 8]) -> float32[2, 8]   test_text.py\n"
        "    aten._to_copy.default(self: float32[2, 8]) -> bfloat16[2, 8]   test_text.py   cast\n"
        "  up (Linear)\n"
        "    aten.t.default(self: bfloat16[4, 8]) -> bfloat16[8, 4]   test_text.py\n"
        "    aten.mm.default(self: bfloat16[2, 8], mat2: bfloat16[8, 4]) -> bfloat16[2, 4]   test_text.py\n"
        "  aten.sum.default(self: bfloat16[2, 4]) -> bfloat16[]   test_text.py\n"
        "backward"
    )


def test_what_is_refused_promoted_folded_or_ends_the_step_is_said() -> None:
    a, b = operand(FP32), operand(BF16)
    calls = (
        replace(refused("aten.mm.default", "forward", a, b, message="not the same dtype"), module="layers.3"),
        replace(call("aten.add.Tensor", a, b), module="layers.3.act", repeats=28),
        replace(call("aten.sin.default", a, phase="backward"), module="", recomputed=True),
    )
    step = with_modules(
        trace((), calls, Failure("backward", "layers.3", "model.py:7", "ValueError: no")), layers__3="Block"
    )
    step = replace(step, modules={**step.modules, "layers.3.act": "SiLU"}, notes=("one",))
    assert [re.sub(r"\(.*\) ->", "(…) ->", line) for line in str(step).splitlines()[1:]] == [
        "forward",
        "  layers.3 (Block)",
        "    aten.mm.default(…) -> bfloat16[32, 64]   model.py:1   refused: not the same dtype",
        "    layers.3.act (SiLU)   represents 28",
        "      aten.add.Tensor(…) -> bfloat16[32, 64]   model.py:1   operands of several dtypes",
        "backward",
        "  aten.sin.default(…) -> bfloat16[32, 64]   model.py:1   recomputed",
        "ended in backward at layers.3: ValueError: no",
        "note: one",
    ]

"""What a finding quotes of the device is what the device raises: operators of the table, given mismatched dtypes for real."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

from isotype.contracts.contract import contracts_for
from isotype.contracts.example import decode, is_float, tensors_in
from isotype.contracts.measure import EXAMPLES, REFUSALS, combinations, overload
from isotype.contracts.pattern import FLOAT_DTYPES
from isotype.core.errors import first_line
from tests.cpus import MACHINE, seeing
from tests.pairwise import pairwise
from tests.reality import real_step
from tests.rules.traces import BF16, FP32, traced

CPU = torch.device("cpu")
RECORDED: dict[str, list[Any]] = json.loads(EXAMPLES.read_text(encoding="utf-8"))
with seeing(MACHINE):
    TABLE = contracts_for("cpu").measured
MATMULS = ["mm", "addmm", "addmv", "bmm", "baddbmm", "convolution", "index_put", "index_add", "dot"]


def refusing() -> list[str]:
    """The matmuls, and every sixth of the operators that refuse something."""
    assert TABLE is not None
    found = sorted(
        op for op, patterns in TABLE.operators.items() if {int} & set(map(type, patterns.values()))
    )
    found = [op for op in found if op.startswith("aten") and "_foreach" not in op]
    return sorted({*found[::6], *(op for op in found if op.split(".")[1] in MATMULS)})


def not_compared() -> str:
    if TABLE is None or torch.__version__ != TABLE.torch_version:
        return "the table is another torch's"
    return ""


@pytest.mark.real_cpu
@pytest.mark.lacking(not_compared())
@pytest.mark.parametrize("op", refusing())
def test_an_operator_is_quoted_word_for_word(op: str) -> None:
    for example in RECORDED[op]:
        recorded = "".join("f" for tensor in tensors_in(example) if is_float(tensor))
        mixed = [letters for letters in combinations(recorded, False) if len(set(letters)) == 2][:6]
        calls = [decode(example, [FLOAT_DTYPES[letter] for letter in letters], CPU) for letters in mixed]
        refusals = [(call, message) for call in calls if (message := refused(op, *call)) is not None]
        assert quoted(op, [call for call, _ in refusals]) == [message for _, message in refusals]


def refused(op: str, args: Any, kwargs: Any) -> str | None:
    try:
        overload(op)(*args, **kwargs)
    except REFUSALS as error:
        return first_line(error)
    return None


def quoted(op: str, calls: list[tuple[Any, Any]]) -> list[str]:
    def loss(model: nn.Module) -> torch.Tensor:
        for args, kwargs in calls:
            overload(op)(*args, **kwargs)
        return model(torch.ones(1, 1)).sum()

    breaches = [call.breach for call in traced(nn.Linear(1, 1), loss, phases=("forward",)).breaches()]
    return [breach.message for breach in breaches if breach is not None]


class Projected(nn.Module):
    """A frozen layer behind a view: where nothing needs a gradient, `matmul` folds by strides, else it calls `bmm`."""

    def __init__(self, dtype: torch.dtype, view: str) -> None:
        super().__init__()
        self.proj, self.view = nn.Linear(16, 8, bias=False, dtype=dtype).requires_grad_(False), view
        self.head = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        views = {
            "sliced": x[:, 1:],
            "expanded": x[:, :1].expand_as(x),
            "moved": x.transpose(0, 1),
            "plain": x,
        }
        return self.head(self.proj(views[self.view]).float())


@pytest.mark.real_cpu
@pairwise(
    "dtype, view, shape",
    [BF16, FP32],
    ["sliced", "expanded", "moved", "plain"],
    [(2, 4, 16), (2, 3, 4, 16), (3, 2, 16)],
)
def test_a_layer_behind_a_view_is_quoted_word_for_word(
    dtype: torch.dtype, view: str, shape: tuple[int, ...]
) -> None:
    given = {"x": torch.ones(shape, dtype=FP32 if dtype == BF16 else BF16)}
    outcome = real_step(Projected(dtype, view), given, phases=("forward",))
    (call,) = traced(Projected(dtype, view), given, phases=("forward",)).breaches()
    assert call.breach is not None
    assert call.breach.message == str(outcome.error)


@pytest.mark.real_cpu
@pytest.mark.parametrize("rows", [1, 2])
def test_a_convolution_is_quoted_for_the_number_of_its_rows(rows: int) -> None:
    """oneDNN does not run a small convolution of a single row, and then another kernel raises the error."""

    def loss(model: nn.Module) -> torch.Tensor:
        return model(torch.ones(rows, 4, 8)).float().sum()

    model = nn.Conv1d(4, 4, 3, bias=False, dtype=torch.float16)
    outcome = real_step(model, loss, phases=("forward",))
    call = next(traced(model, loss, phases=("forward",)).breaches())
    assert call.breach is not None
    assert call.breach.message == str(outcome.error).split("\n")[0]


def test_a_wrong_shape_is_no_mismatched_dtype() -> None:
    """C++ prints a tensor with its type in the message on its shape."""

    def loss(model: nn.Module) -> torch.Tensor:
        return model(torch.ones(2, 1, 4, 4, dtype=BF16).expand(-1, 4, -1)).sum()

    trace = traced(nn.Linear(4, 1).to(BF16), loss, phases=("forward",))
    assert list(trace.breaches()) == []
    assert trace.failure is not None
    assert "must be greater or equal" in trace.failure.error

"""Numbers that the code reads from unknown values: guards pass, loops end, and other conditions are true.

PYTEST_DONT_REWRITE: the programs are read as they are written here, with their assertions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from isotype.contracts.contract import contracts_for
from isotype.precision.devices.profile import device_profile
from isotype.trace.fake.functions import Functions
from isotype.trace.fake.recorder import FakeRecorder
from isotype.trace.fake.twin import fake_inputs, fake_mode
from tests.trace.test_values import X, followed

Program = Callable[..., Any]
SMALL = torch.tensor([[0.5, 3.0], [1.0, 2.0]])
LARGE = torch.zeros(3, 1 << 14)


def on_lines(x: torch.Tensor) -> str:
    if (
        x.abs().max() > 1e4
        or x.isnan().any()
        or not (x.sum() > -5)
    ):  # fmt: skip
        print("one statement before the error")
        raise ValueError
    return "passed"


def on_one_line(x: torch.Tensor) -> str:
    if x.min() < 0: raise ValueError("negative")  # noqa: E701 # fmt: skip
    if not (x > 1).any():
        raise ValueError("all small")
    return "passed"


def by_variable(x: torch.Tensor) -> str:
    peak, low = x.max().item(), 0.0
    low = x.min().item()
    if low < 2.5:
        raise ValueError("small")
    if low > 7.5:
        raise ValueError("large")
    assert peak > 0
    return "passed"


def by_elements(x: torch.Tensor) -> str:
    if (x.abs() > 1e4).any():
        raise ValueError("large")
    if (x.abs() < 1e4).all():
        return "passed"
    raise ValueError("never")


def by_torch(x: torch.Tensor) -> str:
    """A regression with predicted variances: torch raises for negative ones."""
    torch.nn.functional.gaussian_nll_loss(x, x, x)
    return "passed"


def by_function(x: torch.Tensor) -> str:
    def is_bad(x: torch.Tensor) -> bool:
        return not x.max().item() < 100

    if is_bad(x):
        raise ValueError("large")
    return "passed"


def by_assertion(x: torch.Tensor) -> str:
    assert not torch.isnan(x).any(), "not a number"
    assert x.max().item() > 2, "small"
    assert not x.max() > 9 and x.min().item() < 0.25  # noqa: PT018
    return "passed"


def otherwise(x: torch.Tensor) -> str:
    if x.max() <= 100:
        result = "passed"
    else:
        raise ValueError("large")
    return result


@pytest.mark.parametrize("x", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize(
    "program",
    [on_lines, on_one_line, by_variable, by_elements, by_torch, by_function, by_assertion, otherwise],
)
def test_a_guard_lets_unknown_values_pass(program: Program, x: torch.Tensor) -> None:
    assert followed(program, {"x": x}, known=False) == "passed"


def test_a_guard_stops_known_values() -> None:
    for program, x in ((on_one_line, SMALL - 10), (by_elements, -1e5 * SMALL)):
        with pytest.raises(ValueError, match=r"negative|large"):
            followed(program, {"x": x})


def below(x: torch.Tensor) -> int:
    rounds = 0
    while x.sum() > rounds * 0.001:
        rounds += 1
    return rounds


def above(x: torch.Tensor) -> int:
    rounds = 0
    while x.float().mean().item() < 10:
        rounds += 1
    return rounds


def read_before(x: torch.Tensor) -> int:
    rounds, error = 0, 1.0
    while error > 1e-3:
        rounds, error = rounds + 1, 1.0
        error = x.abs().max().item()
    return rounds


def broken(x: torch.Tensor) -> int:
    rounds = 0
    while True:
        rounds += 1
        if (
            x.norm().item()
            < 1e-3
        ):  # fmt: skip
            break
    return rounds


def halted(x: torch.Tensor) -> int:
    rounds, is_done = 0, False
    while not is_done:
        rounds += 1
        is_done = bool(x.max() < 0.001)
    return rounds


def elsewhere(x: torch.Tensor) -> int:
    errors = [1.0]
    while errors[-1] > 1e-3:
        errors += [x.abs().max().item()]
    return len(errors) - 1


@pytest.mark.parametrize(
    ("program", "rounds"),
    [(below, 2), (above, 2), (read_before, 3), (broken, 3), (halted, 3), (elsewhere, 51)],
)
def test_a_loop_that_ends_by_unknown_values_ends(program: Program, rounds: int) -> None:
    """An equilibrium, a search: with a condition that stays true it would be traced for ever."""
    mode = fake_mode()
    recorder = FakeRecorder(contracts_for("cpu"), torch.float32, mode)
    fakes = fake_inputs({"x": SMALL}, mode)
    with mode, recorder, Functions(recorder, device_profile("cpu")):
        assert program(**fakes) == rounds
        program(**fakes)
    line = program.__code__.co_firstlineno + 2
    loops = {f"later rounds of the loop at test_unknown.py:{line}": "its end depends on values"}
    assert recorder.values.numbers.untraced() == loops


def test_a_bounded_loop_runs_all_of_its_rounds() -> None:
    def bounded(x: torch.Tensor) -> int:
        rounds = 0
        for _ in range(9):
            if x.max() < 0.001:
                break
            rounds += 1
        return rounds

    assert followed(bounded, {"x": SMALL}, known=False) == 9


def test_other_conditions_are_true() -> None:
    assert followed(lambda x: bool(x.sum() > 100), {"x": X}, known=False) is True
    assert followed(lambda x: x.float().max().item(), {"x": X}, known=False) == 1.0
    assert followed(lambda x: x.max().item(), {"x": X}, known=False) == 1


@pytest.mark.parametrize("x", [SMALL, LARGE], ids=["small", "large"])
def test_a_repair_of_bad_values_is_not_made(x: torch.Tensor) -> None:
    """A model that replaces its hidden states by zeros would have no gradients in the trace."""

    def repaired(x: torch.Tensor) -> list[str]:
        result = []
        if x.isnan().any():
            result.append("nan")
        if (torch.isnan(x) | torch.isinf(x)).any():
            result.append("either")
        if x.sum() == 0:
            result.append("zero")
        if not torch.isfinite(x).all():
            result.append("not finite")
        return result

    assert followed(repaired, {"x": x}, known=False) == []

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from isotype.rules.ist805_reductions import find
from tests.rules.samples import BF16, FP16, FP32, call, operand, trace
from tests.rules.traces import traced


def test_log_probabilities_in_bfloat16() -> None:
    reduction = call("aten._log_softmax.default", operand(BF16, shape=(2, 16, 512)), numbers=(("dim", -1),))
    (finding,) = find(trace(calls=[reduction, reduction]))
    assert finding.severity == "warning"
    assert finding.message == "log_softmax over 512 values returns bfloat16"
    assert finding.fixes[0].description == "cast the input of log_softmax to float32"


def test_float32_and_short_axes_are_silent() -> None:
    axis = (("dim", 1),)
    wide = call("aten._log_softmax.default", operand(FP32, shape=(2, 512)), result=FP32, numbers=axis)
    experts = call("aten._log_softmax.default", operand(BF16, shape=(32, 8)), numbers=axis)
    assert not list(find(trace(calls=[wide, experts])))


@pytest.mark.parametrize(("dtype", "count", "expected"), [(BF16, 40, 1), (BF16, 8, 0), (FP32, 40, 0)])
def test_a_loop_that_adds_16_bit_losses(dtype: torch.dtype, count: int, expected: int) -> None:
    model = nn.Linear(4, 4, dtype=BF16)

    def loss(model: nn.Module) -> torch.Tensor:
        total = torch.zeros((), dtype=dtype)
        for _ in range(count):
            total = total + model(torch.ones(2, 4, dtype=BF16)).square().mean()
        return total

    message = f"a sum of {count} numbers is rounded to bfloat16 after each addition"
    assert [finding.message for finding in find(traced(model, loss))] == [message] * expected


class Scored(nn.Module):
    """Scores of 8 classes or experts for each of 512 tokens."""

    def __init__(self, reduce: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.scores, self.reduce = nn.Linear(4, 8, dtype=BF16), reduce

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.reduce(self.scores(x)).float().mean()


@pytest.mark.parametrize(
    ("reduce", "length"),
    [
        (lambda scores: scores.log_softmax(-1), 0),
        (lambda scores: scores.logsumexp(-1), 0),  # a router's z-loss
        (lambda scores: scores.cumsum(0), 512),
        (lambda scores: scores.logsumexp((0, 1)), 4096),
    ],
)
def test_the_length_is_that_of_the_reduced_axis(
    reduce: Callable[[torch.Tensor], torch.Tensor], length: int
) -> None:
    findings = list(find(traced(Scored(reduce), {"x": torch.ones(512, 4, dtype=BF16)})))
    assert [finding.message.split(" over ")[1] for finding in findings] == (
        [f"{length} values returns bfloat16"] if length else []
    )


class Noised(nn.Module):
    """A model that adds the noise of a diffusion step, with a schedule that `buffer` stores."""

    def __init__(
        self, level: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], buffer: torch.dtype
    ) -> None:
        super().__init__()
        self.net, self.level = nn.Linear(4, 4, dtype=BF16), level
        self.register_buffer("alphas_cumprod", (1 - torch.linspace(1e-4, 0.02, 1000)).cumprod(0).to(buffer))

    def forward(self, x: torch.Tensor, timesteps: torch.Tensor) -> torch.Tensor:
        noise = torch.randn_like(x)
        level = self.level(self.alphas_cumprod, timesteps).view(-1, 1).to(x.dtype)
        return (self.net(x + level * noise) - noise).float().square().mean()


LEVELS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "selected first": lambda table, t: (1 - table[t]).sqrt(),
    "drawn": lambda table, t: (1 - table[torch.randint(0, 1000, t.shape)][:, None]) ** 0.5,
    "selected last": lambda table, t: (1.0 - table).rsqrt()[t],
    "gathered": lambda table, t: torch.log(1 - table.gather(0, t)),
    "cast": lambda table, t: (1 - table.to(BF16)[t]) ** 0.5,
}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("buffer", [BF16, FP16, FP32])
def test_a_noise_level_is_wrong_if_its_schedule_is_rounded(level: str, buffer: torch.dtype) -> None:
    """huggingface/diffusers #9004: the levels of the first timesteps are zero. Timestep 500 shows nothing of it."""
    inputs = {"x": torch.ones(2, 4, dtype=BF16), "timesteps": torch.tensor([500, 600])}
    findings = list(find(traced(Noised(LEVELS[level], buffer), inputs)))
    assert len(findings) == (buffer != FP32 or level == "cast")
    for finding in findings:
        assert finding.severity == "warning"
        cast = level == "cast" and buffer == FP32
        name = "bfloat16" if level == "cast" or buffer == BF16 else "float16"
        assert f" gets {name} numbers that are wrong by up to " in finding.message
        stored = f"the buffer alphas_cumprod is {str(buffer).removeprefix('torch.')}"
        assert finding.cause.startswith(
            "numbers are rounded to 16 bits at test_ist805.py:" if cast else stored
        )


def test_levels_of_a_mask_and_of_an_even_schedule_are_silent() -> None:
    """Zeros and ones are exact. A schedule without numbers near 1, such as 0 to 0.5, loses no digits."""
    for table in (torch.tensor([0.0, 1.0, 1.0]), torch.linspace(0, 0.5, 8)):
        model = Noised(LEVELS["selected first"], BF16)
        model.alphas_cumprod = table.to(BF16)
        inputs = {"x": torch.ones(2, 4, dtype=BF16), "timesteps": torch.tensor([1, 2])}
        assert not list(find(traced(model, inputs)))


class Decayed(nn.Module):
    """A state-space layer in short: its decay is the exponential of a parameter."""

    def __init__(
        self, cast: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype, states: int = 4
    ) -> None:
        super().__init__()
        self.A_log, self.cast = nn.Parameter(torch.ones(states, dtype=dtype)), cast
        self.inner = nn.Linear(4, 4, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        decay = self.inner(x).exp().log1p()
        return (decay * -torch.exp(self.cast(self.A_log))).float().sum()


@pytest.mark.parametrize(
    ("cast", "dtype", "states", "expected"),
    [
        (torch.clone, BF16, 4, 1),
        (torch.clone, FP32, 4, 0),
        (torch.Tensor.float, BF16, 4, 0),
        (torch.clone, BF16, 1, 0),
    ],
)
def test_the_exponential_of_a_16_bit_parameter(
    cast: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype, states: int, expected: int
) -> None:
    """state-spaces/mamba #923. A single number, such as a temperature, is no decay."""
    findings = list(find(traced(Decayed(cast, dtype, states), {"x": torch.ones(2, 4, dtype=dtype)})))
    assert len(findings) == expected
    for finding in findings:
        message = "exp of a parameter returns bfloat16"
        assert (finding.severity, finding.message) == ("note", message)
        assert finding.cause.startswith("exp of bfloat16 values at test_ist805.py:")
        assert finding.evidence == ("A_log is bfloat16",)

"""Timesteps and other angles that 16 bits do not hold, as diffusion models are told the time."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

import isotype
from tests.small import BF16


class Timed(nn.Module):
    """A denoiser that is told the time by sines and cosines."""

    def __init__(self, read: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.proj, self.read = nn.Linear(8, 8), read

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        frequencies = torch.exp(-math.log(10000) * torch.arange(4, dtype=torch.float32) / 4)
        angles = self.read(time)[:, None].float() * frequencies
        return x + self.proj(torch.cat([angles.sin(), angles.cos()], -1).to(x.dtype))


def _as_given(time: torch.Tensor) -> torch.Tensor:
    return time


def _rounded(time: torch.Tensor) -> torch.Tensor:
    return time.to(BF16)


def _rounded_before_it_is_scaled(time: torch.Tensor) -> torch.Tensor:
    return time.to(BF16) * 1000


@pytest.mark.parametrize(
    ("read", "time", "cause"),
    [
        (_rounded, torch.tensor([997.0, 998.4]), "numbers are rounded to 16 bits at test_timesteps.py:"),
        (_rounded, torch.tensor([997, 3]), "numbers are rounded to 16 bits at test_timesteps.py:"),
        (_rounded_before_it_is_scaled, torch.tensor([0.9783, 0.1]), "numbers are rounded to 16 bits at "),
        (_as_given, torch.tensor([997.0, 3.0]).to(BF16), "the input time is 16-bit"),
    ],
)
def test_a_timestep_that_16_bits_do_not_hold(
    read: Callable[[torch.Tensor], torch.Tensor], time: torch.Tensor, cause: str
) -> None:
    inputs = {"x": torch.ones(2, 8, dtype=BF16), "time": time}
    (finding,) = isotype.check(Timed(read).to(BF16), inputs, device="h100").findings
    assert (finding.code, finding.severity) == ("IST803", "warning")
    assert finding.cause.startswith(cause)
    assert finding.fixes[0].verified == ("rounded" in cause)


class Rotated(nn.Module):
    """Positions beside their frequencies, without a module or buffer for them."""

    def __init__(self, positions: Callable[[int], torch.Tensor]) -> None:
        super().__init__()
        self.proj, self.positions = nn.Linear(128, 8), positions

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        frequencies = torch.exp(-math.log(10000) * torch.arange(64, dtype=torch.float32) / 64)
        angles = torch.outer(self.positions(x.shape[1]), frequencies)
        return self.proj(x * torch.cat([angles, angles], -1).cos().to(x.dtype))


@pytest.mark.parametrize(
    ("positions", "wrong"),
    [
        (lambda length: torch.arange(length, dtype=BF16), True),  # nkalyanv99/UNI-D2 #6
        (lambda length: torch.arange(length) * torch.ones((), dtype=BF16), True),
        (lambda length: torch.arange(length, dtype=torch.float32), False),
    ],
)
def test_positions_that_16_bits_do_not_hold(positions: Callable[[int], torch.Tensor], wrong: bool) -> None:
    inputs = {"x": torch.ones(1, 1024, 128, dtype=BF16)}
    findings = isotype.check(Rotated(positions).to(BF16), inputs, device="h100").findings
    assert [finding.code for finding in findings] == (["IST803"] if wrong else [])
    for finding in findings:
        assert finding.cause.startswith("numbers are rounded to 16 bits at test_timesteps.py:")
        assert finding.fixes


@pytest.mark.parametrize(
    ("read", "time"),
    [
        (_as_given, torch.tensor([997, 1_000_000])),
        (_as_given, torch.tensor([998.4, 3.0])),
        (_rounded, torch.tensor([3, 200])),
        (_rounded, torch.tensor([0.3, 0.9])),
        (_as_given, torch.tensor([3.0, 60.0]).to(BF16)),
    ],
)
def test_a_timestep_that_its_dtype_holds(
    read: Callable[[torch.Tensor], torch.Tensor], time: torch.Tensor
) -> None:
    inputs = {"x": torch.ones(2, 8, dtype=BF16), "time": time}
    assert not isotype.check(Timed(read).to(BF16), inputs, device="h100").findings


class Spectrum(nn.Module):
    """An encoder of masses by wavelengths in a buffer, which `.to()` casts (wfondrie/depthcharge #82)."""

    def __init__(self, waves: torch.Tensor) -> None:
        super().__init__()
        self.proj, self.waves = nn.Linear(4, 8), nn.Buffer(waves)

    def forward(self, mass: torch.Tensor) -> torch.Tensor:
        return self.proj((mass[:, None].float() / self.waves).sin().to(BF16))


@pytest.mark.parametrize(
    ("waves", "cause"),
    [
        (torch.logspace(-3, 4, 4).to(BF16), "the buffer waves is bfloat16"),
        (torch.logspace(-3, 4, 4), None),
        (torch.tensor([1, 2, 4, 300]).to(BF16), None),  # 16 bits have these numbers
    ],
)
def test_wavelengths_in_a_buffer(waves: torch.Tensor, cause: str | None) -> None:
    model = Spectrum(waves)
    model.proj.to(BF16)
    findings = isotype.check(model, {"mass": torch.tensor([1234.5, 2.0])}, device="h100").findings
    assert [finding.cause for finding in findings] == ([] if cause is None else [cause])
    assert all("cast the model first" in finding.fixes[0].text for finding in findings)

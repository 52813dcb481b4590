"""Rates that are measured on a device: of its kernels, and not of what it takes to launch and wait for one."""

from __future__ import annotations

import pytest
import torch

from isotype.planning import rates

WAITED, LAUNCHED, RAN = 15e-6, 5e-6, 160e-6


def test_a_gpu_is_waited_for_once_in_several_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernels run behind one another while the host launches the next."""
    now = 0.0

    def wait(_: torch.device) -> None:
        nonlocal now
        now += WAITED

    def run() -> None:
        nonlocal now
        now += max(LAUNCHED, RAN)

    monkeypatch.setattr(rates, "wait_for", wait)
    monkeypatch.setattr(rates, "clock", lambda _: lambda: now)
    assert rates._fastest(run, torch.device("cuda")) == pytest.approx(RAN, rel=0.02)


def test_rates_of_this_cpu() -> None:
    cpu = torch.device("cpu")
    assert 1e8 < rates.copy_rate(cpu) < 1e13
    assert 1e5 < rates.draw_rate(cpu) < 1e12

"""Casts of autocast that a forward uses again after an optimizer step."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

from isotype.trace.live.forward import StaleCasts


@pytest.mark.parametrize(
    ("around", "cached", "stale"),
    [("loop", True, True), ("step", True, False), ("loop", False, False), ("nothing", True, False)],
)
def test_a_region_around_the_loop_alone_reuses_casts(around: str, cached: bool, stale: bool) -> None:
    found: list[bool] = []
    watch = StaleCasts(lambda: found.append(True))
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def autocast(where: str) -> contextlib.AbstractContextManager[object]:
        on = torch.autocast("cpu", torch.bfloat16, cache_enabled=cached)
        return on if where == around else contextlib.nullcontext()

    losses = []
    with autocast("loop"):
        for _ in range(2):
            with autocast("step"):
                losses.append(model(torch.ones(2, 4)).float().pow(2).mean())
                losses[-1].backward()
                optimizer.step()
                watch.stepped("cpu")
    assert bool(found) == stale
    assert bool(losses[0] == losses[1]) == stale  # the second forward has seen the first weights
    watch.detach()
    assert not nn.modules.module._global_forward_pre_hooks

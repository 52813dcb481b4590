"""Casts of autocast that a forward uses again after an optimizer step."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn
from torch.optim import optimizer as optimizers

from isotype.trace.live.forward import Averages, StaleCasts


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


def test_a_step_of_another_optimizer_runs_the_hooks_that_the_script_adds_later() -> None:
    """torch iterates over the hooks of all optimizers in a step, and raises if one of them is removed."""
    model = nn.Linear(4, 1)
    averages = Averages(lambda call: None)
    averages.stepped([model])
    ran: list[bool] = []
    handle = optimizers.register_optimizer_step_pre_hook(lambda *_: ran.append(True))
    torch.optim.SGD(model.parameters()).step()
    model(torch.ones(2, 4))  # ends the watch
    handle.remove()
    assert ran == [True]
    assert not nn.modules.module._global_forward_pre_hooks
    assert not optimizers._global_optimizer_pre_hooks

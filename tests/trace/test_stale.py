"""Casts of autocast that a forward uses again after an optimizer step."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import optimizer as optimizers
from torch.optim.swa_utils import AveragedModel

from isotype.core.names import short
from isotype.records.trace import Call
from isotype.trace.live.forward import Averages, StaleCasts
from tests.rules.samples import trace
from tests.rules.traces import found


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


def test_several_recorded_steps_before_the_first_average() -> None:
    """`isotype run --steps 3` calls `stepped` from a hook after the step, while torch iterates over these hooks."""
    model, calls = nn.Linear(4, 1, dtype=torch.bfloat16), list[Call]()
    averages, average = Averages(calls.append), AveragedModel(model)
    recorded = optimizers.register_optimizer_step_post_hook(lambda *_: averages.stepped([model]))
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(3):
        model(torch.ones(2, 4, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        average.update_parameters(model)
    recorded.remove()
    averages.detach()
    assert [call.op for call in calls] == ["aten.add.Tensor"]
    assert not optimizers._global_optimizer_post_hooks


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


_DECAY = 0.999


def _swa(average: AveragedModel, model: nn.Module, kept: dict[str, torch.Tensor]) -> None:
    average.update_parameters(model)


def _shadow(average: nn.Module, model: nn.Module, kept: dict[str, torch.Tensor]) -> None:
    for name, weight in model.named_parameters():
        kept[name] = ((1 - _DECAY) * weight.data + _DECAY * kept[name]).clone()


def _copied(average: nn.Module, model: nn.Module, kept: dict[str, torch.Tensor]) -> None:
    for mean, weight in zip(average.parameters(), model.parameters(), strict=True):
        mean.copy_(_DECAY * mean + (1 - _DECAY) * weight)


def _lerp(average: nn.Module, model: nn.Module, kept: dict[str, torch.Tensor]) -> None:
    for mean, weight in zip(average.parameters(), model.parameters(), strict=True):
        mean.data = torch.lerp(mean.data, weight.data, 1 - _DECAY)


def _difference(average: nn.Module, model: nn.Module, kept: dict[str, torch.Tensor]) -> None:
    sum(((weight - kept[name]) ** 2).sum() + 1e-8 for name, weight in model.named_parameters())


def _noise(average: nn.Module, model: nn.Module, kept: dict[str, torch.Tensor]) -> None:
    for weight in model.parameters():
        weight.data = weight.data + 1e-3 * torch.randn_like(weight)


def _stored(average: nn.Module, model: nn.Module, kept: dict[str, torch.Tensor]) -> None:
    for name, weight in model.named_parameters():
        kept[name].copy_(weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("update", "op"),
    [
        (_swa, "aten.add.Tensor"),  # its first update only copies
        (_shadow, "aten.add.Tensor"),
        (_copied, "aten.add.Tensor"),
        (_lerp, "aten.lerp.Scalar"),
        (_difference, ""),
        (_noise, ""),
        (_stored, ""),
    ],
)
def test_averages_that_no_operator_adds_in_place(update: Any, op: str, dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(4, 4)).to(dtype)
    average = AveragedModel(model)
    kept = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    optimizer, calls = torch.optim.SGD(model.parameters()), list[Call]()
    averages = Averages(calls.append)
    for step in range(2):
        model(torch.ones(2, 4, dtype=dtype)).sum().backward()
        optimizer.step()
        if step == 0:
            averages.stepped([model])
        with torch.no_grad():
            update(average, model, kept)
    averages.detach()
    expected = [op] if op and dtype == torch.bfloat16 else []
    assert [call.op for call in calls] == expected
    assert averages.later == (update in (_swa, _stored) and dtype == torch.bfloat16)  # these first copy
    assert [finding.cause for finding in found("ist503_rounded_updates", trace(calls=calls))] == [
        f"a tensor with the shape of a trained weight is bfloat16, so the addition at {short(call.source)} rounds its result"
        for call in calls
    ]
    assert not nn.modules.module._global_forward_pre_hooks
    assert not optimizers._global_optimizer_post_hooks

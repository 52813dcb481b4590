"""Headroom during a run: samples equal the values of independent hooks, and no hook stays on the model."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from isotype.train.monitor.recorder import HeadroomMeter
from tests.train.test_watch import model_of


def seen_by_hooks(model: Any, ids: torch.Tensor) -> list[float]:
    seen: list[float] = []
    hooks = [
        layer.register_forward_hook(lambda *call: seen.append(float(call[2].detach().abs().max())))
        for layer in model.model.layers
    ]
    model(ids)
    for hook in hooks:
        hook.remove()
    return seen


@pytest.mark.parametrize("checkpointed", [False, True])
def test_the_first_micro_batch_of_some_steps_is_looked_at(checkpointed: bool) -> None:
    model = model_of()
    model.eval()  # no dropout, so that both see the same
    first, second = torch.arange(9)[None], torch.arange(9, 18)[None]
    wanted = seen_by_hooks(model, first)
    for module in model.modules():
        module.training = not isinstance(module, nn.Dropout)
    model.config.attention_dropout = 0.0
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.0
    if checkpointed:
        model.gradient_checkpointing_enable()
    meter = HeadroomMeter(model, 200)
    assert meter.record() is None
    for step in range(1, 23):
        meter.begin_step(step)
        for ids in (first, second):
            model(ids, labels=ids).loss.backward()
        meter.end_step(step)
        assert not any(layer._forward_hooks for layer in model.model.layers)
    record = meter.record()
    assert record is not None
    assert (record.blocks, record.dtype) == (("model.layers.0", "model.layers.1"), "float32")
    assert [sample.step for sample in record.samples] == [1, 11, 21]
    assert record.samples[0].largest == pytest.approx(wanted)


def test_what_overflows_is_infinite_and_models_without_blocks_have_no_headroom() -> None:
    model = model_of(torch.float16).train()
    model.model.layers[0].mlp.down_proj.weight.data.fill_(math.nan)
    meter = HeadroomMeter(model, 1)
    meter.begin_step(1)
    model(torch.arange(9)[None])
    meter.end_step(1)
    record = meter.record()
    assert record is not None
    assert record.dtype == "float16"
    assert record.samples[0].largest == (math.inf, math.inf)
    plain = HeadroomMeter(nn.Linear(2, 2), 10)
    plain.begin_step(1)
    plain.end_step(1)
    assert plain.record() is None

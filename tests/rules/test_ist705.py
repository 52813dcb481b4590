from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

import isotype
from isotype.rules.ist705_ddp_waits import find
from isotype.trace.reach.measure import measure_reach
from tests.rules.samples import FP32, trace, weight
from tests.rules.test_ist703 import SEES, text_alone
from tests.zoo import ARCHITECTURES

STEP = ("forward", "backward")


def test_a_tower_that_a_batch_of_text_does_not_use() -> None:
    reach = measure_reach(SEES.build(FP32), SEES.batch(), others=[text_alone()], sharing="ddp")
    assert reach is not None
    step = replace(trace([weight()], devices=2), reach=reach)
    (finding,) = find(step)
    assert finding.message.startswith("DDP waits for the gradients of model.vision_tower.")
    for other in ({"find_unused": True}, {"devices": 1}, {"fsdp": 2}, {"deepspeed": True}):
        assert not list(find(replace(step, setup=replace(step.setup, **other))))


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_every_weight_of_a_plain_model_gets_its_gradient(name: str) -> None:
    architecture = ARCHITECTURES[name]
    batch = architecture.batch()
    report = isotype.check(architecture.build(FP32), batch, devices=2, phases=STEP, verify=False)
    assert "IST705" not in {finding.code for finding in report.findings}


@pytest.mark.parametrize("unused", [True, False])
def test_ddp_itself_raises_where_the_rule_finds_one(unused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # torch prints the rank from then on
    architecture = ARCHITECTURES["llama"]
    model, batch = architecture.build(FP32), architecture.batch()
    if unused:
        model.extra = torch.nn.Linear(3, 3)
    report = isotype.check(model, batch, devices=2, phases=STEP, verify=False)
    assert ("IST705" in {finding.code for finding in report.errors}) == unused
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        copied = DistributedDataParallel(model)
        copied(**batch).loss.backward()
        if unused:
            with pytest.raises(
                RuntimeError, match="Expected to have finished reduction in the prior iteration"
            ):
                copied(**batch)
        else:
            copied(**batch).loss.backward()
    finally:
        distributed.destroy_process_group()

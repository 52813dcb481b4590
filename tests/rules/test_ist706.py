"""Gradients that processes do not share, in steps that `isotype run` records: two processes of torch's fake group."""

from __future__ import annotations

import linecache
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.nn.parallel import DistributedDataParallel

from isotype.compat.torch_fsdp import fake_process_group
from isotype.records.finding import Finding
from isotype.rules.ist706_unequal_updates import find
from isotype.trace.live.watch import Watch
from tests.rules.samples import setup

X = torch.ones(2, 8)


def _done(tensor: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    result: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    result.set_result(tensor)
    return result


def line_of_code(source: str) -> str:
    path, _, line = source.rpartition(":")
    return linecache.getline(path, int(line)).strip()


def watched(model: nn.Module, optimizer: torch.optim.Optimizer, step: object) -> list[Finding]:
    findings: list[Finding] = []
    watch = Watch(after=lambda: findings.extend(find(watch.trace(setup()))))
    watch.attach()
    try:
        step(model, optimizer)  # type: ignore[operator]
    finally:
        watch.detach()
        watch.forget()
    return findings


@pytest.mark.parametrize("averages", [False, True])
@pytest.mark.parametrize("synced", ["first", "last", "none"])
def test_the_micro_batch_whose_gradients_ddp_averages(synced: str, averages: bool) -> None:
    """modelscope/FunASR #3472."""

    def step(model: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
        for at in ("first", "last"):
            with nullcontext() if at == synced else model.no_sync():
                model(X).sum().backward()
        for parameter in model.parameters() if averages else ():
            torch.distributed.all_reduce(parameter.grad)
        optimizer.step()

    with fake_process_group(2):
        model = DistributedDataParallel(nn.Linear(8, 8))
        # The fake group returns nothing to DDP.
        model.register_comm_hook(None, lambda state, bucket: _done(bucket.buffer()))
        findings = watched(model, torch.optim.SGD(model.parameters(), lr=0.1), step)
    wrong = synced != "last" and not averages
    causes = [finding.cause for finding in findings]
    assert causes == ["the last forward before this step ran under no_sync()"] * wrong
    assert [line_of_code(finding.source) for finding in findings] == ["model(X).sum().backward()"] * wrong


def test_a_forward_without_gradients_after_the_averaged_backward() -> None:
    def step(model: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
        model(X).sum().backward()
        with torch.no_grad():
            model(X)
        optimizer.step()

    with fake_process_group(2):
        model = DistributedDataParallel(nn.Linear(8, 8))
        model.register_comm_hook(None, lambda state, bucket: _done(bucket.buffer()))
        assert watched(model, torch.optim.SGD(model.parameters(), lr=0.1), step) == []


@pytest.mark.parametrize("scaler_class", [torch.amp.GradScaler, ShardedGradScaler])
def test_a_scaler_that_decides_alone(scaler_class: type[torch.amp.GradScaler]) -> None:
    """facebookresearch/fairscale #421."""
    scaler = scaler_class(device="cpu")

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        scaler.scale(model(X).sum()).backward()
        scaler.step(optimizer)

    with fake_process_group(2):
        model = FullyShardedDataParallel(nn.Linear(8, 8), device_id=torch.device("cpu"))
        findings = watched(model, torch.optim.SGD(model.parameters(), lr=0.1), step)
    assert [finding.cause.partition(" ")[0] for finding in findings] == ["torch.amp.GradScaler"] * (
        scaler_class is torch.amp.GradScaler
    )
    assert all(line_of_code(finding.source) == "scaler.step(optimizer)" for finding in findings)

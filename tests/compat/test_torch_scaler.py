"""The GradScaler of a policy, and that of sharded models."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import nn

from isotype.compat.torch import loss_scale
from isotype.compat.torch_fsdp import sharded_scaler


def test_the_loss_scale_is_had_without_waiting() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    assert loss_scale(scaler) == 64.0  # before the first backward it lies with the host
    scaler.scale(torch.ones(()))
    scale = loss_scale(scaler)
    assert isinstance(scale, torch.Tensor)
    assert scale.shape == ()
    assert scale.item() == scaler.get_scale() == 64.0
    assert loss_scale(None) is None
    assert loss_scale(torch.amp.GradScaler("cpu", enabled=False)) is None


def test_the_overflow_of_a_sharded_scaler_fits_a_fused_optimizer() -> None:
    """The workaround can go when torch's own scaler does not raise."""
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    def stepped(scaler: Any) -> float:
        weight = nn.Parameter(torch.ones(2))
        optimizer = torch.optim.AdamW([weight], lr=0.5, fused=True)
        scaler.scale(weight.sum()).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        return float(weight.detach().sum())

    hook = sys.excepthook  # a process group puts one in that names the rank, and leaves it there
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        assert stepped(sharded_scaler("cpu")) < 2
        with pytest.raises(RuntimeError, match="broadcast shape"):
            stepped(ShardedGradScaler("cpu"))
    finally:
        torch.distributed.destroy_process_group()
        sys.excepthook = hook

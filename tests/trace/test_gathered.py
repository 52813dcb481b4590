"""Tests of FSDP2's mixed precision in a trace: pytorch/pytorch #143900, #146114, #153077; huggingface/accelerate #3979."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)

import isotype
from isotype.compat.torch_fsdp import fake_process_group
from isotype.core.errors import UsageError
from isotype.report.check.report import Report
from isotype.trace.live.watch import Watch

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class Net(nn.Module):
    """Two groups of FSDP2: `body` and the rest. The kernel is a buffer, which FSDP2 does not cast."""

    def __init__(self, kernel: torch.dtype | None) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 2)
        self.register_buffer("kernel", None if kernel is None else torch.ones(8, 8, dtype=kernel))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body(x)
        return self.head(x if self.kernel is None else x @ self.kernel)


@dataclass
class Batch:
    x: torch.Tensor


class OfBatch(Net):
    def forward(self, batch: Batch) -> torch.Tensor:
        return super().forward(batch.x)


def checked(kernel: torch.dtype | None, weights: torch.dtype = FP32, **policy: Any) -> Report:
    model = Net(kernel).to(weights) if kernel is None else Net(kernel)
    casts = MixedPrecisionPolicy(**policy)
    with fake_process_group(1) as mesh:
        fully_shard(model.body, mesh=mesh, mp_policy=casts)
        fully_shard(model, mesh=mesh, mp_policy=casts)
        return isotype.check(model, {"x": torch.ones(2, 8)}, device="h100", learning_rate=1e-5)


def test_weights_and_inputs_are_gathered_in_the_dtype_of_the_policy() -> None:
    report = checked(BF16, param_dtype=BF16)
    assert not report.findings
    assert report.flops == {BF16: report.flops[BF16]}
    assert all(weight.dtype == FP32 for weight in report.trace.weights if not weight.buffer)


def test_a_buffer_keeps_its_dtype() -> None:
    (finding,) = checked(FP32, param_dtype=BF16).errors
    assert (finding.module, finding.cause) == ("", "the buffer kernel is float32")
    assert any("buffer kernel to bfloat16" in fix.description and fix.verified for fix in finding.fixes)


def test_masters_are_stored_in_the_dtype_of_the_parameters() -> None:
    (finding,) = checked(None, BF16, param_dtype=BF16, reduce_dtype=FP32).findings
    assert finding.code == "IST801"
    assert finding.fixes[0].verified


@pytest.mark.parametrize(
    "policy", [{"param_dtype": BF16, "cast_forward_inputs": False}, {"output_dtype": BF16}]
)
def test_inputs_and_outputs_are_cast_as_the_policy_says(policy: dict[str, Any]) -> None:
    (finding,) = checked(None, **policy).errors
    assert finding.code == "IST101"
    assert finding.cause.startswith(
        "FSDP's output_dtype returns bfloat16" if "output_dtype" in policy else "the input x"
    )


def test_inputs_in_a_dataclass_are_cast_as_the_installed_torch_does() -> None:
    model = OfBatch(None)
    with fake_process_group(1) as mesh:
        fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=BF16))
        try:
            model(Batch(torch.ones(2, 8)))
        except RuntimeError:  # torch before 2.13
            casts = False
        else:
            casts = True
        assert isotype.check(model, {"batch": Batch(torch.ones(2, 8))}, device="cpu").ok is casts


def test_parameters_that_a_forward_has_left_gathered() -> None:
    model = Net(None)
    with fake_process_group(1) as mesh:
        fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=BF16))
        model(torch.ones(2, 8))
        assert {parameter.dtype for parameter in model.parameters()} == {BF16}
        report = isotype.check(model, {"x": torch.ones(2, 8)}, device="h100", learning_rate=1e-5)
    assert report.ok
    assert {weight.dtype for weight in report.trace.weights} == {FP32}


def test_a_model_that_fsdp1_has_flattened_is_refused() -> None:
    with fake_process_group(1):
        whole = ShardingStrategy.NO_SHARD
        model = FullyShardedDataParallel(Net(None), device_id=torch.device("cpu"), sharding_strategy=whole)
        with pytest.raises(UsageError, match="check the model before FSDP1 or DeepSpeed wraps it"):
            isotype.check(model, {"x": torch.ones(2, 8)}, device="cpu")


@pytest.mark.parametrize(("param_dtype", "gathered"), [(None, None), (FP16, FP16)])
def test_fsdp1_casts_gradients_to_reduce_dtype_and_gathers_no_weights_in_it(
    param_dtype: torch.dtype | None, gathered: torch.dtype | None
) -> None:
    seen: list[torch.dtype | None] = []
    watch = Watch(after=lambda: seen.append(watch.recorder.gathered if watch.recorder else FP32))
    with fake_process_group(2):
        mixed = MixedPrecision(param_dtype=param_dtype, reduce_dtype=FP32)
        net = Net(None).bfloat16()
        model = FullyShardedDataParallel(net, device_id=torch.device("cpu"), mixed_precision=mixed)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        watch.attach()
        try:
            model(torch.ones(2, 8, dtype=BF16)).sum().backward()
            optimizer.step()
        finally:
            watch.detach()
            watch.forget()
    assert seen == [gathered]

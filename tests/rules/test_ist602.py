from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.rules.traces import BF16, FP16, FP32, found, of_llama, on, traced

RULE = "ist602_float16"


def test_float16_on_a_cpu_without_it() -> None:
    (finding,) = found(RULE, on(of_llama(FP16), "cpu-generic"))
    assert finding.severity == "warning"
    assert finding.message.startswith("float16 matmuls have no hardware support on x86 CPU with AVX2")
    assert "measured: float16 matmuls run 36 times slower than float32's" in finding.notes
    assert finding.cost is not None
    assert finding.cost.slowdown == pytest.approx(31.6, abs=0.1)  # the adapters' float32 products stay
    assert finding.cause == "base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight is float16"
    (fix,) = finding.fixes  # such a CPU has no bfloat16 either
    assert (fix.description, fix.safety) == ("run the step in float32 and cast the weights", "safe")


def test_float16_where_bfloat16_is_fast() -> None:
    """AVX512-BF16 converts float16 in software; AMX runs it, as fast as float32."""
    trace = of_llama(FP16)
    (slow,), (gainless,) = (found(RULE, on(trace, name)) for name in ("cpu-avx512", "cpu-amx"))
    assert slow.message.startswith("float16 matmuls have no hardware support on x86 CPU with AVX512-BF16")
    assert "measured: float16 matmuls run 40 times slower than bfloat16's" in slow.notes
    assert [fix.description for fix in slow.fixes] == [
        "run the step in bfloat16 and cast the weights; bfloat16 keeps only 8 bits",
        "run the step in float32 and cast the weights",
    ]
    assert (gainless.severity, gainless.message) == (
        "warning",
        "float16 matmuls run 3 times slower than bfloat16 on x86 CPU with AMX: 88 % of the FLOPs",
    )
    (fix,) = gainless.fixes  # float32 would be no faster
    assert fix.description == "run the step in bfloat16 and cast the weights; bfloat16 keeps only 8 bits"
    assert found("ist601_bfloat16", on(of_llama(BF16), "cpu-amx")) == []


def test_a_step_under_float16_whose_matmuls_run_in_float32() -> None:
    """isotype computes adapters of a float16 base in float32 on such a CPU."""
    trace = on(of_llama(FP32), "cpu-avx512", autocast=FP16, compute=FP16)
    assert found(RULE, trace) == []
    (finding,) = found(RULE, replace(trace, calls=()))
    assert finding.message == "float16 matmuls have no hardware support on x86 CPU with AVX512-BF16"


def test_few_float16_flops_take_much_of_the_time() -> None:
    """One layer of float16 among float32 ones, 0.4 % of the FLOPs: an eighth of the time where it is 36 times slower."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(256, 256), nn.Linear(256, 1, dtype=FP16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.body(x).to(FP16)).float()

    trace = traced(Mixed(), lambda model: model(torch.randn(4, 256)).sum())
    (finding,) = found(RULE, on(trace, "cpu-avx2"))
    assert finding.cost is not None
    assert finding.cost.flops_share < 0.01
    assert finding.cost.slowdown > 1.1
    assert found(RULE, on(trace, "cpu-amx")) == []


def test_a_device_that_refuses_it_is_an_error() -> None:
    trace = on(of_llama(FP16), "cpu-generic")
    profile = trace.setup.profile
    refusing = replace(profile, emulated={}, refused={FP16: "there is no float16 here"})
    trace = replace(trace, setup=replace(trace.setup, profile=refusing))
    (finding,) = found(RULE, trace)
    assert finding.severity == "error"
    assert "do not run on" in finding.message
    assert finding.notes[0] == "there is no float16 here"


def test_float32_on_a_cpu_and_float16_on_a_gpu() -> None:
    assert found(RULE, on(of_llama(FP32), "cpu-generic")) == []
    assert found(RULE, on(of_llama(FP16), "t4")) == []

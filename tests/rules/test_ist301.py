from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from isotype.preflight.check import check
from isotype.preflight.repair import repair
from isotype.records.finding import Action
from isotype.records.trace import Failure
from isotype.rules.ist301_scaler_float16 import find
from tests.reality import real_step
from tests.rules.samples import FP16, FP32, adapter, call, operand, trace, unscale, weight
from tests.small import WIDTH


def test_float16_adapters_fire() -> None:
    half = adapter(FP16)
    (finding,) = find(trace([weight(dtype=FP16), half], [unscale(half)], scaler=True, autocast=FP16))
    assert finding.severity == "error"
    assert finding.phase == "unscale"
    assert (
        finding.message == "GradScaler does not accept the float16 gradients of 1 of 1 trainable parameters"
    )
    assert finding.cause == "model.layers.0.self_attn.q_proj.lora_A.default.weight is float16"
    assert finding.fixes[0].actions == (
        Action("parameter", "model.layers.*.self_attn.q_proj.lora_A.default.weight", "float32"),
    )


def test_a_step_that_ended_early_is_judged_by_its_weights() -> None:
    ended = Failure("forward", "", "", "ValueError: shapes")
    assert list(find(trace([adapter(FP16)], scaler=True, failure=ended)))


def test_masters_and_unused_parameters_are_silent() -> None:
    assert not list(find(trace([weight(dtype=FP16), adapter(FP32)], scaler=True, autocast=FP16)))
    assert not list(find(trace([replace(adapter(FP16), name="never.used")], scaler=True, autocast=FP16)))
    assert not list(find(trace([adapter(FP16)], [unscale(adapter(FP16))])))


@pytest.mark.real_cpu
def test_a_parameter_that_the_code_casts_gets_its_inputs_cast_instead() -> None:
    """As pytorch-metric-learning's losses do: they bring their weights to the embeddings' dtype, for good."""

    class Proxies(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(WIDTH, 3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.weight.data = self.weight.data.to(x.dtype)
            return x @ self.weight

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), Proxies())

    broken, inputs = model(), {"input": torch.ones(2, WIDTH)}
    assert real_step(model(), inputs, autocast=FP16, scaler=True).phase == "unscale"
    report = check(broken, inputs, device="cpu", autocast=FP16, scaler=True)
    (finding,) = report.errors
    assert finding.cause == "the code of the step casts 1.weight from float32 to float16"
    assert finding.fixes[0].verified
    assert not any(each.severity == "error" for each, _ in repair(broken, report).left)
    assert real_step(broken, inputs, autocast=FP16, scaler=True).error is None


@pytest.mark.real_cpu
def test_complex_gradients_are_refused_as_the_kernel_refuses_them() -> None:
    """pytorch/pytorch #58228, SJTU-DMTai/LIFT #9: the weights of a Fourier layer are complex, or pairs of real numbers."""

    class Spectral(nn.Module):
        def __init__(self, pairs: bool) -> None:
            super().__init__()
            weight = torch.ones(WIDTH, dtype=torch.complex64)
            self.weight, self.pairs = nn.Parameter(torch.view_as_real(weight) if pairs else weight), pairs

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weight = torch.view_as_complex(self.weight) if self.pairs else self.weight
            return torch.fft.ifft(torch.fft.fft(x.float()) * weight).real

    def model(pairs: bool) -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), Spectral(pairs))

    inputs = {"input": torch.ones(2, WIDTH)}
    real = real_step(model(False), inputs, autocast=FP16, scaler=True)
    (finding,) = check(model(False), inputs, device="cpu", autocast=FP16, scaler=True).errors
    assert (finding.code, finding.module, real.phase) == ("IST301", "1", "unscale")
    assert finding.notes == (f"the device raises: {real.error}",)
    (simulated,) = check(model(False), inputs, device="t4", autocast=FP16, scaler=True).errors
    assert "_unscale_cuda" in simulated.notes[0]
    assert not check(model(True), inputs, device="cpu", autocast=FP16, scaler=True).errors


def test_a_forward_that_runs_under_autocast_gets_no_advice_to_turn_it_on() -> None:
    """accelerate turns autocast on inside of the model's forward, so that the step's own autocast is None."""
    half = adapter(FP16)

    def fixes(autocast: torch.dtype | None) -> list[str]:
        product = call("aten.mm.default", operand(FP16), flops=1, autocast=autocast)
        (finding,) = find(trace([half], [product, unscale(half)], scaler=True))
        return [fix.description for fix in finding.fixes]

    masters = "keep the adapters in float32, so that the optimizer updates float32 values"
    assert fixes(FP16) == [masters]
    assert fixes(None) == [
        masters,
        "keep the adapters in float32 and run the step under autocast to float16",
    ]


def test_the_statistics_of_a_batch_norm_become_float32_with_its_weights() -> None:
    model, pictures = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).half(), torch.ones(2, 3, 8, 8)
    options = {"device": "t4", "autocast": FP16, "scaler": True}
    report = check(model, {"input": pictures}, **options)
    assert [finding.code for finding in report.errors] == ["IST301"]
    repair(model, report)
    assert model.get_buffer("1.running_var").dtype == model.get_parameter("1.weight").dtype == FP32
    assert not check(model, {"input": pictures}, **options).errors

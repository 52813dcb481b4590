from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import isotype
from tests.cpus import pretend
from tests.rules.traces import BF16, FP32, WHOLE, batch, cast, found, llama, of_llama, on, traced, verified

RULE = "ist201_promotion"


class Wide(nn.Module):
    """A custom layer that computes in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.float() @ self.weight).to(x.dtype)


def model() -> nn.Module:
    layers = nn.Sequential(*(nn.Linear(64, 64, dtype=BF16) for _ in range(3)), Wide())
    return layers.requires_grad_(False)


def forward(m: nn.Module) -> torch.Tensor:
    return m(torch.ones(32, 64, dtype=BF16)).float().sum()


def test_a_custom_layer_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend("cpu-amx", monkeypatch)
    (finding,) = found(RULE, traced(model(), forward, phases=("forward",)))
    assert finding.severity == "warning"
    assert finding.message == "25 % of the FLOPs run in float32 instead of bfloat16"
    assert finding.module == "3"
    assert finding.cause.startswith("a cast to float32 at test_ist201.py:")
    assert finding.notes == ("1 matmul in 1 module",)
    assert finding.cost is not None
    assert finding.cost.flops_share == pytest.approx(0.25)
    assert finding.cost.slowdown is None  # no rates are published for this CPU


def test_float32_is_no_slower_where_the_compute_dtype_is_emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend("cpu-avx2", monkeypatch)
    assert found(RULE, traced(model(), forward, phases=("forward",))) == []


class Tower(nn.Module):
    """A tower in float32, which takes images in the dtype of its weights, before layers in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Linear(64, 64).requires_grad_(False)
        self.layers = nn.Sequential(*(nn.Linear(64, 64, dtype=BF16) for _ in range(3)))

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        return self.layers(self.tower(pixels.to(self.tower.weight.dtype)).to(BF16))


def test_a_cast_of_the_input_that_the_model_reverts_is_no_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend("cpu-amx", monkeypatch)
    (finding,) = verified(Tower(), {"pixels": torch.ones(32, 64)}, "IST201")
    assert finding.module == "tower"
    assert not any(fix.verified and "pixels" in fix.description for fix in finding.fixes)


class Routed(Wide):
    """A router that multiplies in float32, and an inverse, whose backward multiplies in float32."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = (x.float() @ self.weight.float()).sigmoid()
        return x * scores.topk(2).values.sum(-1, keepdim=True).to(x.dtype)


class Inverse(Wide):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.float().inverse().to(x.dtype)


def test_a_router_in_float32_is_meant() -> None:
    steps = nn.Sequential(nn.Linear(64, 64), Routed()).to(BF16)
    assert found(RULE, on(traced(steps, forward, phases=("forward",)), "a100")) == []


def test_a_wide_gradient_is_the_cast_s() -> None:
    steps = nn.Sequential(Inverse(), nn.Linear(64, 64)).to(BF16)
    (finding,) = found(RULE, on(traced(steps, forward, phases=("forward", "backward")), "a100"))
    assert finding.cause.startswith("a cast to float32 at test_ist201.py:")


def test_head_and_norm_in_float32_without_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend("cpu-amx", monkeypatch)
    broken = cast(llama(), FP32, ("model.norm", "lm_head"))
    (finding,) = verified(broken, batch(), "IST201")
    assert finding.cause == "base_model.model.model.norm.weight is float32"
    assert finding.module == "base_model.model.lm_head"
    first = finding.fixes[0]
    assert (first.verified, first.safety) == (True, "safe")


def test_no_fix_casts_a_weight_that_is_narrow_already() -> None:
    """In the backward of the last layer, a narrow weight is an operand beside the wide gradient."""
    layers = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64, dtype=FP32), Wide(), nn.Linear(64, 64))
    layers[0].to(BF16)
    layers[3].to(BF16)
    (finding,) = found(RULE, on(traced(layers, forward, phases=WHOLE[:2]), "a100"))
    assert "3" not in {action.target for fix in finding.fixes for action in fix.actions}


class OwnCode(nn.Module):
    """Attention whose own code computes in float32 and returns the input's dtype; `unused` is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = torch.view_as_real(torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))).flatten(-2)
        return x + (wide @ self.unused.weight.float() @ wide.mT @ wide).to(x.dtype)


def test_casts_of_a_layer_s_inputs_and_outputs_are_no_fixes_of_its_own_code() -> None:
    """xjdr-alt/entropix #59: complex rotations are float32, whatever the dtype of the layer's inputs is."""
    layers = nn.Sequential(nn.Linear(64, 64), OwnCode()).to(BF16)
    (*_, finding) = found(RULE, on(traced(layers, forward, phases=WHOLE[:2]), "a100"))
    assert finding.fixes
    assert {action.kind for fix in finding.fixes for action in fix.actions}.isdisjoint({"input", "output"})


def test_an_optimizer_that_multiplies_in_float32() -> None:
    """HomebrewML/HeavyBall #2: the preconditioners of bfloat16 gradients need float32."""
    trace = traced(model(), forward, phases=("forward",))
    update = replace(trace, calls=tuple(replace(call, phase="optimizer") for call in trace.calls))
    assert found(RULE, on(trace, "a100"))
    assert found(RULE, on(update, "a100")) == []


def test_the_slowdown_is_estimated_where_rates_are_known() -> None:
    trace = on(traced(model(), forward, phases=("forward",)), "a100")
    (finding,) = found(RULE, trace)
    assert finding.cost is not None
    assert finding.cost.slowdown is not None
    assert 1.0 < finding.cost.slowdown < 4.0


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_adapters_in_float32_are_no_promotion(dtype: torch.dtype) -> None:
    assert found(RULE, of_llama(dtype)) == []


def test_autocast_over_float32_masters() -> None:
    assert found(RULE, of_llama(FP32, lora=False, autocast=BF16)) == []


@pytest.mark.parametrize("holder", ["dict", "list"])
@pytest.mark.parametrize("trainable", [True, False])
def test_containers_of_parameters_have_no_forward_that_could_cast(holder: str, trainable: bool) -> None:
    """PEFT's LoHa and VeRA store their matrices in a ParameterDict; only code around it can cast."""

    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(64, 64, dtype=torch.bfloat16)
            weight = nn.Parameter(torch.randn(64, 64), requires_grad=trainable)
            self.factor: Any = (
                nn.ParameterDict({"0": weight}) if holder == "dict" else nn.ParameterList([weight])
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            factor = self.factor["0" if holder == "dict" else 0]
            return self.base(x) + x @ (factor @ factor).to(x.dtype)

    x = torch.randn(64, 64, dtype=torch.bfloat16)
    report = isotype.check(Adapted(), {"x": x}, device="a100", verify=False)
    (finding,) = (finding for finding in report.findings if finding.code == "IST201")
    assert "factor" in finding.cause
    assert not any("boundary" in [action.kind for action in fix.actions] for fix in finding.fixes)

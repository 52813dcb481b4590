from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import isotype
from tests.pairwise import pairwise
from tests.reality import real_step
from tests.rules.traces import BF16, found, traced, verified

RULE = "ist110_norms"
X = torch.ones(2, 8, dtype=BF16)


def model(wide_bias: bool) -> nn.Module:
    made = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)).to(BF16)
    if wide_bias:
        made[1].bias.data = torch.full((8,), 1 / 3)
    return made


@pytest.mark.real_cpu
def test_a_bias_in_another_dtype() -> None:
    (finding,) = verified(model(wide_bias=True), {"input": X}, "IST110")
    assert finding.message == "float32 instead of bfloat16 in a norm"
    assert (finding.module, finding.op, finding.phase) == ("1", "aten.native_layer_norm.default", "forward")
    assert finding.cause == "1.bias is float32"
    assert finding.evidence == ("1.bias is float32",)
    assert finding.notes == (f"the device raises: {real_step(model(True), {'input': X}).error}",)
    assert ("cast 1.bias to bfloat16", "unsafe", True) in [
        (fix.description, fix.safety, fix.verified) for fix in finding.fixes
    ]


def test_weight_and_bias_in_the_inputs_dtype() -> None:
    assert found(RULE, traced(model(wide_bias=False), {"input": X})) == []


def convolved() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).half()


PICTURES = torch.ones(2, 3, 8, 8)


@pytest.mark.parametrize(("device", "errors"), [("t4", ["IST110"]), ("a100", ["IST110"]), ("mi300x", [])])
def test_running_statistics_of_another_dtype_than_the_weights(device: str, errors: list[str]) -> None:
    """cuDNN refuses them: a loop over the parameters casts no buffers."""
    model = convolved()
    for parameter in model.parameters():
        parameter.data = parameter.data.float()
    report = isotype.check(model, {"input": PICTURES}, device=device, autocast="float16", scaler=True)
    assert [finding.code for finding in report.errors] == errors
    plain = isotype.check(model, {"input": PICTURES}, device="t4")
    assert ("cast the buffers 1.running_mean, 1.running_var to float32", "safe") in [
        (fix.description, fix.safety) for fix in plain.errors[0].fixes
    ]


@pytest.mark.real_cpu
def test_a_cast_of_a_batch_norm_includes_its_statistics() -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4).to(BF16))

    broken, inputs = model(), {"input": PICTURES}
    assert real_step(model(), inputs).error is not None
    (finding,) = verified(broken, inputs, "IST110")
    assert "cast 1.weight, 1.bias and 2 more to float32" in [fix.description for fix in finding.fixes]
    isotype.repair(broken, isotype.check(broken, inputs, device="cpu"), unsafe=True)
    assert real_step(broken, inputs).error is None


FLOATS = {"float32": torch.float32, "float16": torch.float16, "bfloat16": BF16}


@pairwise(
    "device, autocast, functional, weight, statistics",
    ["cpu", "h100"],
    [None, "float16"],
    [False, True],
    FLOATS,
    FLOATS,
)
def test_statistics_are_cast_themselves_because_a_batch_norm_updates_them(
    device: str, autocast: str | None, functional: bool, weight: str, statistics: str
) -> None:
    class Norm(nn.BatchNorm2d):
        def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
            stored = self.running_mean, self.running_var, self.weight, self.bias
            return (
                nn.functional.batch_norm(input, *stored, training=True)
                if functional
                else super().forward(input)
            )

    norm = Norm(4).to(FLOATS[weight])
    assert norm.running_mean is not None
    assert norm.running_var is not None
    norm.running_mean, norm.running_var = (
        b.to(FLOATS[statistics]) for b in (norm.running_mean, norm.running_var)
    )
    model = nn.Sequential(nn.Conv2d(3, 4, 3), norm)
    report = isotype.check(model, {"input": PICTURES}, device=device, autocast=autocast, scaler=False)
    wrong = [
        name for name, dtype in {"weight": weight, "running_mean": statistics}.items() if dtype != "float32"
    ]
    taken = {weight, statistics} == {autocast} or not wrong
    errors = [finding for finding in report.errors if finding.code == "IST110"]
    assert bool(errors) != taken
    for finding in errors:
        causes = [f"{'the buffer ' * (name != 'weight')}1.{name} is " for name in wrong]
        assert finding.cause.startswith(tuple(causes))
        to = (
            autocast
            if autocast in (weight, statistics) and "float32" not in (weight, statistics)
            else "float32"
        )
        assert any(f" to {to}" in fix.description and fix.verified for fix in finding.fixes)
        copied = any(fix.description.startswith("cast the operands") for fix in finding.fixes)
        assert not (copied and statistics != to)


@pytest.mark.parametrize("device", ["cpu", "h100"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_operands_are_cast_at_a_line_only_if_the_line_has_them(size: int, device: str) -> None:
    """At `self.norm(h)`, a user can cast `h`, but not the norm's weights."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm: Any = [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d][size - 1](8)
            self.norm.weight.data, self.norm.bias.data = self.norm.weight.to(BF16), self.norm.bias.to(BF16)

        def forward(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
            return self.norm(x * other).float().mean()

    x = torch.ones(4, 8, *[2] * size, dtype=BF16)
    report = isotype.check(Model(), {"x": x, "other": x}, device=device)
    fixes = [fix.description for finding in report.errors for fix in finding.fixes]
    assert "cast norm.weight, norm.bias to float32" in fixes
    assert not [fix for fix in fixes if fix.startswith("cast the operands")]

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional

from isotype.rules.ist811_epsilon import find
from tests.rules.traces import BF16, FP16, FP32, traced

Guard = Callable[[torch.Tensor], torch.Tensor]

GUARDS: dict[str, tuple[Guard, str, str]] = {
    "normalize": (lambda x: functional.normalize(x, dim=-1), "clamp_min", "1e-12"),
    "add": (lambda x: x / (x.norm(dim=-1, keepdim=True) + 1e-8), "add", "1e-08"),
    "add_": (lambda x: x / x.norm(dim=-1, keepdim=True).add_(1e-8), "add_", "1e-08"),
    "clamp": (lambda x: x.clamp(min=1e-9).log(), "clamp", "1e-09"),
}


class Pooled(nn.Module):
    def __init__(self, guard: Guard, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer, self.guard = nn.Linear(4, 4, bias=False).to(dtype), guard

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.guard(self.layer(hidden))


@pytest.mark.parametrize("name", GUARDS)
def test_an_epsilon_that_vanishes(name: str) -> None:
    guard, operator, epsilon = GUARDS[name]
    model = Pooled(guard, FP16)
    assert not model(torch.zeros(2, 4, dtype=FP16)).isfinite().all(), (
        "the real step returns what the rule says"
    )
    (finding,) = find(traced(model, {"hidden": torch.ones(2, 4, dtype=FP16)}))
    assert finding.severity == "warning"
    assert finding.message == (
        f"an epsilon of {epsilon} is zero in float16: zero stays zero, and its quotient or logarithm is not finite"
    )
    assert finding.cause.startswith(f"{operator} of a float16 tensor and {epsilon} at test_ist811.py:")
    (fix,) = finding.fixes
    assert fix.description.startswith(f"write torch.finfo(torch.float16).tiny (6e-05) instead of {epsilon}")


BOUNDS: dict[str, tuple[Guard, Guard, str, str]] = {
    "survival": (lambda x: x.clamp(max=1.0 - 1e-6), lambda x: torch.log1p(-x), "0.999999 is 1", "(1 - torch"),
    "angle": (lambda x: x.clamp(-1 + 1e-7, 1.0), torch.acos, "-0.9999999 is -1", "-(1 - torch"),
    "odds": (lambda x: torch.clamp_max(x, 1 - 1e-5), torch.logit, "0.99999 is 1", "(1 - torch"),
}


@pytest.mark.parametrize("dtype", [FP16, BF16])
@pytest.mark.parametrize("name", BOUNDS)
def test_a_bound_that_16_bits_round_to_1(name: str, dtype: torch.dtype) -> None:
    """fastino-ai/GLiNER2 #155: the loss was finite, and the gradients of 225 parameters were NaN."""
    clamp, function, bound, instead = BOUNDS[name]
    # torch 2.15 passes no gradient through a clamp whose input is its bound: the function's own gradient is asked for.
    value = clamp(torch.full((1,), -1.0 if "-1" in bound else 1.0, dtype=dtype)).requires_grad_()
    function(value).sum().backward()
    assert value.grad is not None
    assert not value.grad.isfinite().all(), "the real gradient is what the rule says"

    def guard(x: torch.Tensor) -> torch.Tensor:
        return function(clamp(x))

    inputs = {"hidden": torch.ones(2, 4, dtype=dtype)}
    (finding,) = find(traced(Pooled(guard, dtype), inputs, phases=("forward",)))
    assert f"a bound of {bound} in {str(dtype)[6:]}: the clamp returns {bound.split()[-1]}" in finding.message
    assert finding.fixes[0].description.startswith(
        f"write {instead}.finfo({dtype}).eps) instead of {bound.split()[0]}"
    )
    assert not list(find(traced(Pooled(guard, FP32), {"hidden": torch.ones(2, 4)}, phases=("forward",))))


@pytest.mark.parametrize("dtype", [FP16, BF16])
@pytest.mark.parametrize("bound", [1.0, 0.99, 0.5, 2.0])
def test_bounds_that_16_bits_keep_apart_from_1(bound: float, dtype: torch.dtype) -> None:
    trace = traced(Pooled(lambda x: x.clamp(-bound, bound), dtype), {"hidden": torch.ones(2, 4, dtype=dtype)})
    assert not list(find(trace))


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("name", GUARDS)
def test_other_dtypes_hold_it(name: str, dtype: torch.dtype) -> None:
    model = Pooled(GUARDS[name][0], dtype)
    assert model(torch.zeros(2, 4, dtype=dtype)).isfinite().all()
    assert not list(find(traced(model, {"hidden": torch.ones(2, 4, dtype=dtype)}, phases=("forward",))))


@pytest.mark.parametrize(
    "guard",
    [
        lambda x: functional.normalize(x, dim=-1, eps=torch.finfo(FP16).tiny),
        lambda x: functional.normalize(x.float(), dim=-1).half(),
        lambda x: x.clamp(max=1e-9) + 0.0,
        lambda x: functional.layer_norm(x, (4,), eps=1e-12),  # added in float32, inside of the kernel
    ],
)
def test_what_guards_or_is_no_guard_is_silent(guard: Guard) -> None:
    model = Pooled(guard, FP16)
    assert model(torch.zeros(2, 4, dtype=FP16)).isfinite().all()
    assert not list(find(traced(model, {"hidden": torch.ones(2, 4, dtype=FP16)}, phases=("forward",))))


def test_routers_of_published_models_are_silent() -> None:
    trace = traced(
        Pooled(GUARDS["add"][0], FP16), {"hidden": torch.ones(2, 4, dtype=FP16)}, phases=("forward",)
    )
    published = "/lib/transformers/models/deepseek_v3/modeling_deepseek_v3.py:155"
    assert not list(
        find(replace(trace, calls=tuple(replace(call, source=published) for call in trace.calls)))
    )

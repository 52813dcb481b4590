"""Code that names the simulated device runs on the twin, and whatever was changed for it is put back."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import isotype
from isotype.trace.device import cpu_stands_for
from tests.small import BF16, FP16, FP32

X = torch.randn(2, 8)
Act = Callable[[nn.Module, torch.Tensor], torch.Tensor]


class Linear(nn.Module):
    """A layer and whatever `act` does with it."""

    def __init__(self, act: Act) -> None:
        super().__init__()
        self.layer, self.act = nn.Linear(8, 8), act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.layer, x).sum()


def report(act: Act, device: str = "a100", **arguments: Any) -> isotype.Report:
    return isotype.check(Linear(act), {"x": X}, device=device, verify=False, **arguments)


def _autocast_of_old(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        outer = torch.cuda.amp.autocast()
    with outer:
        return layer(x)


def _under(layer: nn.Module, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    with torch.autocast(*args, **kwargs):
        return layer(x)


MOVES: dict[str, Act] = {
    "to": lambda layer, x: layer(x) + torch.ones(8).to("cuda"),
    "to with a number": lambda layer, x: layer(x) + torch.ones(8).to(torch.device("cuda:1"), FP32),
    "cuda": lambda layer, x: layer(x) + torch.ones(8).cuda(non_blocking=True),
    "made there": lambda layer, x: layer(x) + torch.ones(8, device="cuda"),
    "pinned": lambda layer, x: layer(x) + torch.ones(8, pin_memory=True).pin_memory().to("cuda"),
    "a module": lambda layer, x: layer.to("cuda")(x),
    "default device": lambda layer, x: layer(x) + _made_under_a_device(),
}


def _made_under_a_device() -> torch.Tensor:
    with torch.device("cuda"):
        return torch.ones(8)


@pytest.mark.parametrize("name", MOVES)
def test_what_names_the_device_runs(name: str) -> None:
    assert report(MOVES[name]).status == "clean"


def test_what_the_device_is_asked_between_operators_is_answered() -> None:
    def act(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        assert torch.cuda.current_device() == torch.cuda.max_memory_allocated() == 0
        return layer(x)

    assert report(act).status == "clean"


@pytest.mark.parametrize(
    ("act", "dtype"),
    [
        (lambda layer, x: _under(layer, x, "cuda", dtype=BF16), BF16),
        (lambda layer, x: _under(layer, x, device_type="cuda", dtype=FP16), FP16),
        (lambda layer, x: _under(layer, x, "cuda"), FP16),
        (lambda layer, x: _under(layer, x, x.device.type), FP16),
        (lambda layer, x: _under(layer, x, "cuda", enabled=False), FP32),
        (_autocast_of_old, FP16),
    ],
)
def test_autocast_of_the_device_is_on_where_the_code_says_so(act: Act, dtype: torch.dtype) -> None:
    found = [call.results for call in report(act).trace.calls if "addmm" in call.op]
    assert found[0][0][0] == dtype


@torch.autocast("cuda", enabled=False)
def _in_float32(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return layer(x)


def test_a_function_that_was_decorated_before_is_kept_out_of_autocast() -> None:
    found = report(_in_float32, autocast="bfloat16").trace.calls
    assert {call.autocast for call in found if "addmm" in call.op} == {None}


def test_code_that_asks_whether_autocast_is_on_is_told() -> None:
    seen: list[Any] = []

    def act(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        seen.extend([torch.is_autocast_enabled(), torch.is_autocast_enabled("cuda")])
        seen.append(torch.get_autocast_dtype("cuda"))
        return layer(x)

    report(act, autocast="bfloat16")
    report(act)
    assert seen == [True, True, BF16, False, False, FP16]


def test_the_backward_of_a_function_runs_under_the_autocast_of_its_forward() -> None:
    """`custom_fwd` keeps what it was told, `custom_bwd` puts it on again."""

    class Product(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cuda")
        def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x, weight)
            return x @ weight

        @staticmethod
        @torch.amp.custom_bwd(device_type="cuda")
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            x, weight = ctx.saved_tensors
            return gradient @ weight.T, x.T @ gradient

    def act(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return Product.apply(layer(x), layer.weight)

    assert report(act, autocast="bfloat16").status == "clean"


def test_another_device_is_not_simulated() -> None:
    """On a CPU a model that asks for CUDA does not run."""
    assert report(MOVES["cuda"], device="cpu").status == "unknown"


@pytest.mark.parametrize("kind", ["cuda", "rocm", "xpu", "mps"])
def test_everything_is_put_back(kind: str) -> None:
    def state() -> list[Any]:
        backends = [vars(backend).get("synchronize") for backend in (torch.cuda, torch.xpu, torch.mps)]
        autocast = [torch.autocast.__init__, torch.is_autocast_enabled, torch.get_autocast_dtype]
        return [*backends, *autocast, torch.get_autocast_dtype("cpu"), torch.is_autocast_enabled("cpu")]

    before = state()
    with contextlib.suppress(ZeroDivisionError), cpu_stands_for(kind):
        assert state() != before
        raise ZeroDivisionError
    assert state() == before

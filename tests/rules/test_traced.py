"""Rules that their own tests feed with traces written by hand: each finds its fault in a real trace of a small model too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import isotype
from isotype.precision.policy import PrecisionPolicy
from tests.corpus.cases.crashes_parts import linear_4bit
from tests.models import one_layer, tiny_batch, tiny_model

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SIZE = 64


class Two(nn.Module):
    """A frozen first layer and a trained head."""

    def __init__(self, first: nn.Module, head: torch.dtype) -> None:
        super().__init__()
        self.first, self.head = first.requires_grad_(False), nn.Linear(SIZE, 8, dtype=head)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.first(x).to(self.head.weight.dtype)).float().mean()


class Rotary(nn.Module):
    """Rotates by frequencies from a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", 10000.0 ** -torch.linspace(0, 1, SIZE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (torch.arange(x.shape[0])[:, None] * self.inv_freq).cos()


class Likelihood(nn.Linear):
    """The log-likelihood of one of its outputs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).log_softmax(-1)[..., 0].mean()


class Routed(nn.Module):
    """Four experts, of which a router chooses one a token."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(SIZE, 4, bias=False)
        self.experts = nn.ModuleList(nn.Linear(SIZE, SIZE) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(1)
        every = torch.stack([expert(x) for expert in self.experts], 1)
        return (weights[..., None] * every.gather(1, chosen[..., None].expand(-1, 1, SIZE))).squeeze(1)


Step = tuple[nn.Module, Any, dict[str, Any]]


def two(dtype: torch.dtype, head: torch.dtype | None = None, **options: Any) -> Step:
    """A dense layer in `dtype` under a head in another."""
    model = Two(nn.Linear(SIZE, SIZE, dtype=dtype), head or dtype)
    return model, {"x": torch.ones(4, SIZE, dtype=dtype)}, options


def packed(change: Callable[[Any], None] = lambda _: None, **options: Any) -> Step:
    """An nf4 layer that computes in bfloat16 under a bfloat16 head; `change` breaks the layer."""
    layer = linear_4bit(nn.Linear(SIZE, SIZE, bias=False), BF16, BF16)
    change(layer)
    return Two(layer, BF16), {"x": torch.ones(4, SIZE, dtype=BF16)}, options


def stale(layer: Any) -> None:
    layer.weight.quant_state.dtype = FP16


def replaced(layer: Any) -> None:
    layer.weight, layer.quant_state = nn.Parameter(layer.weight.data, requires_grad=False), None


def dense(layer: Any) -> None:
    layer.weight.data = torch.ones(SIZE, SIZE, dtype=BF16)


def wide(layer: Any) -> None:
    layer.compute_dtype, layer.compute_type_is_set = FP32, True


def rounded(layer: Any) -> None:
    state = (
        layer.weight.quant_state.state2
    )  # the scales are quantized in turn: theirs are the ones that are floats
    state.absmax = state.absmax.bfloat16()


def mixed() -> Step:
    model, inputs, options = two(BF16, FP32)
    return model.requires_grad_(), inputs, options


def infinite() -> Step:
    model, inputs, options = two(FP16, FP32)
    model.first.weight.data[0, 0] = float("inf")  # type: ignore[union-attr,index,operator]
    return model, inputs, options


def rotary() -> Step:
    return Two(Rotary().to(BF16), BF16), {"x": torch.ones(4, SIZE, dtype=BF16)}, {}


def halved_t5() -> Step:
    model = tiny_model("t5").half().requires_grad_(False)
    model.shared.weight.requires_grad_()
    return model, tiny_batch("t5"), {}


def sharded() -> Step:
    model = one_layer(tiny_model("llama", BF16)).requires_grad_(False)
    model.model.layers[0].input_layernorm.float().requires_grad_()
    return model, tiny_batch("llama"), {"fsdp": 1}


POLICY = PrecisionPolicy(compute=BF16, storage="bfloat16")

STEPS: dict[str, tuple[Callable[[], Step], str]] = {
    "IST302": (lambda: two(BF16, scaler=True, device="t4"), "head"),
    "IST304": (lambda: two(BF16, policy=POLICY), "head"),
    "IST305": (mixed, "first"),
    "IST306": (lambda: two(FP32, policy=POLICY, autocast=FP16), ""),
    "IST401": (lambda: packed(stale), "first"),
    "IST402": (lambda: packed(replaced), "first"),
    "IST403": (lambda: packed(dense), "first"),
    "IST404": (lambda: packed(wide), "first"),
    "IST405": (lambda: packed(rounded), "first"),
    "IST701": (sharded, "model.layers.0.input_layernorm"),
    "IST702": (lambda: packed(fsdp=1), "first"),
    "IST802": (infinite, "first"),
    "IST803": (rotary, "first"),
    "IST804": (halved_t5, "encoder.block.0.layer.1.DenseReluDense.wo"),
    "IST805": (lambda: (Likelihood(SIZE, 512).to(BF16), {"x": torch.ones(4, SIZE, dtype=BF16)}, {}), ""),
    "IST806": (
        lambda: (Two(Routed().to(BF16), BF16), {"x": torch.ones(4, SIZE, dtype=BF16)}, {}),
        "first.router",
    ),
}


@pytest.mark.parametrize("code", STEPS)
def test_a_real_trace_is_found(code: str) -> None:
    build, module = STEPS[code]
    model, inputs, options = build()
    report = isotype.check(model, inputs, **{"device": "cpu", "verify": False, **options})
    assert (code, module) in {(each.code, each.module) for each in report.findings}

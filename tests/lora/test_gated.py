"""Gated MLPs are found by what they compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import nn

from isotype.lora.gates import gated_parts
from tests.models import quiet


class Mlp(nn.Module):
    """A gated MLP with names of its own."""

    def __init__(self, activation: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(12, 8)
        self.activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.three(self.two(x) * self.activation(self.one(x)))


class Whole(nn.Module):
    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.mlp = mlp


def adapted(mlp: nn.Module) -> Any:
    config = peft.LoraConfig(target_modules=["one", "two", "three"])
    return peft.get_peft_model(Whole(mlp), config).base_model.model.mlp


@pytest.mark.parametrize(
    ("activation", "name"),
    [
        (nn.SiLU(), "silu"),
        (nn.GELU(), "gelu"),
        (nn.GELU("tanh"), "gelu_tanh"),
        (transformers.activations.NewGELUActivation(), "gelu_tanh"),
        (nn.ReLU(), "relu"),
        (torch.sigmoid, "sigmoid"),
        (transformers.activations.ReLUSquaredActivation(), "relu2"),
    ],
)
def test_what_is_one(activation: Any, name: str) -> None:
    parts = gated_parts(adapted(Mlp(activation)))
    assert parts is not None
    assert (parts.first, parts.second, parts.down, parts.order) == ("one", "two", "three", ("two", "one"))
    assert parts.gate.name == name


class _Clamped(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.three(self.two(x).clamp(max=0.1) * self.activation(self.one(x)))


class _Residual(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + super().forward(x)


class _Chained(Mlp):
    def __init__(self) -> None:
        super().__init__(nn.SiLU())
        self.two = nn.Linear(12, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.three(self.two(self.activation(self.one(x))))


class _Routed(Mlp):
    def forward(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x) * weights


class _Dropping(Mlp):
    def __init__(self) -> None:
        super().__init__(nn.SiLU())
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.three(self.dropout(self.two(x) * self.activation(self.one(x))))


@pytest.mark.parametrize(
    "mlp",
    [
        Mlp(nn.Mish()),
        _Clamped(nn.SiLU()),
        _Residual(nn.SiLU()),
        _Chained(),
        _Routed(nn.SiLU()),
        _Dropping(),
        _Dropping().eval(),
    ],
    ids=lambda mlp: type(mlp).__name__,
)
def test_what_is_none(mlp: nn.Module) -> None:
    assert gated_parts(adapted(mlp)) is None


def test_a_module_without_adapters_is_none() -> None:
    assert gated_parts(Mlp(nn.SiLU())) is None


def test_the_random_state_is_left_alone() -> None:
    mlp = adapted(Mlp(nn.SiLU()))
    before = torch.get_rng_state()
    gated_parts(mlp)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_mlps_of_transformers() -> None:
    for name, activation in (("Llama", "silu"), ("Gemma2", "gelu_tanh"), ("Qwen3", "silu")):
        config = getattr(transformers, f"{name}Config")(
            hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, vocab_size=64
        )
        with quiet():
            model = getattr(transformers, f"{name}ForCausalLM")(config)
        model = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear"))
        found = [parts for module in model.modules() if (parts := gated_parts(module)) is not None]
        assert [(p.first, p.second, p.down, p.gate.name) for p in found] == [
            ("gate_proj", "up_proj", "down_proj", activation)
        ]

"""Models on the meta device are built without drawing random values; other models are initialised as usual."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from isotype.checkpoint.formats.config import build_on_meta
from isotype.model.modes import NoDraws


class Draws(torch.utils._python_dispatch.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Record the operators that draw random numbers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.drawn: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.drawn.append(str(func))
        return func(*args, **(kwargs or {}))


def layers() -> nn.Module:
    made = nn.ModuleList(
        [nn.Linear(3, 2), nn.Embedding(4, 2), nn.Conv1d(2, 2, 1), nn.MultiheadAttention(2, 1)]
    )
    nn.init.normal_(tensor=made[0].weight)
    return made


def test_nothing_is_drawn_on_the_meta_device_and_the_model_is_the_same() -> None:
    with torch.device("meta"):
        usual = {name: (tensor.shape, tensor.dtype) for name, tensor in layers().state_dict().items()}
        with NoDraws():
            made = layers()
            with Draws() as draws:
                made[0].reset_parameters()
    assert draws.drawn == []
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in made.state_dict().items()} == usual


def test_tensors_with_values_are_drawn() -> None:
    torch.manual_seed(0)
    usual = nn.Linear(3, 2).weight
    torch.manual_seed(0)
    with NoDraws():
        assert torch.equal(nn.Linear(3, 2).weight, usual)


def test_a_config_is_built_without_draws() -> None:
    from transformers import LlamaConfig

    config = LlamaConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=8
    )
    config.architectures = ["LlamaForCausalLM"]
    with Draws() as draws:
        build_on_meta(config, "test")
    assert draws.drawn == []

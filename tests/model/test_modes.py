"""A model that was run aside is afterwards what it was."""

from __future__ import annotations

import random
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from isotype.model.modes import in_evaluation


class Remembering(nn.Module):
    """Keeps something of its first input, as routers, positions and caches do, in each of the ways there are."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.capacity: int | None = None
        self.cache: dict[str, Any] = {"kept": 1}
        self.lengths: list[int] = []
        self.register_buffer("seen", torch.zeros(2))
        self.inner = nn.Dropout()
        self.weight = nn.Parameter(torch.ones(3, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.capacity = self.capacity or len(x)
        self.late = x
        self.cache[f"of {len(x)}"] = x
        self.lengths.append(len(x))
        self.seen += 1
        self.weight.data[1:].mul_(2)
        torch._foreach_add_([self.weight.data], 1.0)  # type: ignore[arg-type]
        self.register_buffer("more", x)
        assert random.random() + numpy.random.rand() + float(torch.rand(())) >= 0
        return x


def state(model: Remembering) -> Any:
    plain = {name: value for name, value in vars(model).items() if not name.startswith("_")}
    drawn = (random.getstate(), tuple(numpy.random.get_state()[1]), torch.get_rng_state().tolist())
    buffers = {name: tensor.tolist() for name, tensor in model.state_dict().items()}
    return repr((plain, buffers, [each.training for each in model.modules()], drawn))


@pytest.mark.parametrize("inference", [False, True])
def test_nothing_of_a_run_aside_stays(inference: bool) -> None:
    model = Remembering().train()
    model.inner.eval()
    before = state(model)
    with torch.inference_mode(inference), in_evaluation(model):
        assert not model.training
        model(torch.ones(4))
        assert model.capacity == 4
    assert state(model) == before
    assert not hasattr(model, "late")


def test_nothing_stays_of_a_run_that_raises() -> None:
    model = Remembering().train()
    before = state(model)
    with pytest.raises(RuntimeError, match="shape"), in_evaluation(model):
        model(torch.ones(4)) @ torch.ones(2, 3)
    assert state(model) == before


def test_what_code_asks_of_a_model_without_weights_is_answered() -> None:
    with in_evaluation(nn.Linear(2, 2, device="meta")):
        numbers = torch.ones(3, device="meta")
        assert (numbers == 1).all()
        assert numbers.sum().item() == 1.0
        assert numbers.long().sum().item() == 1
        assert torch.equal(numbers, numbers)
        assert torch.ones(3).sum().item() == 3

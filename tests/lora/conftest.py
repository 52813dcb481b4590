"""What tests of this room share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from isotype.lora.attention import registered
from isotype.lora.attention.choice import OWN, Choice, offered
from isotype.lora.attention.strips import compiled_strips
from isotype.lora.loops import elementwise


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """How many threads torch has; the test runs once with each number."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture(params=OWN)
def own_kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the tests compare must not rest on which kernel is faster here: each runs with every one that there is."""
    if request.param not in offered(torch.float32):
        pytest.skip(str(compiled_strips().reason))
    choice = Choice(request.param, request.param, {}, 2.0)
    monkeypatch.setattr(registered, "choose", lambda shape: (choice, None))


@pytest.fixture
def rotations(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each call of the loops was one for gradients."""
    if not elementwise.compiled():
        pytest.skip("there is no C++ compiler")
    seen: list[bool] = []
    own = elementwise.rotate

    def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, back: bool = False) -> torch.Tensor:
        seen.append(back)
        return own(x, cos, sin, back)

    monkeypatch.setattr(elementwise, "rotate", rotate)
    return seen

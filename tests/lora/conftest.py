"""What tests of this room share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from isotype.lora.loops import elementwise
from tests.cpus import no_compiler


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """How many threads torch has; the test runs once with each number."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What watches the compiled rotations needs some."""
    for item in items:
        if isinstance(item, pytest.Function) and "rotations" in item.fixturenames:
            item.add_marker(pytest.mark.lacking(no_compiler()))


@pytest.fixture
def rotations(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each call of the loops was one for gradients."""
    seen: list[bool] = []
    own = elementwise.rotate

    def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, back: bool = False) -> torch.Tensor:
        seen.append(back)
        return own(x, cos, sin, back)

    monkeypatch.setattr(elementwise, "rotate", rotate)
    return seen

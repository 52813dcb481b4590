"""Functions that build a model run alone, and with float32 as torch's default dtype."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from isotype.core.threads import undisturbed


@pytest.fixture
def _default_kept() -> Iterator[None]:
    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)


@pytest.mark.usefixtures("_default_kept")
def test_a_second_thread_waits() -> None:
    entered, leave = threading.Event(), threading.Event()
    order: list[str] = []

    @undisturbed
    def build(name: str) -> None:
        order.append(f"{name} begins")
        torch.set_default_dtype(torch.bfloat16)  # as transformers does
        if name == "first":
            entered.set()
            assert leave.wait(10)
        torch.set_default_dtype(torch.float32)
        order.append(f"{name} ends")

    first = threading.Thread(target=build, args=("first",))
    second = threading.Thread(target=build, args=("second",))
    first.start()
    assert entered.wait(10)
    second.start()
    second.join(0.2)
    assert order == ["first begins"]
    leave.set()
    first.join(10)
    second.join(10)
    assert order == ["first begins", "first ends", "second begins", "second ends"]


@pytest.mark.usefixtures("_default_kept")
def test_the_default_dtype_is_float32_inside_and_the_callers_again_afterwards() -> None:
    @undisturbed
    def built(depth: int) -> torch.dtype:
        if depth == 0:
            raise ValueError("no layers")
        return torch.empty(1).dtype if depth == 1 else built(depth - 1)

    torch.set_default_dtype(torch.bfloat16)
    assert built(2) == torch.float32
    assert torch.get_default_dtype() == torch.bfloat16
    with pytest.raises(ValueError, match="no layers"):
        built(0)
    assert torch.get_default_dtype() == torch.bfloat16

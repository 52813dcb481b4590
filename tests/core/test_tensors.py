"""What torch tells by names that are not public: a torch that has lost one, or no longer needs one, fails here."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from isotype.core.tensors import is_transformed, version_of


def test_versions_count_writes() -> None:
    x = torch.zeros(3)
    before = version_of(x)
    x[0] = 1
    assert before is not None
    assert version_of(x) == before + 1


def test_what_counts_no_writes_has_no_version() -> None:
    normal = torch.zeros(3)
    with torch.inference_mode():
        uncounted = torch.zeros(3)
        before = version_of(normal)
        normal[0] = 1
        assert before is not None
        assert version_of(normal) == before + 1
    assert version_of(uncounted) is None
    assert version_of(uncounted.clone()) is not None


def test_transforms_are_seen() -> None:
    seen: list[bool] = []

    def noted(x: torch.Tensor) -> torch.Tensor:
        seen.append(is_transformed())
        return x.sum()

    x = torch.ones(2, 3)
    torch.func.grad(noted)(x)
    torch.func.vmap(noted)(x)
    assert seen == [True] * 2
    noted(x.requires_grad_()).backward()  # type: ignore[no-untyped-call]
    with torch.inference_mode():
        noted(x)
    assert seen == [True] * 2 + [False] * 2


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0] * 2


def test_torch_still_refuses_functions_without_setup_context() -> None:
    """The reason why fused paths leave transformed code to torch's operators."""
    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.grad(lambda x: Doubled.apply(x).sum())(torch.ones(2))  # type: ignore[no-untyped-call]

from __future__ import annotations

import pytest
import torch
from torch import nn

from isotype.rules.finding import Finding
from isotype.rules.ist199_not_followed import is_about_dtypes
from isotype.trace.record import Failure
from tests.rules.traces import batch, found, llama, traced

RULE = "ist199_not_followed"


class Refusing(nn.Module):
    """Raises in its forward."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.error = error

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.inner(x)
        raise self.error


def refused(error: Exception) -> list[Finding]:
    return found(RULE, traced(Refusing(error), {"x": torch.ones(2, 4)}))


def test_an_error_about_dtypes() -> None:
    (finding,) = refused(TypeError("kernel expects bfloat16 queries, got float32"))
    assert finding.severity == "error"
    assert finding.message == (
        "the step was not followed beyond the forward: TypeError: kernel expects bfloat16 queries, got float32"
    )
    assert finding.source.rpartition("/")[2].startswith("test_ist199.py:")


def test_any_other_error() -> None:
    (finding,) = refused(ValueError("the image has 3 channels, the model takes 4"))
    assert finding.severity == "warning"
    assert finding.fixes[0].actions[0].kind == "advice"


def test_a_step_that_was_followed() -> None:
    assert found(RULE, traced(llama(), batch())) == []


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        ("RuntimeError: expected scalar type Float but found BFloat16", True),
        ("RuntimeError: mat1 and mat2 must have the same dtype, but got Half and Float", True),
        ("NotImplementedError: \"addmm_impl_cpu_\" not implemented for 'Half'", True),
        ("RuntimeError: got: float != c10::BFloat16", True),
        ("RuntimeError: The size of tensor a (3) must match the size of tensor b (4)", False),
        ("KeyError: 'bfloat16'", False),
        ("ImportError: flash_attn is not installed", False),
        ("ValueError: You have to specify input_ids or inputs_embeds", False),
        ("RuntimeError: could not convert string to floating point", False),
    ],
)
def test_which_errors_are_about_dtypes(error: str, expected: bool) -> None:
    assert is_about_dtypes(Failure("forward", "", "", error)) is expected

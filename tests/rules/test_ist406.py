from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.pairwise import few
from tests.reality import real_step
from tests.rules.traces import BF16, FP16, FP32, found, traced, verified

RULE = "ist406_scratch"
SCRATCH = {dtype: torch.zeros(8, 8, dtype=dtype) for dtype in (BF16, FP16, FP32)}
X = torch.ones(2, 8, dtype=BF16)


class Shared(nn.Module):
    """Adds to a layer's output a product with a table that the code keeps for itself."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.proj = nn.Linear(8, 8).to(BF16)
        self.dtype = dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.mm(self.proj(x), SCRATCH[self.dtype])


@pytest.mark.real_cpu
def test_a_table_of_the_model_before() -> None:
    (finding,) = verified(Shared(FP32), {"x": X}, "IST406")
    outcome = real_step(Shared(FP32), {"x": X})
    assert (outcome.phase, outcome.module) == (finding.phase, finding.module) == ("forward", "")
    assert finding.message == "a tensor outside of the model is float32, but the other operands are bfloat16"
    assert finding.cause.startswith(
        "a tensor that the code stores outside of the model is float32 at test_ist406.py:"
    )
    assert finding.notes == (f"the device raises: {outcome.error}",)
    assert finding.fixes[-1].description == (
        "allocate that tensor in the dtype of the model that uses it (bfloat16): keep one for each device, stream and "
        "dtype"
    )
    assert not finding.fixes[-1].verified


def test_a_table_in_the_models_dtype() -> None:
    assert found(RULE, traced(Shared(BF16), {"x": X})) == []


class Mastered(nn.Module):
    """Most of its matrices are trained in float32, and their names do not say that they are an adapter's."""

    def __init__(self, dtype: torch.dtype, before: torch.dtype) -> None:
        super().__init__()
        self.before = before
        self.embed = nn.Embedding(8, 8, dtype=dtype).requires_grad_(False)
        self.down, self.up = nn.Linear(8, 4, bias=False), nn.Linear(4, 8, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        return hidden @ SCRATCH[self.before].copy_(torch.eye(8)).T + self.up(self.down(hidden.float())).to(
            hidden.dtype
        )


@few("dtypes", [(BF16, FP16), (FP16, BF16)], (BF16, FP16))
def test_a_table_in_another_dtype_than_a_16_bit_part(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    """unslothai/unsloth #4026. Neither dtype is the one of most matrices: the table is to blame, not the model."""
    before, dtype = dtypes
    trace = traced(Mastered(dtype, before), {"ids": torch.arange(8)})
    (finding,) = found(RULE, trace)
    assert finding.message.startswith("a tensor outside of the model is ")
    assert found("ist101_operands", trace) == []

from __future__ import annotations

import pytest
import torch
from torch import nn

import isotype
from tests.reality import real_step
from tests.rules.traces import BF16, FP32, found, traced, verified
from tests.small import line

RULE = "ist103_scatter"
X = torch.ones(2, 4, dtype=BF16)


class Scattered(nn.Module):
    """Collects a layer's output in a buffer of `dtype`."""

    def __init__(self, write: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4).to(BF16)
        self.write, self.dtype = write, dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made, rows = self.proj(x), torch.tensor([2, 0])
        into = torch.zeros(5, 4, dtype=self.dtype)
        if self.write == "index_put":
            into[rows] = made
        elif self.write == "index_add":
            into.index_add_(0, rows, made)
        elif self.write == "masked_scatter":
            mask = torch.tensor([True, False, True, False, False])[:, None]
            into = into.masked_scatter(mask, made)
        else:
            into = into.scatter(0, rows[:, None].expand(2, 4), made)
        return into


WRITES = ["index_put", "index_add", "masked_scatter", "scatter"]


@pytest.mark.real_cpu
@pytest.mark.parametrize("write", WRITES)
def test_into_another_dtype(write: str) -> None:
    (finding,) = found(RULE, traced(Scattered(write, FP32), {"x": X}))
    outcome = real_step(Scattered(write, FP32), {"x": X})
    assert (outcome.phase, outcome.module) == (finding.phase, finding.module) == ("forward", "")
    assert f"the device raises: {outcome.error}" in finding.notes
    assert finding.op.startswith((f"aten.{write}", f"torch.{write}"))
    assert line(finding.source).startswith("test_ist103.py:")


@pytest.mark.real_cpu
@pytest.mark.parametrize("write", WRITES)
def test_into_the_same_dtype(write: str) -> None:
    assert found(RULE, traced(Scattered(write, BF16), {"x": X})) == []
    assert real_step(Scattered(write, BF16), {"x": X}).error is None


class Summed(nn.Module):
    """Sums exponentials per group in the input's dtype."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        index = torch.tensor([0, 1])[:, None].expand(2, 4)
        return torch.zeros(2, 4, dtype=x.dtype).scatter_reduce_(0, index, x.exp(), "sum")


def test_a_cast_of_inputs_changes_no_dtype_that_autocast_chooses() -> None:
    """chemprop/chemprop #780: a GPU's autocast computes `exp` in float32, whatever dtype the module gets."""
    model = nn.Sequential(nn.Linear(4, 4), Summed())
    report = isotype.check(model, {"input": torch.ones(2, 4)}, device="a100", autocast="bfloat16")
    (finding,) = report.errors
    assert finding.cause.startswith("autocast returns float32 from exp")
    assert [fix.description.partition(" at ")[0] for fix in finding.fixes] == [
        "cast the tensor that is written to bfloat16"
    ]


def test_the_text_and_the_fix() -> None:
    (finding,) = verified(Scattered("index_add", FP32), {"x": X}, "IST103")
    assert finding.message == "float32 instead of bfloat16 in a scatter, which requires equal dtypes"
    assert finding.cause.startswith("zeros returns float32 at test_ist103.py:")
    assert finding.fixes[0].verified
    assert finding.fixes[0].description.startswith("write bfloat16 instead of float32 at test_ist103.py:")


class Accumulated(nn.Module):
    """Sums rows up in float32, and does not cast what it adds."""

    def __init__(self, cast: bool) -> None:
        super().__init__()
        self.proj, self.sums, self.cast = nn.Linear(4, 4).to(BF16), torch.zeros(5, 4), cast

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.proj(x)
        sums = self.sums.clone()
        sums.lerp_(made.new_ones(5, 4).float(), 0.5)
        sums.index_add_(0, torch.tensor([2, 0]), made.float() if self.cast else made)
        return sums


def test_a_cast_at_the_line_is_to_the_dtype_that_is_written_into() -> None:
    (finding,) = verified(Accumulated(cast=False), {"x": X}, "IST103")
    described = [fix.description for fix in finding.fixes if fix.verified]
    assert f"cast the tensor that is written to float32 at {line(finding.source)}" in described
    assert not any(each.startswith("cast the operands to bfloat16") for each in described)
    assert verified(Accumulated(cast=True), {"x": X}, "IST103") == []


class Cache:
    """An object among the inputs that keeps tensors, as the static cache of transformers does."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.keys = torch.zeros(2, 8, dtype=dtype)


class Caching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.key = nn.Linear(8, 8).to(BF16)

    def forward(self, x: torch.Tensor, cache: Cache) -> torch.Tensor:
        key = self.key(x)
        cache.keys.index_copy_(0, torch.arange(2), key.detach())
        return key.float().sum()


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_a_tensor_in_an_object_of_the_inputs_has_its_name(dtype: torch.dtype) -> None:
    found_ones = found(RULE, traced(Caching(), {"x": torch.ones(2, 8, dtype=BF16), "cache": Cache(dtype)}))
    causes = ["the input cache.keys is float32"] if dtype == FP32 else []
    assert [finding.cause for finding in found_ones] == causes

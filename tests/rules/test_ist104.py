from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional

from isotype.preflight.check import check
from tests.reality import real_step
from tests.rules.traces import BF16, FP32, found, traced, verified

RULE = "ist104_attention"
X = torch.ones(1, 1, 3, 8, dtype=BF16)


class Attention(nn.Module):
    """Attention over two projections, the query's result in `dtype`."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8)
        self.to(BF16)
        self.dtype = dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(self.q(x).to(self.dtype), self.k(x), x)


@pytest.mark.real_cpu
def test_a_query_in_another_dtype() -> None:
    (finding,) = verified(Attention(FP32), {"x": X}, "IST104")
    assert finding.message == "float32 instead of bfloat16 in attention"
    assert (finding.module, finding.op) == ("", "torch.scaled_dot_product_attention")
    assert finding.cause.startswith("a cast to float32 at test_ist104.py:")
    assert f"the device raises: {real_step(Attention(FP32), {'x': X}).error}" in finding.notes
    descriptions = [fix.description for fix in finding.fixes if fix.verified]
    assert any(
        each.startswith("write bfloat16 instead of float32 at test_ist104.py:") for each in descriptions
    )
    assert "run the step under autocast to bfloat16" in descriptions


def test_one_dtype() -> None:
    assert found(RULE, traced(Attention(BF16), {"x": X})) == []


@pytest.mark.parametrize(("device", "codes"), [("a100", ["IST104"]), ("h100", []), ("t4", [])])
def test_a_trained_bias_in_float32(device: str, codes: list[str]) -> None:
    """The memory-efficient kernel takes no other dtype; cuDNN's kernel (H100) and plain operators (bfloat16 on a T4) do."""

    class Biased(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.table = nn.Linear(8, 8, dtype=BF16), nn.Parameter(torch.zeros(1, 1, 3, 3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            query = self.q(x)
            return functional.scaled_dot_product_attention(query, query, query, attn_mask=self.table)

    errors = check(Biased(), {"x": X}, device=device, wiring=False).errors
    assert [finding.code for finding in errors] == codes
    for finding in errors:
        assert finding.notes[0] == "the device raises: invalid dtype for bias - should match query's dtype"
        assert any(fix.verified for fix in finding.fixes)


class WithCache(nn.Module):
    """Attention inside of a module that appends to the keys of a cache, as decoders of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(8, 8, dtype=BF16)

    def forward(self, x: torch.Tensor, past: SimpleNamespace) -> torch.Tensor:
        query, layer = self.q(x), past.layers[0]
        keys = torch.cat((layer.keys, query), dim=-2)
        return functional.scaled_dot_product_attention(query, keys, keys)


def test_a_float32_cache_is_created_in_the_other_dtype() -> None:
    past = SimpleNamespace(layers=[SimpleNamespace(keys=torch.ones(1, 1, 2, 8))])
    (finding,) = verified(WithCache(), {"x": X, "past": past}, "IST104")
    assert finding.cause == "the input past.layers[0].keys is float32"
    descriptions = [fix.description for fix in finding.fixes]
    assert "create past in bfloat16" in descriptions
    assert not [text for text in descriptions if text.startswith("cast the outputs")]

"""Adapters in the dtype of the products: the same bits by two kernels for a group as by one or two for each tensor."""

from __future__ import annotations

import pytest
import torch

from isotype.lora import rounded as module
from isotype.lora.rounded import Pairs, rounded

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
IN = 7


def layer(*adapters: tuple[int, float], out: int, dtype: torch.dtype = F32) -> Pairs:
    """A layer with adapters of these ranks and scales."""
    generator = torch.Generator().manual_seed(out)
    downs = [torch.randn(rank, IN, generator=generator).to(dtype) for rank, _ in adapters]
    ups = [torch.randn(out, rank, generator=generator).to(dtype) for rank, _ in adapters]
    return Pairs(downs, ups, [scale for _, scale in adapters])


GROUPS = {
    "one": [layer((3, 2.0), out=5)],
    "q, k and v": [layer((3, 2.0), out=5), layer((4, 0.3), out=2), layer((1, 1.0), out=6)],
    "two adapters": [layer((3, 0.7), (2, 1.1), out=5), layer((4, 0.3), out=2)],
    "a layer without": [Pairs([], [], []), layer((4, 0.3), out=2)],
    "masters of two dtypes": [layer((3, 0.7), out=5), layer((4, 0.3), out=2, dtype=BF16)],
}


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("group", GROUPS)
def test_the_bits_are_those_of_one_after_another(group: str, dtype: torch.dtype, stacked: bool) -> None:
    layers = GROUPS[group]
    down, scaled = module._together(layers, dtype, stacked)
    assert (down is None) == (not stacked)
    if down is not None:
        wanted = torch.cat([each for one in layers for each in one.downs]).to(dtype)
        assert torch.equal(down, wanted)
    for made, one in zip(scaled, layers, strict=True):
        parts = [(up * scale).to(dtype) for up, scale in zip(one.ups, one.scales, strict=True)]
        assert (made is None) == (not parts)
        assert made is None or torch.equal(made, torch.cat(parts, dim=1))


def test_what_is_rounded_is_a_copy() -> None:
    """What a backward reads stays as it was, whatever becomes of the masters."""
    layers = GROUPS["q, k and v"]
    down, (up, *_) = module._together(layers, BF16, stacked=True)
    assert down is not None
    assert up is not None
    owned = {x.untyped_storage().data_ptr() for each in layers for x in (*each.downs, *each.ups)}
    assert not {down.untyped_storage().data_ptr(), up.untyped_storage().data_ptr()} & owned


def test_no_adapters() -> None:
    assert rounded([Pairs([], [], [])], BF16, stacked=True) == (None, [None])

"""Adapters in the dtype of the products: the same bits by two kernels for a group as by one or two for each tensor."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import isotype
from isotype.lora import weights as module
from isotype.lora.weights import Pairs, rounded

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
    for up, one in zip(scaled, layers, strict=True):
        parts = [(up * scale).to(dtype) for up, scale in zip(one.ups, one.scales, strict=True)]
        assert (up is None) == (not parts)
        assert up is None or torch.equal(up, torch.cat(parts, dim=1))


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


class Net(nn.Module):
    """Two layers that are called one after another, the second one twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(IN, IN, dtype=BF16), nn.Linear(IN, IN, dtype=BF16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.second(self.first(x)))


def adapted(fused: bool, x: torch.Tensor) -> Any:
    torch.manual_seed(0)
    config = peft.LoraConfig(r=3, target_modules=["first", "second"], init_lora_weights=False)
    model: Any = peft.get_peft_model(Net(), config)
    if fused:
        assert len(isotype.fuse(model, inputs={"x": x}).fused) == 2
    return model


@pytest.fixture
def inputs(monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """Of layers whose adapters are rounded as on a GPU."""
    monkeypatch.setattr(module, "_one_by_one", module._together)
    return torch.randn(5, IN, generator=torch.Generator().manual_seed(1)).to(BF16)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_adapters_are_those_of_the_call_whoever_wrote_them(inputs: torch.Tensor, checkpointed: bool) -> None:
    """Nothing that is kept from the begin of a forward, or by a stamp of versions, would see what is written in it by `.data`."""

    def write(layer: Any, *_: Any) -> None:
        layer.lora_A["default"].weight.data.mul_(0.9)
        layer.lora_B["default"].weight.data.add_(0.05)

    results = []
    for fused in (True, False):
        model = adapted(fused, inputs)
        for layer in (model.base_model.model.first, model.base_model.model.second):
            layer.register_forward_pre_hook(write)
        for _ in range(2):
            y = checkpoint(model, inputs, use_reentrant=False) if checkpointed else model(inputs)
            y.float().square().sum().backward()
            results.append(y.detach().float())
    for gradient, reference in zip(results[:2], results[2:], strict=True):
        # PEFT rounds between the products, to 8 bits
        assert (gradient - reference).norm() <= 0.02 * reference.norm()


def test_a_backward_reads_what_its_forward_read(inputs: torch.Tensor) -> None:
    """Whatever was written between them, past every counter: plain autograd would read the masters as they are now."""
    gradients = []
    for written in (False, True):
        model = adapted(True, inputs)
        y = model(inputs)
        if written:
            for parameter in model.parameters():
                parameter.data.mul_(1.5 if parameter.requires_grad else 1)
        y.float().square().sum().backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    assert len(gradients[0]) == 4
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))

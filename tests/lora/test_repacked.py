"""bitsandbytes' 4-bit layers as a user builds them: CPUs with AVX512-BF16 repack their weights in evaluation, for good.

isotype's own loader and `enforce` switch that off; a model that only `fuse` has seen must not learn from wrong gradients either.
"""

from __future__ import annotations

from typing import Any

import bitsandbytes
import peft
import torch
from torch import nn

import isotype

_SIZE = 64


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (_layer() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))  # type: ignore[no-any-return]


def _layer() -> Any:
    layer = bitsandbytes.nn.Linear4bit(
        _SIZE, _SIZE, bias=False, quant_type="nf4", compute_dtype=torch.bfloat16
    )
    layer = layer.to("cpu")
    layer.support_avx512bf16_for_cpu = True  # as on a CPU with AVX512-BF16
    return layer


def _adapted() -> Any:
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, target_modules=["first", "second"], init_lora_weights=False)
    return peft.get_peft_model(_Net(), config)


def _gradients(model: Any) -> dict[str, torch.Tensor]:
    x = torch.randn(8, _SIZE, generator=torch.Generator().manual_seed(1), dtype=torch.float32)
    model.zero_grad()
    model.train()(x.bfloat16()).float().square().sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_fusing_leaves_the_layout_that_trains() -> None:
    plain, fused = _gradients(_adapted()), _adapted()
    isotype.fuse(fused, {"x": torch.zeros(1, _SIZE, dtype=torch.bfloat16)})
    with torch.no_grad():
        fused.eval()(torch.zeros(1, _SIZE, dtype=torch.bfloat16))
    for name, gradient in _gradients(fused).items():
        # Several roundings to bfloat16 (2^-9 each), in another order than PEFT's.
        assert float((gradient - plain[name]).norm() / plain[name].norm()) < 0.03, name


def test_a_weight_that_was_repacked_before_is_left_with_a_reason() -> None:
    model = _adapted()
    with torch.no_grad():
        model.eval()(torch.zeros(1, _SIZE, dtype=torch.bfloat16))
    report = isotype.fuse(model, {"x": torch.zeros(1, _SIZE, dtype=torch.bfloat16)})
    assert report.fused == ()
    reason = "the base has lost the layout for training: bitsandbytes repacked weights for evaluation; load the model again"
    assert set(report.left.values()) == {reason}

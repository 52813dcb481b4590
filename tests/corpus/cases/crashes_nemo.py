"""NeMo Automodel's LoRA on a gpt-oss whose norms were kept in float32 (Automodel #1540, #1622, #1632, #1633)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from tests.corpus.cases.crashes_parts import (
    BF16,
    FP32,
    Block,
    Decoder,
    cast_matching,
    heads,
    ids,
    linear_4bit,
    set_layers,
)
from tests.corpus.scenario import Broken, Scenario
from tests.models import HIDDEN

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")


class LinearLoRA(nn.Linear):
    """A linear layer that holds its adapter itself, bfloat16 like the layer; its forward casts nothing.

    Attributes:
        magnitude: DoRA's row norms, None without DoRA.
    """

    def __init__(self, base: nn.Linear, dora: bool = False, rank: int = 4) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight, self.bias = base.weight, base.bias
        dtype = base.weight.dtype
        self.lora_A = nn.Linear(base.in_features, rank, False, dtype=dtype)
        self.lora_B = nn.Linear(rank, base.out_features, False, dtype=dtype)
        self.magnitude = nn.Parameter(base.weight.data.norm(dim=1)) if dora else None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        result = F.linear(hidden, self.weight, None if self.magnitude is not None else self.bias)
        adapted = self.lora_B(self.lora_A(hidden)) * 2.0
        if self.magnitude is None:
            return result + adapted
        norm = (self.weight + self.lora_B.weight @ self.lora_A.weight * 2.0).norm(dim=1).detach()
        scaled = (self.magnitude / norm) * (result + adapted)
        return scaled if self.bias is None else scaled + self.bias


class QuantizedLinearLoRA(nn.Module):
    """The same on an nf4 layer, which casts its own input; the adapter's products do not."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base_layer = linear_4bit(base, BF16)
        self.lora_A = nn.Linear(base.in_features, rank, False, dtype=BF16)
        self.lora_B = nn.Linear(rank, base.out_features, False, dtype=BF16)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.base_layer(hidden) + self.lora_B(self.lora_A(hidden)) * 2.0


class SinkAttention(nn.Module):
    """gpt-oss' attention: grouped keys and values, biases, and a learned logit that no token owns."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.o_proj = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.k_proj, self.v_proj = nn.Linear(HIDDEN, HIDDEN // 2), nn.Linear(HIDDEN, HIDDEN // 2)
        self.sinks = nn.Parameter(torch.zeros(4))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        q = heads(self.q_proj(hidden))
        k, v = (heads(layer(hidden), 2).repeat_interleave(2, dim=1) for layer in (self.k_proj, self.v_proj))
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        causal = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = scores.masked_fill(~causal, float("-inf"))
        sinks = self.sinks.view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        weights = torch.cat([scores, sinks.to(scores.dtype)], -1).softmax(-1, torch.float32)[..., :-1]
        return self.o_proj((weights.to(v.dtype) @ v).transpose(1, 2).flatten(2))


class Experts(nn.Module):
    """Four experts of one parameter each, of which a router mixes two."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, 4)
        self.gate_up_proj = nn.Parameter(torch.randn(4, HIDDEN, 64) * 0.1)
        self.down_proj = nn.Parameter(torch.randn(4, 32, HIDDEN) * 0.1)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        tokens = hidden.flatten(0, 1)
        top, chosen = self.router(tokens).topk(2, -1)
        routed = torch.zeros(tokens.shape[0], 4, dtype=top.dtype).scatter(1, chosen, top.softmax(-1))
        gate, up = torch.bmm(tokens.expand(4, -1, -1), self.gate_up_proj).chunk(2, -1)
        out = torch.bmm(F.silu(gate) * up, self.down_proj)
        return (out * routed.T.unsqueeze(-1)).sum(0).view_as(hidden)


def automodel_gpt_oss(variant: str = "lora", layers: int = 2) -> Broken:
    """A bfloat16 gpt-oss, its norms restored to float32 as `_keep_in_fp32_modules` asked, LoRA on the attention.

    Args:
        variant: `lora`, `dora` or `qlora`.
        layers: of the decoder.
    """
    torch.manual_seed(0)
    model: nn.Module = Decoder([Block(SinkAttention(), Experts()) for _ in range(layers)]).to(BF16)
    model.requires_grad_(False)
    make: dict[str, Any] = {
        "lora": LinearLoRA,
        "dora": lambda layer: LinearLoRA(layer, dora=True),
        "qlora": QuantizedLinearLoRA,
    }
    set_layers(model, TARGETS, make[variant])
    cast_matching(model, FP32, "post_attention_layernorm", "input_layernorm", "norm.weight")
    return Broken(model, {"input_ids": ids()})


SCENARIOS: tuple[Scenario, ...] = (
    Scenario(
        "automodel-1540",
        automodel_gpt_oss,
        ("IST101",),
        r"layers\.\S*input_layernorm",
        crashes=r"(mat1|m1|self) and (mat2|m2) .*same dtype, but got",
        notes="Plain PyTorch: neither NeMo nor transformers is needed.",
    ),
)
LEFT_OUT: dict[str, str] = {}

"""Rotary frequencies and angles in 16 bit: positions run together and no library says a word."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.corpus.cases.crashes_parts import BF16, FP16, MLP, Block, Decoder, heads, ids, lora
from tests.corpus.scenario import Broken, Scenario
from tests.models import HIDDEN, small_model, tiny_batch, tiny_config

POSITION = 2000
"""Where angles are compared: within the context of every model of these reports."""


class Rotary(nn.Module):
    """The rotary embedding of older modelling code: frequencies in a buffer, angles by einsum."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer(
            "inv_freq", 1.0 / 10000 ** (torch.arange(0, size, 2).float() / size), persistent=False
        )

    def forward(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = torch.einsum("i,j->ij", positions.to(self.inv_freq.dtype), self.inv_freq)
        angles = torch.cat((angles, angles), -1)
        return angles.cos(), angles.sin()


class BatchedRotary(Rotary):
    """The same as `modeling_llama.py` has it: a batched matmul, which autocast takes for a matmul of the model."""

    autocast = True

    def forward(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.autocast("cpu", enabled=self.autocast and torch.is_autocast_enabled("cpu")):
            angles = (self.inv_freq[None, :, None].float() @ positions[None, None, :].float()).transpose(
                1, 2
            )[0]
        angles = torch.cat((angles, angles), -1)
        return angles.cos(), angles.sin()


class RotaryAttention(nn.Module):
    """Self-attention whose queries and keys are turned by `rotary`."""

    def __init__(self, rotary: nn.Module) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(HIDDEN, HIDDEN, False) for _ in range(4)
        )
        self.rotary_emb = rotary

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        q, k, v = (heads(layer(hidden)) for layer in (self.q_proj, self.k_proj, self.v_proj))
        cos, sin = (x.to(q.dtype) for x in self.rotary_emb(torch.arange(hidden.shape[1])))
        q, k = (x * cos + turned(x) * sin for x in (q, k))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


def turned(x: torch.Tensor) -> torch.Tensor:
    """The second half, negated, before the first."""
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def neox_in_half() -> Broken:
    """GPT-NeoX in float16: frequencies and positions both in float16."""
    torch.manual_seed(0)
    model = Decoder([Block(RotaryAttention(Rotary(HIDDEN // 4)), MLP())]).to(FP16)
    return Broken(model, lambda module: module(ids()))


def neox_fixed() -> Broken:
    """The same with frequencies and positions in float32."""
    broken = neox_in_half()
    for layer in broken.model.layers:  # type: ignore[union-attr]
        layer.self_attn.rotary_emb = Rotary(HIDDEN // 4)  # type: ignore[union-attr]
    return broken


def llama_under_autocast() -> Broken:
    """Llama and Gemma before their rotary embedding switched autocast off: a bfloat16 matmul makes the angles."""
    torch.manual_seed(0)
    model = Decoder([Block(RotaryAttention(BatchedRotary(HIDDEN // 4)), MLP())])
    return Broken(model, lambda module: module(ids()), BF16)


class MendedRotary(BatchedRotary):
    """As it is since transformers 4.39: autocast is off where the angles are made."""

    autocast = False


def llama_since_then() -> Broken:
    """The same with the rotary embedding of later versions."""
    broken = llama_under_autocast()
    for layer in broken.model.layers:  # type: ignore[union-attr]
        layer.self_attn.rotary_emb = MendedRotary(HIDDEN // 4)  # type: ignore[union-attr]
    return broken


def cast_llama() -> Broken:
    """Llama, `.to(bfloat16)` after it was built, as DeepSpeed does: its frequencies are cast as well."""
    return Broken(lora(small_model("llama").to(BF16)), tiny_batch("llama"))


def cast_neox() -> Broken:
    """GPT-NeoX, all of it cast to bfloat16."""
    import transformers

    config = tiny_config("GPTNeoXConfig")
    torch.manual_seed(0)
    return Broken(
        lora(transformers.GPTNeoXForCausalLM(config).to(BF16), ["query_key_value"]), tiny_batch("llama")
    )


def angles_off(broken: Broken) -> str | None:
    """How far the cosines at `POSITION` are from those of float64 frequencies, autocast as in the run."""
    rotary: Any = next(
        m for name, m in broken.model.named_modules() if name.endswith(("rotary_emb", "rotary"))
    )
    size = 2 * rotary.inv_freq.numel()
    exact = 1.0 / 10000 ** (torch.arange(0, size, 2, dtype=torch.float64) / size)
    positions = torch.arange(POSITION - 8, POSITION)
    with torch.no_grad(), torch.autocast("cpu", dtype=broken.autocast, enabled=broken.autocast is not None):
        if isinstance(rotary, Rotary):
            cosines = rotary(positions)[0]
        else:
            cosines = rotary(torch.zeros(1, 8, size), positions[None])[0][0]
    error = (cosines.double()[:, : size // 2] - (positions[:, None] * exact).cos()).abs().max()
    return f"cosines at position {POSITION} are off by {error:.2f}" if error > 0.01 else None


SCENARIOS: tuple[Scenario, ...] = (
    Scenario(
        "gptneox-1003",
        neox_in_half,
        ("IST803",),
        r"inv_freq|silent_rotary",
        cost=angles_off,
        advice=neox_fixed,
        notes="The positions take the buffer's dtype, as they do in the report's code.",
    ),
    Scenario(
        "transformers-29285",
        llama_under_autocast,
        ("IST803",),
        r"rotary_emb|silent_rotary",
        cost=angles_off,
        advice=llama_since_then,
    ),
    Scenario("transformers-25681", cast_llama, ("IST803",), r"rotary_emb\.inv_freq", cost=angles_off),
    Scenario("optimum-habana-746", cast_neox, ("IST803",), r"rotary_emb\.inv_freq", cost=angles_off),
)

LEFT_OUT: dict[str, str] = {}

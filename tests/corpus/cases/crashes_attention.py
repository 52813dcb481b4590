"""Attention kernels that take 16-bit operands only, and masks of another dtype than the queries."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from tests.corpus.cases.crashes_parts import (
    BF16,
    FP16,
    FP32,
    MLP,
    Attention,
    Block,
    Decoder,
    RawLora,
    heads,
    ids,
    linear_4bit,
    lora,
    module_dtypes,
    nf4,
    replace_linears,
    set_layers,
    upcast_norms,
)
from tests.corpus.scenario import Broken, Scenario
from tests.models import HIDDEN, small_model
from tests.reality import real_step

FLASH = r"FlashAttention only support fp16 and bf16 data type"


def flash_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """FlashAttention's contract in front of torch's attention; the compiled kernel is not to be had on a CPU."""
    if not q.dtype == k.dtype == v.dtype or q.dtype not in (FP16, BF16):
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


# --------------------------------------------------------------------------------------------- attention_kernel_dtype


class FlashAttention(Attention):
    """An attention that calls the kernel directly, as patched models do."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        mixed = flash_attention(*(heads(layer(hidden)) for layer in (self.q_proj, self.k_proj, self.v_proj)))
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class PackedFlashAttention(Attention):
    """The axolotl patch: q, k and v in one tensor `[batch, length, 3, heads, size]`."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        qkv = torch.stack([layer(hidden) for layer in (self.q_proj, self.k_proj, self.v_proj)], 2)
        q, k, v = qkv.unflatten(-1, (4, -1)).permute(2, 0, 3, 1, 4)
        return self.o_proj(flash_attention(q, k, v).transpose(1, 2).flatten(2))


class CastingFlashAttention(Attention):
    """The patch of a tutorial: q, k and v are cast to bfloat16 at each forward, and back."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        q, k, v = (heads(layer(hidden)).to(BF16) for layer in (self.q_proj, self.k_proj, self.v_proj))
        mixed = flash_attention(q, k, v).to(hidden.dtype)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


def qlora_decoder(attention: type[Attention], wide: tuple[str, ...]) -> Broken:
    """nf4 layers with bfloat16 compute, which return the dtype they are given; `wide` parameters are float32."""
    torch.manual_seed(0)
    model = Decoder([Block(attention(), MLP()) for _ in range(2)]).to(BF16)
    replace_linears(model, lambda layer: linear_4bit(layer, BF16))
    for name, parameter in model.named_parameters():
        if any(part in name for part in wide):
            parameter.data = parameter.data.float()
    set_layers(
        model, ["q_proj", "v_proj"], lambda layer: RawLora(layer, BF16, lambda hidden: hidden.to(BF16))
    )
    return Broken(model, {"input_ids": ids()})


def no_mixed_precision() -> Broken:
    """Neither `bf16` nor `fp16` was given to the trainer: no autocast takes the float32 of the norms back."""
    return qlora_decoder(FlashAttention, ("norm",))


def axolotl_qlora() -> Broken:
    """`prepare_model_for_kbit_training` makes all that is not quantized float32: the residual stream is float32."""
    return qlora_decoder(PackedFlashAttention, ("norm", "embed_tokens", "lm_head"))


def cast_each_forward() -> Broken:
    """The same model with a patch that casts: it runs, at a cost of the casts."""
    return qlora_decoder(CastingFlashAttention, ("norm", "embed_tokens", "lm_head"))


def attention_casts(broken: Broken) -> str | None:
    """How many of the queries, keys and values are float32, which the patch then casts."""
    calls: list[tuple[str, torch.dtype]] = []
    for suffix in ("q_proj", "k_proj", "v_proj"):
        with module_dtypes(broken.model, suffix) as seen:
            outcome = real_step(broken.model, broken.inputs, broken.autocast, phases=("forward",))
        assert outcome.error is None, outcome.error
        calls += [(name, out) for name, _, out in seen]
    wide = sum(out == FP32 for _, out in calls)
    return (
        f"{wide} of {len(calls)} queries, keys and values are float32 and cast at each forward"
        if wide
        else None
    )


def qwen_in_float32() -> Broken:
    """Qwen loaded without a dtype: all of it is float32, and its config asks for FlashAttention."""
    torch.manual_seed(0)
    model = Decoder([Block(FlashAttention(), MLP()) for _ in range(2)]).requires_grad_(False)
    return Broken(model, {"input_ids": ids()}, phases=("forward",))


def qwen_in_bfloat16() -> Broken:
    """The same, loaded in the checkpoint's dtype."""
    broken = qwen_in_float32()
    broken.model.to(BF16)
    return broken


# --------------------------------------------------------------------------------------------- mask_dtype


class BigCodeAttention(nn.Module):
    """Multi-query attention of GPTBigCode, the mask added to the scores."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn = nn.Linear(HIDDEN, HIDDEN + 2 * (HIDDEN // 4))
        self.c_proj = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        q, k, v = self.c_attn(hidden).split((HIDDEN, HIDDEN // 4, HIDDEN // 4), -1)
        q, k, v = heads(q), k.unsqueeze(1), v.unsqueeze(1)
        length = hidden.shape[1]
        mask = (1.0 - torch.ones(length, length).tril()) * -10000.0
        scores = (q @ k.transpose(-1, -2)) / 4.0 + mask
        mixed = scores.softmax(-1) @ v.expand_as(q)
        return self.c_proj(mixed.transpose(1, 2).flatten(2))


def gpt_bigcode() -> Broken:
    """The causal mask is made by `torch.ones` in the default dtype and lifts bfloat16 scores to float32."""
    torch.manual_seed(0)
    model = Decoder([Block(BigCodeAttention(), MLP()) for _ in range(2)]).to(BF16).requires_grad_(False)
    set_layers(model, ["c_proj"], lambda layer: RawLora(layer, BF16))
    return Broken(model, {"input_ids": ids()}, phases=("forward",))


class MaskedModel(nn.Module):
    """A model whose additive causal mask `[rows, 1, length, length]` is made as older modelling code made it.

    Attributes:
        floor: what hides a token.
    """

    def __init__(self, model: Any, floor: torch.dtype | None) -> None:
        super().__init__()
        self.model, self.floor = model, floor

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        embeds = self.model.get_input_embeddings()(input_ids)
        rows, length = input_ids.shape
        hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
        lowest = torch.finfo(self.floor or embeds.dtype).min
        mask = torch.zeros(length, length, dtype=embeds.dtype).masked_fill(hidden, lowest)
        return self.model(inputs_embeds=embeds, attention_mask=mask.expand(rows, 1, -1, -1), labels=labels)


def code_llama_mask(floor: torch.dtype | None = FP32) -> Broken:
    """Code Llama in float16, its mask filled with the lowest value of `floor`."""
    model = lora(small_model("llama", FP16), ["q_proj", "v_proj"])
    return Broken(MaskedModel(model, floor), {"input_ids": ids(), "labels": ids()})


def stack_llama() -> Broken:
    """Llama-2 QLoRA: the mask takes the embeddings' bfloat16, the float32 norms make the queries float32."""
    model = upcast_norms(lora(nf4(small_model("llama", BF16), BF16), ["q_proj", "v_proj"]))
    return Broken(MaskedModel(model, None), {"input_ids": ids(), "labels": ids()})


SCENARIOS: tuple[Scenario, ...] = (
    Scenario(
        "unsloth-827",
        no_mixed_precision,
        ("IST604", "IST104", "IST101", "IST199"),
        r"norm",
        crashes=FLASH,
        notes="FlashAttention's own check of dtypes is written here in front of torch's attention.",
    ),
    Scenario(
        "axolotl-336",
        axolotl_qlora,
        ("IST604", "IST104", "IST101", "IST199"),
        r"norm|embed_tokens",
        crashes=FLASH,
        notes="As unsloth-827, with q, k and v packed into one tensor.",
    ),
    Scenario(
        "qwen3-406",
        qwen_in_float32,
        ("IST604", "IST104", "IST101", "IST199"),
        r"embed_tokens|proj|norm",
        crashes=FLASH,
        advice=qwen_in_bfloat16,
        notes="Older transformers loaded in float32 where no dtype was asked for; the cure is an argument.",
    ),
    Scenario(
        "philschmid-22",
        cast_each_forward,
        ("IST202", "IST201", "IST203"),
        r"norm|embed_tokens|crashes_attention\.py",
        cost=attention_casts,
    ),
    Scenario(
        "fms-215",
        gpt_bigcode,
        ("IST104", "IST101"),
        r"crashes_attention\.py|ones|constant|mask",
        crashes=r"expected scalar type \w+ but found \w+|same dtype",
        notes="torch 2.13's fused attention takes a float32 mask; the plain attention of the same model does not.",
    ),
    Scenario(
        "spider-sql-1",
        code_llama_mask,
        ("IST802", "IST104", "IST199"),
        r"crashes_attention\.py|mask|without overflow",
        crashes=r"value cannot be converted to type c10::Half without overflow",
        advice=lambda: code_llama_mask(None),
        notes="The mask is made in the wrapper here, as the modelling code of that time made it.",
    ),
    Scenario(
        "trl-1460",
        stack_llama,
        ("IST104",),
        r"norm|embed_tokens",
        crashes=r"Expected attn_mask dtype to be bool or float or to match query dtype, but got attn_mask\.dtype: c10::BFloat16",
    ),
)
LEFT_OUT: dict[str, str] = {}

"""Reports whose thread names no cause: the stated set-up, with the mechanism that its error leaves possible."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from tests.corpus.cases.crashes_parts import (
    BF16,
    FP16,
    FP32,
    RawLora,
    ids,
    int8,
    lora,
    matmul_error,
    nf4,
    normal,
    set_layers,
    tiny_qwen2,
    upcast_norms,
)
from tests.corpus.scenario import Broken, Scenario
from tests.models import CONFIGS, HIDDEN, IMAGE_TOKENS, small_model, tiny_batch, tiny_model


def deepseek_v2_lite() -> Broken:
    """DeepSeek-V2-Lite in 4-bit, LoRA on q and v, layer norms upcast; the head and the router are not quantized."""
    import transformers

    shared = CONFIGS["deepseek-v3"]().to_dict()
    config = transformers.DeepseekV2Config(
        **{
            name: shared[name]
            for name in (
                "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                "num_key_value_heads", "max_position_embeddings", "n_routed_experts", "num_experts_per_tok",
                "moe_intermediate_size", "first_k_dense_replace", "kv_lora_rank", "qk_rope_head_dim",
                "qk_nope_head_dim", "v_head_dim",
            )
        },
        q_lora_rank=None,
        n_group=1,
        topk_group=1,
        topk_method="greedy",
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).to(BF16)
    model = upcast_norms(lora(nf4(model, BF16), ["q_proj"]))
    return Broken(model, tiny_batch("llama"))


class GPTQLinear(nn.Module):
    """A weight-only 4-bit layer as AutoGPTQ and AutoAWQ keep it: int32 codes, half-precision scales, half output."""

    def __init__(self, layer: nn.Linear, group: int = 32) -> None:
        super().__init__()
        self.in_features, self.out_features, self.group = layer.in_features, layer.out_features, group
        grouped = layer.weight.data.float().unflatten(1, (-1, group))
        scales = grouped.abs().amax(-1, keepdim=True) / 7
        codes = (grouped / scales).round().clamp(-8, 7).int() + 8
        shifts = torch.arange(0, 32, 4, dtype=torch.int32)
        self.register_buffer(
            "qweight", (codes.flatten(1).unflatten(1, (-1, 8)) << shifts).sum(-1, dtype=torch.int32)
        )
        self.register_buffer("scales", scales.squeeze(-1).half())
        self.register_buffer("shifts", shifts)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        codes = ((self.qweight.unsqueeze(-1) >> self.shifts) & 15) - 8
        weight = codes.flatten(1).unflatten(1, (-1, self.group)) * self.scales.unsqueeze(-1)
        return hidden.half() @ weight.flatten(1).T


class GroupwiseLora(nn.Module):
    """QA-LoRA: the adapter sees the mean of each group of inputs; its product is added to the half output in place."""

    def __init__(self, base: GPTQLinear, pool: int = 4) -> None:
        super().__init__()
        self.base_layer, self.pool = base, pool
        self.lora_A = nn.Linear(base.in_features // pool, 4, False)
        self.lora_B = nn.Linear(4, base.out_features, False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        result = self.base_layer(hidden).flatten(0, 1)
        pooled = F.avg_pool1d(hidden, self.pool) * self.pool
        low = self.lora_A(pooled.to(self.lora_A.weight.dtype)).flatten(0, 1)
        return torch.addmm(result, low.half(), self.lora_B.weight.T).view(*hidden.shape[:-1], -1)


def qalora() -> Broken:
    """AutoGPTQ Llama-2 (int32 codes, float16 scales) with QA-LoRA in float32."""
    model = small_model("llama", FP16).requires_grad_(False)
    set_layers(model, ["q_proj", "v_proj"], lambda layer: GroupwiseLora(GPTQLinear(layer)))
    return Broken(model, tiny_batch("llama"))


def llama70b_int8() -> Broken:
    """Grouped-query Llama in int8 and float16, its layer norms upcast, LoRA, no autocast."""
    model = upcast_norms(lora(int8(small_model("llama", FP16)), ["q_proj", "v_proj"]))
    return Broken(model, tiny_batch("llama"))


class FusedLinearCrossEntropy(torch.autograd.Function):
    """Liger's loss: logits and gradients chunk by chunk; the head's gradient is summed by `addmm(out=)`."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        grad_weight, grad_hidden = torch.zeros_like(weight), torch.zeros_like(hidden)
        loss = torch.zeros((), dtype=torch.float32)
        for rows in torch.arange(len(hidden)).chunk(2):
            part = hidden[rows]
            logits = (part @ weight.T).float()
            loss = loss + F.cross_entropy(logits, target[rows], reduction="sum")
            slope = logits.softmax(-1) - F.one_hot(target[rows], logits.shape[-1])
            slope = slope.to(weight.dtype)
            grad_hidden[rows] = (slope @ weight).to(hidden.dtype)
            torch.addmm(grad_weight, slope.T, part, out=grad_weight)
        ctx.save_for_backward(grad_hidden, grad_weight)
        return loss / len(hidden)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad * grad_hidden / len(grad_hidden), grad * grad_weight / len(grad_hidden), None


class LigerHead(nn.Module):
    """A causal model through the fused loss."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.lm_head = model.model, model.lm_head

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden = self.model(input_ids=input_ids).last_hidden_state[:, :-1].flatten(0, 1)
        return FusedLinearCrossEntropy.apply(hidden, self.lm_head.weight, input_ids[:, 1:].flatten())


def awq_liger() -> Broken:
    """Qwen2.5-AWQ with LoRA under float16 autocast: the hidden states of float32 norms reach Liger's `addmm(out=)`."""
    model = tiny_qwen2(FP16).requires_grad_(False)
    set_layers(model, ["q_proj", "v_proj"], lambda layer: RawLora(GPTQLinear(layer), FP32))
    upcast_norms(model)
    return Broken(LigerHead(model), {"input_ids": ids()}, FP16)


class Resampler(nn.Module):
    """MiniCPM-V's resampler: learned queries attend to the image's patches."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Parameter(normal(IMAGE_TOKENS, HIDDEN))
        self.kv_proj, self.attn = nn.Linear(32, HIDDEN), nn.MultiheadAttention(HIDDEN, 4, batch_first=True)

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        keys = self.kv_proj(patches)
        return self.attn(self.query.expand(len(keys), -1, -1), keys, keys, need_weights=False)[0]


class MiniCPMV(nn.Module):
    """A resampler before a language model; features and words are joined without a cast."""

    def __init__(self, llm: Any) -> None:
        super().__init__()
        self.resampler, self.llm = Resampler(), llm

    def forward(self, patches: torch.Tensor, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        words = self.llm.get_input_embeddings()(input_ids)
        embeds = torch.cat([self.resampler(patches), words], 1)
        return self.llm(inputs_embeds=embeds, labels=F.pad(labels, (IMAGE_TOKENS, 0), value=-100))


def minicpm_v2() -> Broken:
    """A float16 language model with biases, vision features in float32."""
    torch.manual_seed(0)
    llm = lora(tiny_model("llama-tied-bias", FP16), ["q_proj", "v_proj"])
    batch = {"patches": normal(2, 16, 32), "input_ids": ids(), "labels": ids()}
    return Broken(MiniCPMV(llm), batch)


SCENARIOS: tuple[Scenario, ...] = (
    Scenario(
        "llamafactory-3991",
        deepseek_v2_lite,
        ("IST101",),
        r"norm",
        crashes=matmul_error(FP32, BF16),
        notes="Cause not in the report: upcast norms without autocast is what its arguments leave; ZeRO-3 not run.",
    ),
    Scenario(
        "qalora-10",
        qalora,
        ("IST102", "IST101"),
        r"lora_B",
        crashes=r"self and mat2 must have the same dtype, but got Half and Float",
        notes="Cause not in the report: half output, float32 adapters, the adapter's product added by `addmm`.",
    ),
    Scenario(
        "llamafactory-515",
        llama70b_int8,
        ("IST101",),
        r"norm",
        crashes=matmul_error(FP32, FP16),
        notes="Cause not in the report: LLaMA-Factory upcast layer norms for quantized models at that time.",
    ),
    Scenario(
        "ms-swift-2124",
        awq_liger,
        ("IST101", "IST105"),
        r"norm",
        crashes=r"self and mat2 must have the same dtype, but got Half and Float",
        notes="Cause not in the report; it used Liger, whose loss sums by `addmm(out=)`, which autocast does not touch.",
    ),
    Scenario(
        "minicpmv-234",
        minicpm_v2,
        ("IST101",),
        r"resampler|patches",
        crashes=r"mat1 and mat2 must have the same dtype, but got Float and Half",
        notes="Cause not in the report: a half language model behind a float32 resampler gives its very words.",
    ),
)

LEFT_OUT: dict[str, str] = {
    "transformers-30945": "names no cause, and the same set-up runs on torch 2.13: what torch.compile made of it in an "
    "older version is not to be had",
}

"""Norms that hand float32 to 16-bit layers, and forwards that run outside of the autocast they were trained under."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from tests.corpus.cases.crashes_parts import (
    BF16,
    FP16,
    FP32,
    cast_matching,
    lora,
    matmul_error,
    module_dtypes,
    nf4,
    normal,
    peft_module_casting_to_bf16,
    tiny_qwen2,
    upcast_norms,
)
from tests.corpus.scenario import Broken, Scenario
from tests.models import small_model, tiny_batch, tiny_model
from tests.reality import real_step

WITH_GENERATE = ("forward", "backward", "optimizer", "generate")


def generate(model: Any) -> Any:
    """Two tokens, greedily, as an evaluation callback does it."""
    return model.generate(
        input_ids=tiny_batch("llama")["input_ids"], max_new_tokens=2, do_sample=False, use_cache=True
    )


# --------------------------------------------------------------------------------------------- norm_fp32_promotion


class UnslothGemma3RMSNorm(nn.Module):
    """Gemma's norm with the patch for GPUs without bfloat16: what it returns is of its weight's dtype."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(norm.weight.data.float())
        self.eps = norm.eps

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        wide = hidden.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return normed.to(self.weight.dtype) * (1.0 + self.weight)


def gemma3_projector() -> Broken:
    model = tiny_model("gemma3-vision", FP16)
    projector = model.model.multi_modal_projector
    projector.mm_soft_emb_norm = UnslothGemma3RMSNorm(projector.mm_soft_emb_norm)
    batch = tiny_batch("gemma3-vision")
    return Broken(model, {**batch, "pixel_values": batch["pixel_values"].half()})


def llama_chat_qlora() -> Broken:
    """Llama-2-chat after TRL's SFT: nf4 with bfloat16 compute, norms float32, trained under autocast."""
    model = peft_module_casting_to_bf16(lora(nf4(small_model("llama", BF16), BF16)))
    return Broken(model, tiny_batch("llama"), BF16, phases=WITH_GENERATE, generate=generate)


def flash_llama() -> Broken:
    """PEFT's float32 norms before flash attention; nf4 layers hand back the dtype they are given, here float32."""
    model = upcast_norms(lora(nf4(small_model("llama", BF16), BF16), "all-linear"))
    model.base_model.model.lm_head.float()
    return Broken(model, tiny_batch("llama"), device="a100")


def attention_in_float32(broken: Broken) -> str | None:
    """Which dtype the queries really have."""
    with module_dtypes(broken.model, "q_proj") as calls:
        outcome = real_step(broken.model, broken.inputs, broken.autocast, phases=("forward",))
    assert outcome.error is None, outcome.error
    wide = sorted({name for name, _, out in calls if out == FP32})
    return f"{len(wide)} of {len(calls)} attentions get float32 queries" if wide else None


class NormedMLP(nn.Module):
    """Layers around torch's own `nn.RMSNorm`."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(128, 64)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.RMSNorm(64), nn.Linear(64, 64, bias=False)) for _ in range(2)
        )

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return hidden.float().square().mean()


def cuda_rms_norm() -> Broken:
    model = NormedMLP().to(BF16)
    return Broken(model, {"input_ids": tiny_batch("llama")["input_ids"]}, BF16, device="h100")


# ------------------------------------------------------------------------------- autocast_missing_eval_generate


def ppo_freeze() -> Broken:
    """Freeze-tuning of the last layer and the head in float32; the rollouts of PPO run outside of autocast."""
    model = tiny_qwen2(BF16).requires_grad_(False)
    for module in (model.model.layers[-1], model.lm_head):
        module.requires_grad_(True)
    cast_matching(model, FP32, "lm_head")
    return Broken(model, tiny_batch("llama"), BF16, phases=WITH_GENERATE, generate=generate)


class Denoiser(nn.Module):
    """A latent denoiser as small as it gets: convolutions around an attention projection."""

    def __init__(self) -> None:
        super().__init__()
        self.conv_in, self.conv_out = nn.Conv2d(4, 16, 3, padding=1), nn.Conv2d(16, 4, 3, padding=1)
        self.to_q = nn.Linear(16, 16)

    def forward(self, latents: torch.Tensor) -> torch.Tensor:
        hidden = F.silu(self.conv_in(latents))
        hidden = hidden + self.to_q(hidden.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return self.conv_out(hidden)


class LatentPipeline(nn.Module):
    """What validation builds: the denoiser that was trained, and the image decoder."""

    def __init__(self, unet: nn.Module, vae: nn.Module) -> None:
        super().__init__()
        self.unet, self.vae = unet, vae


def diffusers_validation() -> Broken:
    """accelerate's wrapper returns float32 from the model it prepared; validation reuses the wrapped model."""
    import peft
    from accelerate.utils import convert_outputs_to_fp32

    unet = Denoiser().to(BF16).requires_grad_(False)
    peft.inject_adapter_in_model(peft.LoraConfig(r=4, target_modules=["to_q"]), unet)
    with_autocast = torch.autocast("cpu", dtype=BF16)(unet.forward)
    unet.forward = convert_outputs_to_fp32(with_autocast)
    vae = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.SiLU(), nn.Conv2d(8, 3, 3, padding=1)).to(BF16)
    latents = normal(2, 4, 8, 8, dtype=BF16)

    def loss(pipeline: Any) -> torch.Tensor:
        return F.mse_loss(pipeline.unet(latents), latents.float())

    pipeline = LatentPipeline(unet, vae.requires_grad_(False))
    return Broken(
        pipeline,
        loss,
        phases=WITH_GENERATE,
        generate=lambda trained: trained.vae(trained.unet(latents)),
    )


def dpo_reference_pass() -> Broken:
    """DPO on a 4-bit PEFT model: the loss is computed under autocast, the reference log-probabilities are not."""
    model = peft_module_casting_to_bf16(lora(nf4(small_model("mistral", BF16), BF16)))
    batch = tiny_batch("mistral")

    def reference(policy: Any) -> torch.Tensor:
        with policy.disable_adapter():
            return policy(**batch).logits.float().log_softmax(-1)

    return Broken(model, batch, BF16, phases=WITH_GENERATE, generate=reference)


def on_policy_distillation() -> Broken:
    """A student with float32 norms, trained through accelerate's autocast, that generates once unwrapped."""
    model = upcast_norms(lora(small_model("qwen3", BF16), ["q_proj", "v_proj"]))
    return Broken(model, tiny_batch("qwen3"), BF16, phases=WITH_GENERATE, generate=generate)


SCENARIOS: tuple[Scenario, ...] = (
    Scenario(
        "unsloth-zoo-706",
        gemma3_projector,
        ("IST101",),
        r"multi_modal_projector\.mm_soft_emb_norm",
        crashes=matmul_error(FP32, FP16),
        notes="The patched norm is written here; the rest is transformers' Gemma 3 with its vision tower.",
    ),
    Scenario(
        "transformers-29974",
        llama_chat_qlora,
        ("IST108", "IST101"),
        r"norm",
        crashes=matmul_error(FP32, BF16),
        phase="generate",
    ),
    Scenario(
        "transformers-25598",
        flash_llama,
        ("IST604", "IST201"),
        r"norm",
        cost=attention_in_float32,
        notes="FlashAttention takes no float32, which an A100 shows; a CPU attends in float32 without a word.",
    ),
    Scenario(
        "pytorch-188955",
        cuda_rms_norm,
        ("IST201", "IST202"),
        r"rms_norm|autocast|layers\.0\.0",
        notes="CUDA's autocast runs rms_norm in float32 and returns it; a CPU's does not, so that nothing is seen here.",
    ),
    Scenario(
        "llamafactory-pr5480",
        ppo_freeze,
        ("IST108", "IST101"),
        r"lm_head",
        crashes=matmul_error(BF16, FP32),
        phase="generate",
    ),
    Scenario(
        "diffusers-10617",
        diffusers_validation,
        ("IST106", "IST108"),
        r"unet|cast|crashes_norms|operations",
        crashes=r"Input type \(float\) and bias type \(c10::BFloat16\) should be the same",
        phase="generate",
    ),
    Scenario(
        "trl-1203",
        dpo_reference_pass,
        ("IST108", "IST101"),
        r"norm",
        crashes=matmul_error(FP32, BF16),
        phase="generate",
    ),
    Scenario(
        "unsloth-3723",
        on_policy_distillation,
        ("IST108", "IST101"),
        r"norm",
        crashes=matmul_error(FP32, BF16),
        phase="generate",
        notes="The report does not state its cause; built from its set-up (accelerate, no_grad, unwrapped model).",
    ),
)

LEFT_OUT: dict[str, str] = {
    "alpaca-lora-313": "a helper whose name pattern matches no norm leaves 16-bit norm weights, which is the healthy "
    "default of every current model (norms compute in float32 and return the compute dtype): nothing fails or costs",
}

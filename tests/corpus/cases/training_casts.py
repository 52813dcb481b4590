"""Trainers that cast trainable parameters or train in another dtype than was asked; optimizers over mixed dtypes."""

from __future__ import annotations

import torch
from torch import nn

from isotype.precision.policy import PrecisionPolicy
from tests.corpus.cases.crashes_parts import (
    BF16,
    FP16,
    MLP,
    Attention,
    Block,
    Decoder,
    ids,
    lora,
    nf4,
    watch_step,
)
from tests.corpus.cases.training_parts import after_training, loaded, scaled_bfloat16, unmoved
from tests.corpus.scenario import Broken, Scenario
from tests.models import tiny_batch


def trl_cast(model: nn.Module) -> nn.Module:
    """TRL's cast of a quantized model's trainable parameters, whatever `fp16` says."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(torch.bfloat16)
    return model


def fp16_asked_bf16_given() -> Broken:
    """`SFTConfig(fp16=True)` on a T4: nf4, compute dtype float16, and TRL's bfloat16 adapters."""
    model = trl_cast(lora(nf4(loaded("llama", FP16), FP16)))
    return Broken(model, tiny_batch("llama"), FP16, scaler=True, device="t4")


def dpo_adapters_in_bf16() -> Broken:
    """DPO at its default learning rate under bfloat16 AMP, adapters cast to bfloat16; the policy: float32 masters."""
    model = trl_cast(after_training(lora(nf4(loaded("llama", BF16), BF16))))
    policy = PrecisionPolicy(compute=BF16, storage="nf4")
    return Broken(model, tiny_batch("llama"), BF16, learning_rate=1e-6, policy=policy)


def bf16_asked_fp16_given() -> Broken:
    """text-generation-webui with --bf16: `fp16=True` is hard-coded in its trainer."""
    policy = PrecisionPolicy(compute=BF16, storage="bfloat16")
    model = lora(loaded("llama", BF16), ["q_proj", "v_proj"])
    return Broken(model, tiny_batch("llama"), FP16, scaler=True, policy=policy)


def bf16_as_asked() -> Broken:
    """The same with `--bf16` passed on."""
    broken = bf16_asked_fp16_given()
    broken.autocast, broken.scaler = BF16, False
    return broken


def other_matmuls(broken: Broken) -> str | None:
    """Matmuls that do not run in the policy's compute dtype."""
    matmuls = [seen for seen in watch_step(broken) if seen.op.split(".")[1] in ("mm", "addmm", "bmm")]
    assert matmuls
    other = [seen for seen in matmuls if seen.result != broken.policy.compute]
    return f"{len(other)} of {len(matmuls)} matmuls do not run in the dtype asked for" if other else None


def low_gradients(model: nn.Module) -> nn.Module:
    """float32 parameters whose gradients are kept in bfloat16, as FSDP's mixed precision leaves them."""
    for parameter in model.parameters():
        parameter.grad_dtype = BF16  # type: ignore[attr-defined]
    return model


def fused_adam_after_fsdp() -> Broken:
    """float32 parameters with bfloat16 gradients, and a fused Adam."""
    torch.manual_seed(0)
    model = low_gradients(Decoder([Block(Attention(), MLP())]))
    return Broken(model, lambda module: module(ids()), optimizer="adamw_fused")


def lightning_fused_adam() -> Broken:
    """Lightning with fused AdamW: a tiny GPT-2 whose gradients are reduced in bfloat16."""
    return Broken(low_gradients(loaded("gpt2")), tiny_batch("gpt2"), BF16, optimizer="adamw_fused")


SCENARIOS: tuple[Scenario, ...] = (
    Scenario(
        "unsloth-4005-bug2",
        fp16_asked_bf16_given,
        ("IST302", "IST304"),
        "lora_A",
        cost=scaled_bfloat16,
        notes="TRL's cast is written out: it is one line. The crash itself is CUDA's.",
    ),
    Scenario(
        "trl-1644",
        dpo_adapters_in_bf16,
        ("IST304", "IST801"),
        "lora_",
        cost=unmoved("lora_"),
    ),
    Scenario(
        "textgen-3460",
        bf16_asked_fp16_given,
        ("IST306",),
        "autocast|float16",
        cost=other_matmuls,
        advice=bf16_as_asked,
    ),
    Scenario(
        "te-3358",
        fused_adam_after_fsdp,
        ("IST305",),
        "embed_tokens|grad",
        crashes=r"expected scalar type Float but found BFloat16",
        phase="optimizer",
        notes="TransformerEngine's FusedAdam needs CUDA; torch's own fused AdamW has the same demand.",
    ),
    Scenario(
        "pytorch-110758",
        lightning_fused_adam,
        ("IST305",),
        "wte|grad",
        crashes=r"expected scalar type Float but found BFloat16",
        phase="optimizer",
        notes="The report names no cause; of params, grads and state it is the gradients that AMP hooks make differ.",
    ),
)

LEFT_OUT: dict[str, str] = {
    "trl-3598": "two arguments exclude each other: TrainingArguments raises before there is a model, and isotype's own "
    "settings name the conflict",
}

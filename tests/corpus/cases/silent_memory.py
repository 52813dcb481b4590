"""Upcasts that nobody asked for: embeddings, heads, logits and outputs in float32."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.corpus.cases.crashes_parts import (
    BF16,
    FP16,
    FP32,
    Seen,
    cast_matching,
    lora,
    module_dtypes,
    nf4,
    watch_step,
)
from tests.corpus.cases.training_parts import loaded
from tests.corpus.scenario import Broken, Scenario
from tests.models import tiny_batch
from tests.reality import real_step


def prepared(name: str, dtype: torch.dtype, compute: torch.dtype = BF16) -> Broken:
    """QLoRA after `prepare_model_for_kbit_training`, which makes every parameter float32 that is not packed."""
    import peft

    model: Any = nf4(loaded(name, dtype), compute)
    model.is_loaded_in_4bit = True
    model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    return Broken(lora(model), tiny_batch(name), compute)


def frozen_float32(broken: Broken) -> str | None:
    """Bytes that frozen float32 weights of embeddings, head and norms take over the compute dtype."""
    compute = broken.autocast or BF16
    wide = [p for p in broken.model.parameters() if p.dtype == FP32 and not p.requires_grad]
    extra = sum(p.numel() * (p.itemsize - compute.itemsize) for p in wide)
    return f"{len(wide)} frozen weights take {extra} bytes more than in {compute}" if extra else None


def embeddings_in_float32(broken: Broken) -> str | None:
    """Bytes that embeddings and head take over the compute dtype."""
    wide = {
        name: p
        for name, p in broken.model.named_parameters()
        if p.dtype == FP32 and ("embed_tokens" in name or "lm_head" in name) and "lora" not in name
    }
    extra = sum(p.numel() * 2 for p in wide.values())
    return f"{', '.join(wide)}: {extra} bytes more than in bfloat16" if extra else None


def continued_pretraining() -> Broken:
    """Continued pretraining: embedding and head are trained beside LoRA, and upcast to float32 as Unsloth did."""
    model = nf4(loaded("mistral", BF16), BF16)
    model = lora(model, ["q_proj", "v_proj", "gate_proj"], autocast_adapter_dtype=True)
    cast_matching(model, FP32, "embed_tokens", "lm_head")
    for name, parameter in model.named_parameters():
        if "embed_tokens" in name or "lm_head" in name:
            parameter.requires_grad_(True)
    return Broken(model, tiny_batch("mistral"), BF16)


def hidden_states_float32(broken: Broken) -> str | None:
    """The dtype of the last hidden state, which the settings of a QLoRA run decide between them."""
    inputs = {key: value for key, value in broken.inputs.items() if key != "labels"}  # type: ignore[union-attr]
    with torch.no_grad():
        hidden = copy.deepcopy(broken.model)(**inputs, output_hidden_states=True).hidden_states[-1]
    return f"hidden states are {hidden.dtype}" if hidden.dtype == FP32 else None


def float32_checkpoint() -> Broken:
    """QLoRA of a float32 checkpoint: float16 outside the packed layers, then all of it float32 by the preparation."""
    broken = prepared("llama", FP16, FP16)
    broken.autocast, broken.scaler = None, False
    return broken


class Float32Output(nn.Module):
    """Megatron's `Float16Module` with `fp32_output=True`: all logits are cast to float32 as they leave the model."""

    def __init__(self, module: nn.Module, output: torch.dtype | None = FP32) -> None:
        super().__init__()
        self.module, self.output = module, output

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        logits = self.module(input_ids=input_ids).logits
        return logits if self.output is None else logits.to(self.output)


def rl_logprobs(output: torch.dtype | None) -> Broken:
    """Log-probabilities for RL, computed in chunks of rows from the wrapped model's logits."""
    model = Float32Output(lora(loaded("qwen3", BF16), autocast_adapter_dtype=True), output)
    ids = tiny_batch("qwen3")["input_ids"]

    def loss(wrapped: nn.Module) -> torch.Tensor:
        rows = wrapped(ids).flatten(0, 1).split(4)
        targets = ids.flatten().split(4)
        return torch.stack(
            [
                -row.float().log_softmax(-1).gather(-1, t[:, None]).mean()
                for row, t in zip(rows, targets, strict=True)
            ]
        ).mean()

    return Broken(model, loss)


def all_logits_float32(broken: Broken) -> str | None:
    """Bytes of the largest cast to float32."""
    rows = 2 * 16
    casts = [seen for seen in upcasts(broken) if seen.bytes >= rows * 128 * 4]
    return f"all logits at once in float32: {casts[0].bytes} bytes" if casts else None


def upcasts(broken: Broken) -> list[Seen]:
    """The casts to float32 of a real step."""
    copied = copy.copy(broken)
    copied.model = copy.deepcopy(broken.model)
    return [seen for seen in watch_step(copied) if "_to_copy" in seen.op and seen.result == FP32]


def accelerated(mixed: torch.dtype) -> Broken:
    """A model as `Accelerator.prepare` leaves it: its forward converts every output to float32."""
    from accelerate.utils import convert_outputs_to_fp32

    model = lora(loaded("llama", mixed), ["q_proj", "v_proj"])
    model.forward = types.MethodType(convert_outputs_to_fp32(model.forward.__func__), model)
    return Broken(model, tiny_batch("llama"), mixed, scaler=mixed == FP16)


def float32_outputs(broken: Broken) -> str | None:
    """Bytes of the float32 outputs that the model itself makes in the autocast dtype."""
    with torch.no_grad(), torch.autocast("cpu", dtype=broken.autocast):
        out = broken.model(**broken.inputs, output_hidden_states=True)  # type: ignore[arg-type]
    wide = [value for value in (out.logits, *out.hidden_states) if value.dtype == FP32]
    extra = sum(value.numel() * 2 for value in wide)
    return f"{len(wide)} outputs are float32: {extra} bytes more" if wide else None


def accelerated_plain(mixed: torch.dtype) -> Callable[[], Broken]:
    """The same without accelerate's wrapper (`unwrap_model(model, keep_fp32_wrapper=False)`)."""
    return lambda: Broken(
        lora(loaded("llama", mixed), ["q_proj", "v_proj"]),
        tiny_batch("llama"),
        mixed,
        scaler=mixed == FP16,
    )


def float32_adapters_under_autocast(casting: bool = True) -> Broken:
    """Qwen2.5 with float32 adapters under bfloat16 autocast: PEFT casts every adapter's input to float32."""
    model = lora(loaded("qwen3", BF16), lora_dropout=0.1).train()
    for module in model.modules():
        if hasattr(module, "cast_input_dtype_enabled"):
            module.cast_input_dtype_enabled = casting
    return Broken(model, tiny_batch("qwen3"), BF16)


def input_casts(broken: Broken) -> str | None:
    """Adapter inputs that are cast to float32 and back."""
    with module_dtypes(broken.model, "lora_A.default") as calls:
        outcome = real_step(broken.model, broken.inputs, broken.autocast, phases=("forward",))
    assert outcome.error is None, outcome.error
    undone = [name for name, given, returned in calls if (given, returned) == (FP32, BF16)]
    return f"{len(undone)} of {len(calls)} PEFT casts adapter inputs to float32 and back" if undone else None


SCENARIOS: tuple[Scenario, ...] = (
    Scenario(
        "peft-3265",
        lambda: prepared("mistral", BF16),
        ("IST203",),
        "embed_tokens|lm_head|norm",
        cost=frozen_float32,
    ),
    Scenario(
        "bnb-1569",
        lambda: prepared("mistral", BF16),
        ("IST203",),
        "embed_tokens|lm_head|norm",
        cost=frozen_float32,
    ),
    Scenario(
        "axolotl-2621",
        lambda: prepared("llama", BF16),
        ("IST203",),
        "embed_tokens|lm_head",
        cost=embeddings_in_float32,
    ),
    Scenario(
        "bnb-1515",
        float32_checkpoint,
        ("IST203", "IST201", "IST204"),
        "embed_tokens|lm_head|norm",
        cost=hidden_states_float32,
    ),
    Scenario(
        "unsloth-1186",
        continued_pretraining,
        ("IST203", "IST201", "IST204"),
        "embed_tokens|lm_head",
        cost=embeddings_in_float32,
        notes="Both are trained: float32 masters are isotype's own default, so that the finding can only be a note.",
    ),
    Scenario(
        "miles-2764",
        lambda: rl_logprobs(FP32),
        ("IST204", "IST201"),
        "silent_memory|module|float32",
        cost=all_logits_float32,
        advice=lambda: rl_logprobs(None),
        notes="Megatron's wrapper is written out.",
    ),
    Scenario(
        "accelerate-3620",
        lambda: accelerated(FP16),
        ("IST204", "IST201"),
        "accelerate|operations",
        cost=float32_outputs,
        advice=accelerated_plain(FP16),
    ),
    Scenario(
        "accelerate-3477",
        lambda: accelerated(BF16),
        ("IST204", "IST201"),
        "accelerate|operations",
        cost=float32_outputs,
        advice=accelerated_plain(BF16),
    ),
    Scenario(
        "agilerl-623",
        float32_adapters_under_autocast,
        ("IST202", "IST204", "IST201"),
        "lora_A",
        cost=input_casts,
        advice=lambda: float32_adapters_under_autocast(False),
        notes="The peak of memory that the report measured is CUDA's; the casts themselves are the same on a CPU.",
    ),
)

LEFT_OUT: dict[str, str] = {
    "vllm-14827": "vLLM's own kernels refuse float32 LoRA: nothing of the training step is involved",
    "vllm-ascend-3668": "a serving plugin for Ascend whose LoRA kernels return the base's output in bfloat16",
    "openrlhf-1348": "an assertion of vLLM when weights are sent to it; no operator of the training step sees two dtypes",
    "trtllm-2434": "TensorRT-LLM compares the dtypes of two files when it loads them",
}

"""Adapters in another dtype than the layers they adapt: PEFT's, the adapters library's, diffusers' and older PEFT's."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from isotype.precision.policy import PrecisionPolicy
from tests.corpus.cases.crashes_parts import (
    BF16,
    FP16,
    FP32,
    RawLora,
    int8,
    linear_4bit,
    lora,
    matmul_error,
    module_dtypes,
    nf4,
    normal,
    set_layers,
    upcast_norms,
)
from tests.corpus.scenario import Broken, Scenario
from tests.models import HIDDEN, small_model, tiny_batch, tiny_config, tiny_model
from tests.reality import real_step

# --------------------------------------------------------------------------------------------- adapter_vs_base_dtype


def peft_under_autocast() -> Broken:
    """PEFT's float32 adapters on an nf4 base: each input is cast up for `lora_A`, and down again by autocast."""
    return Broken(lora(nf4(small_model("llama", BF16), BF16)), tiny_batch("llama"), BF16, device="a100")


def casts_for_nothing(broken: Broken) -> str | None:
    """How many adapters are given float32 that autocast takes back."""
    with module_dtypes(broken.model, "lora_A.default") as calls:
        outcome = real_step(broken.model, broken.inputs, broken.autocast, phases=("forward",))
    assert outcome.error is None, outcome.error
    undone = [name for name, given, returned in calls if given != returned]
    return f"{len(undone)} lora_A inputs are cast to float32 and back" if undone else None


def opt_int8_inference() -> Broken:
    """OPT-350M in int8 with LoRA as PEFT was before it cast a layer's input to the adapter's dtype."""
    import transformers

    config = tiny_config("OPTConfig", ffn_dim=96, word_embed_proj_dim=32, do_layer_norm_before=False)
    torch.manual_seed(0)
    base = int8(transformers.OPTForCausalLM(config).half(), ("lm_head", "project"))
    model = lora(base, ["q_proj", "v_proj"])
    for module in model.modules():
        if hasattr(module, "cast_input_dtype_enabled"):
            module.cast_input_dtype_enabled = False
    return Broken(model.eval(), tiny_batch("opt"), phases=("forward",))


class LoReft(nn.Module):
    """A module whose output an intervention edits in a low-rank subspace: `h + (W h + b - R h) R^T`."""

    def __init__(self, wrapped: nn.Module, rank: int = 4) -> None:
        super().__init__()
        self.wrapped = wrapped
        self.learned_source = nn.Linear(HIDDEN, rank)
        self.projection = nn.Linear(HIDDEN, rank, bias=False)

    def forward(self, *args: Any) -> torch.Tensor:
        hidden = self.wrapped(*args)
        rotated = self.projection(hidden)
        return hidden + (self.learned_source(hidden) - rotated) @ self.projection.weight


def reft_on_half_base() -> Broken:
    """A ReFT adapter of the adapters library: its tensors are made in the default dtype, whatever the model's is."""
    import transformers

    config = tiny_config("RobertaConfig")
    torch.manual_seed(0)
    model = transformers.RobertaForSequenceClassification(config).half().requires_grad_(False)
    for layer in model.roberta.encoder.layer:
        layer.output = LoReft(layer.output)
    batch = tiny_batch("roberta")
    return Broken(model, {**batch, "labels": torch.tensor([0, 1])})


class FluxBlock(nn.Module):
    """The entrance of a Flux transformer and one layer, each quantized."""

    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        self.x_embedder = nn.Linear(channels, HIDDEN)
        self.to_q, self.proj_out = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, channels)

    def forward(self, latents: torch.Tensor) -> torch.Tensor:
        hidden = self.x_embedder(latents)
        return self.proj_out(F.gelu(hidden + self.to_q(hidden)))


def flux_control_lora() -> Broken:
    """A control LoRA doubles the input channels: the 4-bit entrance is dequantized, in its state's dtype, and widened."""
    import bitsandbytes

    torch.manual_seed(0)
    model = FluxBlock().to(BF16)
    model.to_q = linear_4bit(model.to_q, BF16)
    stored = linear_4bit(model.x_embedder, BF16, state=FP16)
    dense = bitsandbytes.functional.dequantize_4bit(stored.weight.data, stored.weight.quant_state)
    wider = nn.Linear(32, HIDDEN, dtype=dense.dtype)
    wider.weight.data = torch.cat([dense, torch.zeros_like(dense)], 1)
    model.x_embedder = wider
    model.requires_grad_(False)
    set_layers(model, ["to_q", "proj_out"], lambda layer: RawLora(layer, BF16))
    return Broken(model, {"latents": normal(2, 16, 32, dtype=BF16)})


def float32_adapters() -> Broken:
    """LoRA on bfloat16 with bfloat16 adapters asked for, which PEFT's default makes float32 without a word."""
    policy = PrecisionPolicy(compute=BF16, storage="bfloat16", master=BF16, reduce=BF16)
    return Broken(lora(small_model("llama", BF16)), tiny_batch("llama"), policy=policy)


def adapter_bytes(broken: Broken) -> str | None:
    """What the adapters hold over what they were meant to."""
    adapters = [p for p in broken.model.parameters() if p.requires_grad]
    held = sum(p.numel() * p.itemsize for p in adapters)
    meant = sum(p.numel() * broken.policy.master.itemsize for p in adapters)
    return f"adapters hold {held} bytes, not {meant}" if held != meant else None


# ------------------------------------------------------------------------- modules_to_save_dtype, deepspeed_mixed_dtype


def modules_to_save_of_int8() -> Broken:
    """LLaMA in int8 with new tokens: the trained copies of embedding and head keep the base's float16."""
    model = lora(
        int8(small_model("llama", FP16)), ["q_proj", "v_proj"], modules_to_save=["embed_tokens", "lm_head"]
    )
    return Broken(model, tiny_batch("llama"), FP16, scaler=True)


def int8_lora_of_old_peft(name: str, adapters: torch.dtype = BF16) -> nn.Module:
    """int8 layers with PEFT 0.4's LoRA: without autocast the adapter's input is made float32, whatever it meets."""
    model = int8(tiny_model(name, BF16))

    def upcast(hidden: torch.Tensor) -> torch.Tensor:
        return hidden if torch.is_autocast_enabled("cpu") else hidden.float()

    return set_layers(model, ["q_proj", "v_proj"], lambda layer: RawLora(layer, adapters, upcast))


def deepspeed_int8_lora() -> Broken:
    """DeepSpeed casts the trained parameters to bfloat16 and runs without autocast."""
    return Broken(int8_lora_of_old_peft("llama"), tiny_batch("llama"))


def llava_int8_lora() -> Broken:
    """LLaVA's script casts every LoRA layer to bfloat16, and its norms to float32, before DeepSpeed runs it."""
    return Broken(upcast_norms(int8_lora_of_old_peft("llama")), tiny_batch("llama"))


SCENARIOS: tuple[Scenario, ...] = (
    Scenario(
        "peft-1172",
        peft_under_autocast,
        ("IST202",),
        r"lora_A",
        cost=casts_for_nothing,
    ),
    Scenario(
        "peft-101",
        opt_int8_inference,
        ("IST102",),
        r"lora_A",
        crashes=matmul_error(FP16, FP32),
        notes="Today's PEFT casts the input; its switch for that cast is off here, which is how it was in the report.",
    ),
    Scenario(
        "adapters-766",
        reft_on_half_base,
        ("IST102", "IST101"),
        r"projection|learned_source",
        crashes=matmul_error(FP16, FP32),
    ),
    Scenario(
        "diffusers-11270",
        flux_control_lora,
        ("IST101", "IST401", "IST102"),
        r"x_embedder",
        crashes=r"mat1 and mat2 must have the same dtype, but got BFloat16 and Half",
        notes="diffusers is not needed: its widening of the quantized entrance is three lines.",
    ),
    Scenario(
        "axolotl-3310",
        float32_adapters,
        ("IST304",),
        r"lora_",
        cost=adapter_bytes,
        notes="Silent only against a policy that asks for bfloat16 masters; isotype's own default is float32.",
    ),
    Scenario(
        "peft-341",
        modules_to_save_of_int8,
        ("IST301",),
        r"modules_to_save|embed_tokens|lm_head",
        crashes=r"Attempting to unscale FP16 gradients",
        phase="unscale",
    ),
    Scenario(
        "peft-874",
        deepspeed_int8_lora,
        ("IST102", "IST101"),
        r"lora_A|crashes_adapters\.py",
        crashes=matmul_error(FP32, BF16),
        notes="The step of one rank; ZeRO-2 adds nothing to the dtypes of a forward.",
    ),
    Scenario(
        "llava-785",
        llava_int8_lora,
        ("IST102", "IST101"),
        r"lora_A|norm|crashes_adapters\.py",
        crashes=matmul_error(FP32, BF16),
        notes="The reporter did not know why inputs turn float32: PEFT of that time did it without autocast.",
    ),
)

LEFT_OUT: dict[str, str] = {
    "deepspeed-8072": "the crash needs processes of DeepSpeed 0.19.2; IST704 finds its set-up (tests/rules/test_ist704.py)",
    "llava-949": "the same gather on 8 V100s; the report gives no cause",
}

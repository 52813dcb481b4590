from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from torch import nn

from isotype.records.finding import Finding
from tests.rules.traces import BF16, FP32, batch, cast, found, llama, of_llama, traced, verified

RULE = "ist203_upcast_parts"
PARTS = ("embed_tokens", "lm_head", "norm")


def test_embedding_head_and_norms_upcast() -> None:
    model = cast(llama(), FP32, PARTS)
    (finding,) = verified(model, batch(), "IST203", autocast=BF16)
    assert finding.severity == "warning"
    assert finding.message == "5 frozen weights are float32 in a bfloat16 model: 32.4 KiB more memory"
    assert finding.cause == "base_model.model.model.embed_tokens.weight is float32"
    assert finding.cost is not None
    assert finding.cost.memory_bytes == 2 * (2 * 128 * 64 + 3 * 64)
    first = finding.fixes[0]
    assert (first.description, first.safety, first.verified) == ("cast them to bfloat16", "safe", True)
    # The projections are bfloat16: prepare_model_for_kbit_training was not called.
    assert finding.fixes[1].description == "call isotype.enforce(model, policy)"


def test_values_that_bfloat16_does_not_hold_make_it_unsafe() -> None:
    model = cast(llama(), FP32, PARTS)
    with torch.no_grad():
        model.get_input_embeddings().weight[3, 3] = 1.0 + 2.0**-20
    (finding,) = found(RULE, traced(model, batch(), autocast=BF16))
    assert finding.fixes[0].safety == "unsafe"
    assert finding.notes[-1] == "a cast to bfloat16 may round some of their values"


def test_trained_embeddings_are_a_note() -> None:
    model = cast(llama(), FP32, ("embed_tokens", "lm_head"))
    for name, parameter in model.named_parameters():
        if "embed_tokens" in name or "lm_head" in name:
            parameter.requires_grad_(True)
    (finding,) = found(RULE, traced(model, batch(), autocast=BF16))
    assert finding.severity == "note"
    assert finding.message == "2 trained weights are float32 in a bfloat16 model: 32.0 KiB more memory"
    assert finding.notes == ("small updates need float32; weights that are not trained could be bfloat16",)


def test_adapters_of_the_users_own_code_are_masters() -> None:
    class Layer(nn.Linear):
        def __init__(self) -> None:
            super().__init__(8, 8, bias=False, dtype=BF16)
            self.weight.requires_grad_(False)
            self.lora_A, self.lora_B = nn.Linear(8, 4, bias=False), nn.Linear(4, 8, bias=False)

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return super().forward(hidden) + self.lora_B(self.lora_A(hidden.float())).to(hidden.dtype)

    assert found(RULE, traced(Layer(), {"hidden": torch.ones(2, 8, dtype=BF16)})) == []


def test_one_dtype_throughout() -> None:
    for dtype in (BF16, FP32):
        assert found(RULE, of_llama(dtype)) == []


def test_norms_alone_are_too_small() -> None:
    assert found(RULE, traced(cast(llama(), FP32, ("norm",)), batch(), autocast=BF16)) == []


def of_experts(path: Path, width: int, **options: Any) -> list[Finding]:
    """Findings about a mixture of experts of `width` that transformers has loaded with bitsandbytes."""
    config = transformers.OlmoeConfig(
        vocab_size=64, hidden_size=16, intermediate_size=width, num_hidden_layers=2, num_attention_heads=1,
        num_key_value_heads=1, num_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    transformers.OlmoeForCausalLM(config).to(BF16).save_pretrained(path)
    quantization = transformers.BitsAndBytesConfig(**options)
    base = transformers.AutoModelForCausalLM.from_pretrained(path, quantization_config=quantization)
    model = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    return found(RULE, traced(model, {"input_ids": torch.ones(1, 4, dtype=torch.int64)}, autocast=BF16))


def test_experts_that_a_quantizer_of_transformers_leaves_in_16_bits(tmp_path: Path) -> None:
    """bitsandbytes-foundation/bitsandbytes #1849."""
    (finding,) = of_experts(tmp_path, 64, load_in_8bit=True)
    values = 2 * 4 * 3 * 64 * 16
    assert finding.message == (
        f"4 stacked expert weights are bfloat16 in a model that is quantized to int8: {values / 1024:.1f} KiB more memory"
    )
    assert (finding.severity, finding.phase) == ("warning", "load")
    assert finding.cost is not None
    assert finding.cost.memory_bytes == values
    assert finding.fixes[0].description == "load the model with isotype.load"


def test_experts_that_no_format_can_store_are_a_note(tmp_path: Path) -> None:
    (finding,) = of_experts(tmp_path, 33, load_in_4bit=True, bnb_4bit_quant_type="nf4")
    assert (finding.severity, finding.fixes) == ("note", ())
    assert finding.message.startswith(
        "4 stacked expert weights are bfloat16 in a model that is quantized to nf4"
    )
    assert finding.cause.startswith(
        "an expert has 1,056 values, which is not a multiple of the block size 64; an"
    )

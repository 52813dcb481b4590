"""Values that leave float16's range: what overflows, what turns to NaN, what sampling then refuses."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from isotype.precision.policy import PrecisionPolicy
from tests.corpus.cases.crashes_parts import BF16, FP16, FP32, ids, lora
from tests.corpus.cases.training_parts import loaded, nan_after
from tests.corpus.scenario import Broken, Scenario
from tests.models import tiny_batch, tiny_model


def outliers(model: nn.Module, part: str, size: float, every: int = 16) -> nn.Module:
    """Give every `every`-th value of the weights named `part` the size that trained models have in a few channels."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if part in name:
                parameter.view(-1)[::every] = size
    return model


def gemma_in_half() -> Broken:
    """Gemma trained in pure float16 with Adam, whose epsilon of 1e-8 is zero in float16."""
    return Broken(loaded("gemma2", FP16), tiny_batch("gemma2"), learning_rate=1e-4)


def gemma3_in_half() -> Broken:
    """Gemma 3 in float16: gains of its post-norms carry the residual stream past 65504."""
    model = outliers(loaded("gemma3", FP32), "post_feedforward_layernorm", 3e4)
    return Broken(lora(model.to(FP16)), tiny_batch("gemma3"), FP16, scaler=True)


def gemma3_in_bfloat16() -> Broken:
    """The same in bfloat16."""
    model = outliers(loaded("gemma3", FP32), "post_feedforward_layernorm", 3e4)
    return Broken(lora(model.to(BF16)), tiny_batch("gemma3"), BF16)


def t5_in_half(kept: bool = False) -> Broken:
    """T5 after `.half()`: its `wo`, which the authors pin to float32, is rounded too and its products overflow."""
    model: Any = outliers(loaded("t5", FP32), "wo.weight", 3e3, every=7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".wi_" in name:
                parameter.mul_(20)
    whole = {name: p.data for name, p in model.named_parameters() if name.endswith("wo.weight")}
    model.half()
    for name, parameter in model.named_parameters():
        if kept and name in whole:
            parameter.data = whole[name]
    return Broken(lora(model, ["q", "v"], task_type="SEQ_2_SEQ_LM"), tiny_batch("t5"))


def longlora_sampling() -> Broken:
    """LongLoRA's inference in float16: a final norm whose gain overflows, then sampling from the probabilities."""
    model = outliers(tiny_model("llama"), "model.norm", 6e4)
    batch = tiny_batch("llama")
    return Broken(lora(model.to(FP16), ["q_proj", "v_proj"]), batch, phases=("forward",), generate=sample)


def longlora_in_bfloat16() -> Broken:
    """The same, loaded with `torch_dtype=bfloat16`."""
    model = outliers(tiny_model("llama"), "model.norm", 6e4)
    batch = tiny_batch("llama")
    return Broken(lora(model.to(BF16), ["q_proj", "v_proj"]), batch, phases=("forward",), generate=sample)


def sample(model: nn.Module) -> torch.Tensor:
    """One sampled token a row."""
    return torch.multinomial(model(input_ids=ids()).logits[:, -1].softmax(-1), 1)


def not_finite(broken: Broken) -> str | None:
    """Logits of the real forward that are not finite."""
    inputs = {key: value for key, value in broken.inputs.items() if key != "labels"}  # type: ignore[union-attr]
    if "T5" in type(broken.model.get_base_model()).__name__:  # type: ignore[operator]
        inputs["decoder_input_ids"] = inputs["input_ids"]
    with torch.no_grad(), torch.autocast("cpu", dtype=broken.autocast, enabled=broken.autocast is not None):
        logits = broken.model(**inputs).logits
    bad = int((~logits.isfinite()).sum())
    return f"{bad} of {logits.numel()} logits are not finite" if bad else None


def metaseq_requeued() -> Broken:
    """A bfloat16 checkpoint that was float16 for a moment while it was loaded: what float16 cannot hold is lost."""
    model = outliers(loaded("gpt2", BF16), "mlp.c_proj.weight", 9e4, every=1000)
    return Broken(lora(model.to(FP16).to(BF16), ["c_attn"], fan_in_fan_out=True), tiny_batch("gpt2"))


def metaseq_kept() -> Broken:
    """The same, loaded in its own dtype."""
    model = outliers(loaded("gpt2", BF16), "mlp.c_proj.weight", 9e4, every=1000)
    return Broken(lora(model, ["c_attn"], fan_in_fan_out=True), tiny_batch("gpt2"))


def merged_to_half() -> Broken:
    """A merge that casts to float16 whatever the model was trained in: the merged model."""
    policy = PrecisionPolicy(compute=BF16, storage="bfloat16", trainable="full")
    return Broken(_merged().to(FP16), tiny_batch("llama"), phases=("forward",), policy=policy)


def merged_in_training_dtype() -> Broken:
    """The same merge, kept in bfloat16."""
    policy = PrecisionPolicy(compute=BF16, storage="bfloat16", trainable="full")
    return Broken(_merged(), tiny_batch("llama"), phases=("forward",), policy=policy)


def _merged() -> nn.Module:
    model = outliers(loaded("llama", BF16), "down_proj", 1e5, every=3000)
    return lora(model, ["q_proj", "v_proj"]).merge_and_unload()


def infinite_weights(broken: Broken) -> str | None:
    """Weights that are not finite."""
    bad = sum(int((~p.isfinite()).sum()) for p in broken.model.parameters() if p.is_floating_point())
    return f"{bad} weights are infinite" if bad else None


SCENARIOS: tuple[Scenario, ...] = (
    Scenario(
        "gemma-pytorch-24",
        gemma_in_half,
        ("IST303", "IST802"),
        r"float16|embed_tokens",
        cost=nan_after,
        notes="The report gives no dtype but its cure, float32 weights; pure float16 training shows its symptom.",
    ),
    Scenario(
        "transformers-39972",
        gemma3_in_half,
        ("IST802",),
        r"post_feedforward_layernorm",
        cost=not_finite,
        advice=gemma3_in_bfloat16,
        notes="A tiny random model has no outliers of its own: a few gains are set to what makes the report's overflow.",
    ),
    Scenario(
        "transformers-5651",
        t5_in_half,
        ("IST804", "IST802"),
        r"\.wo",
        cost=not_finite,
        advice=lambda: t5_in_half(True),
        notes="Scaled weights stand for T5's own; the 66246 of the report needs the trained ones.",
    ),
    Scenario(
        "longlora-165",
        longlora_sampling,
        ("IST802",),
        r"norm",
        crashes=r"probability tensor contains either `inf`, `nan` or element < 0",
        phase="generate",
        advice=longlora_in_bfloat16,
    ),
    Scenario(
        "metaseq-254",
        metaseq_requeued,
        ("IST802", "IST501"),
        r"mlp\.c_proj",
        cost=infinite_weights,
        advice=metaseq_kept,
    ),
    Scenario(
        "axolotl-902",
        merged_to_half,
        ("IST802", "IST501", "IST502"),
        r"down_proj",
        cost=infinite_weights,
        advice=merged_in_training_dtype,
    ),
)

LEFT_OUT: dict[str, str] = {
    "unsloth-4875": "the run diverges after 28 steps of trained weights in Unsloth's forced float32 path, which needs a GPU; "
    "the report knows no dtype that explains it",
}

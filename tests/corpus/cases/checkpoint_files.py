"""Adapters and merged weights in files: dtypes that do not survive saving, loading and merging."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from isotype.precision.policy import PrecisionPolicy
from tests.corpus.cases.crashes_parts import BF16, FP16, FP32, lora, nf4
from tests.corpus.cases.training_parts import after_training, loaded, trained
from tests.corpus.scenario import Broken, Scenario
from tests.models import quiet, tiny_batch


def reloaded(autocast_adapter_dtype: bool = True) -> Broken:
    """An adapter trained and saved in bfloat16, loaded again for more training: PEFT makes it float32."""
    import peft

    policy = PrecisionPolicy(compute=BF16, storage="nf4", master=BF16, reduce=BF16)
    first = lora(nf4(loaded("llama", BF16), BF16), autocast_adapter_dtype=False)
    for parameter in trained(first).values():
        parameter.data = parameter.data.to(BF16)
    with tempfile.TemporaryDirectory() as folder, quiet():
        first.save_pretrained(folder)
        model = peft.PeftModel.from_pretrained(
            nf4(loaded("llama", BF16), BF16),
            folder,
            is_trainable=True,
            autocast_adapter_dtype=autocast_adapter_dtype,
        )
    return Broken(model, tiny_batch("llama"), BF16, policy=policy, learning_rate=1e-2)


def float32_after_bf16_file(broken: Broken) -> str | None:
    """What the reloaded adapter holds over the file it came from."""
    from safetensors import safe_open

    wanted = copy.deepcopy(broken.model)
    for parameter in trained(wanted).values():
        parameter.data = parameter.data.to(broken.policy.master)
    with tempfile.TemporaryDirectory() as folder, quiet():
        wanted.save_pretrained(folder)
        with safe_open(Path(folder) / "adapter_model.safetensors", "pt") as file:
            saved = sum(file.get_tensor(name).nbytes for name in file.keys())  # noqa: SIM118 - no mapping
    held = sum(parameter.nbytes for parameter in trained(broken.model).values())
    return f"the adapter takes {held} bytes, its file {saved}" if held != saved else None


def before_merge(dtype: torch.dtype) -> Broken:
    """A trained adapter on a base in `dtype`, about to be merged."""
    model = after_training(lora(loaded("llama", dtype)), 0.001)
    return Broken(model, tiny_batch("llama"), None if dtype == FP32 else dtype, learning_rate=1e-3)


def merge_loses(broken: Broken) -> str | None:
    """Weights that a merge in the base's dtype leaves unchanged though the adapter changes them."""
    same = count = 0
    with torch.no_grad():
        deltas = {name: layer.get_delta_weight("default") for name, layer in _tuner_layers(broken.model)}
        merged = copy.deepcopy(broken.model)
        before = {name: layer.base_layer.weight.clone() for name, layer in _tuner_layers(merged)}
        merged.merge_adapter()
        for name, layer in _tuner_layers(merged):
            changed = deltas[name] != 0
            same += int((changed & (layer.base_layer.weight == before[name])).sum())
            count += int(changed.sum())
    return f"the merge leaves {same / count:.0%} of the weights unchanged" if same > 0.05 * count else None


def _tuner_layers(model: nn.Module) -> list[tuple[str, Any]]:
    return [(name, module) for name, module in model.named_modules() if hasattr(module, "get_delta_weight")]


def merged_into_half() -> Broken:
    """A vision-language run in bfloat16 whose merge reloads the base in float16: the merged model."""
    policy = PrecisionPolicy(compute=BF16, storage="bfloat16", trainable="full")
    return Broken(_merged(FP16), tiny_batch("llama"), phases=("forward",), policy=policy, device="a100")


def merged_as_trained() -> Broken:
    """The same, merged into a float32 copy of the base and rounded once, to bfloat16."""
    policy = PrecisionPolicy(compute=BF16, storage="bfloat16", trainable="full")
    return Broken(
        _merged(FP32).to(BF16), tiny_batch("llama"), phases=("forward",), policy=policy, device="a100"
    )


def _merged(base: torch.dtype) -> nn.Module:
    """The adapter trained on bfloat16 weights, merged into those weights in `base`."""
    model = after_training(lora(loaded("llama", BF16).to(base)))
    merged: Any = model.merge_and_unload()
    merged.config.dtype = BF16  # what the checkpoint says
    return merged.requires_grad_(False)


def other_dtype_than_trained(broken: Broken) -> str | None:
    """Bytes of merged weights that are not in the dtype they were trained in."""
    other = [p for p in broken.model.parameters() if p.dtype != broken.policy.compute]
    if not other:
        return None
    inputs = {"input_ids": tiny_batch("llama")["input_ids"]}
    with torch.no_grad():
        served = broken.model(**inputs).logits.float()
        wanted = merged_as_trained().model(**inputs).logits.float()
    return f"{len(other)} merged weights are {other[0].dtype}; logits differ by up to {(served - wanted).abs().max():.3f}"


SCENARIOS: tuple[Scenario, ...] = (
    Scenario(
        "peft-2421",
        reloaded,
        ("IST304",),
        r"lora_",
        cost=float32_after_bf16_file,
        notes="Silent only against a policy that asks for bfloat16 masters.",
    ),
    Scenario(
        "torchtune-1101",
        lambda: before_merge(BF16),
        ("IST503",),
        r"merge|q_proj|bfloat16",
        cost=merge_loses,
        advice=lambda: before_merge(FP32),
    ),
    Scenario(
        "unsloth-3091",
        merged_into_half,
        ("IST501",),
        r"float16|embed_tokens|q_proj",
        cost=other_dtype_than_trained,
        advice=merged_as_trained,
        notes="A language model stands for the vision-language one: the merge is the same.",
    ),
)

LEFT_OUT: dict[str, str] = {
    "llamafactory-4677": "vLLM refuses to serve a GPTQ model in bfloat16: an argument of another runtime, no training step",
}

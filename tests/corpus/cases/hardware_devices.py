"""dtypes that the device cannot run, or runs in software."""

from __future__ import annotations

from collections.abc import Callable

import torch

from isotype.precision.devices.profile import device_profile
from tests.corpus.cases.crashes_parts import BF16, FP16, FP32, lora
from tests.corpus.cases.training_parts import after_training, loaded
from tests.corpus.scenario import Broken, Scenario
from tests.models import tiny_batch


def bf16_on_v100(name: str, autocast: bool) -> Broken:
    """A bfloat16 run on a V100."""
    dtype = FP32 if autocast else BF16
    return Broken(lora(loaded(name, dtype)), tiny_batch(name), BF16, device="v100")


def fp16_on_v100(name: str, autocast: bool) -> Broken:
    """The same in float16 with loss scaling."""
    dtype = FP32 if autocast else FP16
    return Broken(lora(loaded(name, dtype)), tiny_batch(name), FP16, scaler=True, device="v100")


def half_on_cpu(name: str, dtype: torch.dtype = FP16) -> Broken:
    """A model whose layers ended up on the CPU in float16."""
    model = lora(loaded(name, dtype), ["q_proj", "v_proj"])
    return Broken(model, tiny_batch(name), phases=("forward",), device="cpu-generic")


def merge_on_cpu(dtype: torch.dtype = FP16) -> Broken:
    """A merge of adapters on the CPU: the products of `lora_B` and `lora_A` in the base's dtype."""
    model = after_training(lora(loaded("llama", dtype), ["q_proj", "v_proj"], autocast_adapter_dtype=False))
    return Broken(model, lambda module: _merged_sum(module), phases=("forward",), device="cpu-generic")


def _merged_sum(model: torch.nn.Module) -> torch.Tensor:
    layers = [module for module in model.modules() if hasattr(module, "get_delta_weight")]
    deltas = [
        layer.lora_B["default"].weight @ layer.lora_A["default"].weight * layer.scaling["default"]
        for layer in layers
    ]
    return torch.stack([delta.float().square().mean() for delta in deltas]).mean()


def slower_than_float32(broken: Broken) -> str | None:
    """How many times longer matmuls in the model's dtype take than in float32, as somebody has measured the device."""
    dtype = next(broken.model.parameters()).dtype
    ratio = device_profile(broken.device).slower(dtype, FP32)
    assert ratio is not None
    return f"matmuls take {ratio:.0f} times as long as in float32" if ratio > 2 else None


def _refused(case: str, name: str, autocast: bool, notes: str = "") -> Scenario:
    return Scenario(
        case,
        lambda: bf16_on_v100(name, autocast),
        ("IST601", "IST602"),
        r"bfloat16|v100|V100",
        advice=lambda: fp16_on_v100(name, autocast),
        notes=notes or "A V100 has no bfloat16: the device profile is the proof, this CPU computes in it.",
    )


def _emulated(case: str, build: Callable[[], Broken], advice: Callable[[], Broken]) -> Scenario:
    return Scenario(
        case,
        build,
        ("IST602", "IST601"),
        r"float16|cpu|CPU",
        cost=slower_than_float32,
        advice=advice,
        notes="torch refused float16 matmuls on CPUs until 2.1; since then it runs them in software.",
    )


SCENARIOS: tuple[Scenario, ...] = (
    _refused("litllama-230", "llama", False),
    _refused(
        "fastchat-1191",
        "mistral",
        True,
        "The title's bf16 on a V100; --tf32, which the message names, is no dtype of a tensor.",
    ),
    _emulated("alpaca-lora-308", lambda: half_on_cpu("llama"), lambda: half_on_cpu("llama", FP32)),
    _emulated("cloneofsimo-92", merge_on_cpu, lambda: merge_on_cpu(FP32)),
    _emulated("llamafactory-3434", lambda: half_on_cpu("qwen3"), lambda: half_on_cpu("qwen3", FP32)),
)

LEFT_OUT: dict[str, str] = {}

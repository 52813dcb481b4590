"""Models with adapters: loaded under a policy, with adapters that change them, one step of them, and saved as a training leaves them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from packaging.version import Version
from transformers.integrations.peft import MIN_PEFT_VERSION

from isotype.checkpoint.load import load
from isotype.checkpoint.resolve import resolve_precision
from isotype.model.adapters import add_lora
from isotype.precision.policy import PrecisionPolicy
from tests.models import quiet, tiny_model

takes_add_adapter = pytest.mark.skipif(
    Version(peft.__version__) < Version(MIN_PEFT_VERSION),
    reason=f"model.add_adapter of this transformers needs PEFT {MIN_PEFT_VERSION}",
)


def loaded(
    path: Path, dtype: str, quantization: str | None = None, **lora: Any
) -> tuple[Any, PrecisionPolicy]:
    """A checkpoint under the policy for a CPU, with adapters of rank 4 that are drawn the same each time."""
    policy = resolve_precision(path, dtype, quantization, "cpu")
    model = load(path, policy)
    torch.manual_seed(0)
    return add_lora(model, policy, **{"r": 4, **lora}), policy


def lora_config(**fields: Any) -> peft.LoraConfig:
    """The config of adapters of rank 4 on all linear layers of a language model."""
    settings = {"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **fields}
    return peft.LoraConfig(**settings)


def adapted(name: str, dtype: torch.dtype = torch.float32, **lora: Any) -> Any:
    """A tiny PEFT model whose adapters are not zero."""
    settings = {"r": 4, "target_modules": "all-linear", "fan_in_fan_out": name == "gpt2", **lora}
    with quiet():
        return moved(peft.get_peft_model(tiny_model(name, dtype), peft.LoraConfig(**settings)))


def moved(model: Any) -> Any:
    """The model, its adapters' matrices drawn again."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name and "magnitude" not in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def step(
    model: Any, batch: Any, low: torch.dtype | None = None, loss_scale: float = 1.0
) -> dict[str, torch.Tensor]:
    """Logits, loss and gradients of one step, under autocast to `low`; `loss_scale`, a power of two, as a GradScaler's."""
    model.zero_grad()
    torch.manual_seed(5)
    with torch.autocast("cpu", low or torch.bfloat16, enabled=low is not None):
        outputs = model(**batch)
    (outputs.loss * loss_scale).backward()
    grads = {name: p.grad / loss_scale for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": outputs.logits.detach(), "loss": outputs.loss.detach(), **grads}


def relative(result: torch.Tensor, wanted: torch.Tensor) -> float:
    """The norm of the difference over that of what is wanted; the difference itself where that is zero."""
    result, wanted = result.detach().double(), wanted.detach().double()
    difference = (result - wanted).norm()
    return float(difference / wanted.norm()) if wanted.any() else float(difference)


def save_adapter(base: Path, directory: Path, dtype: str, storage: str | None, **lora: Any) -> Path:
    """Save a LoRA adapter of rank 4 on `base`, loaded in `storage`, whose weights were moved away from zero."""
    settings: dict[str, Any] = {"target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM"} | lora
    return save_trained(loaded(base, dtype, storage, **settings)[0], directory)


def save_trained(model: Any, directory: Path, *, seed: int = 4, scale: float = 0.1) -> Path:
    """Move a model's trainable parameters by random numbers of this scale, and save them."""
    torch.manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += scale * torch.randn_like(parameter)
    model.save_pretrained(directory)
    return directory

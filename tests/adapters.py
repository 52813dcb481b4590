"""Adapters that change their model, saved as a training leaves them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from isotype.checkpoint.load import load
from isotype.checkpoint.resolve import resolve_precision
from isotype.model.adapters import add_lora


def save_adapter(base: Path, directory: Path, dtype: str, storage: str | None, **lora: Any) -> Path:
    """Save a LoRA adapter of rank 4 on `base`, loaded in `storage`, whose weights were moved away from zero."""
    policy = resolve_precision(base, dtype, storage, "cpu")
    settings: dict[str, Any] = {
        "r": 4,
        "target_modules": ["q_proj", "down_proj"],
        "task_type": "CAUSAL_LM",
    } | lora
    return save_trained(add_lora(load(base, policy), policy, **settings), directory)


def save_trained(model: Any, directory: Path, *, seed: int = 4, scale: float = 0.1) -> Path:
    """Move a model's trainable parameters by random numbers of this scale, and save them."""
    torch.manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += scale * torch.randn_like(parameter)
    model.save_pretrained(directory)
    return directory

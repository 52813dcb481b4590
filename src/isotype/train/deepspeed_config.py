"""Compares a DeepSpeed config with the arguments of a training, as `HfTrainerDeepSpeedConfig` of transformers does later.

transformers compares them after the model is loaded, and knows only `bf16` and `fp16`, not the dtype of the policy.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from isotype.core.dtypes import dtype_name
from isotype.core.errors import PrecisionError, Problem
from isotype.train.command.settings import Settings
from isotype.train.launched import processes

_SAME = {
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "max_grad_norm",
    "optimizer.params.lr": "learning_rate",
    "optimizer.params.eps": "adam_epsilon",
    "optimizer.params.weight_decay": "weight_decay",
    "scheduler.params.warmup_max_lr": "learning_rate",
}
"""Key of the config -> the argument that must have the same value."""
_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def config_problems(settings: Settings) -> Iterator[Problem]:
    """Yield a problem for each value of the config that contradicts an argument or another value of the config."""
    config, name = _config_of(settings)
    for key, argument in _SAME.items():
        mine, other = _value(config, key), getattr(settings, argument)
        if isinstance(mine, (int, float)) and isinstance(other, (int, float)) and mine != other:
            what = f"{key} {mine:g} in {name}, and --{argument} {other:g}"
            yield Problem(what, "the same value", f'"{key}": "auto" in {name}, or --{argument} {mine:g}')
    betas, arguments = _value(config, "optimizer.params.betas"), [settings.adam_beta1, settings.adam_beta2]
    if isinstance(betas, list) and betas != arguments:
        what = f"optimizer.params.betas {betas} in {name}, and --adam_beta1 and --adam_beta2 {arguments}"
        yield Problem(what, "the same values", f'"betas": "auto" in {name}')
    rows, total = settings.per_device_train_batch_size, _value(config, "train_batch_size")
    if isinstance(rows, int) and isinstance(total, int):
        step, count = rows * settings.gradient_accumulation_steps, processes()
        if step > 0 and (total % step or (count > 1 and total != step * count)):
            what = f"train_batch_size {total} in {name}, and {step} rows in an optimizer step of each process"
            yield Problem(what, "the rows of all processes", f'"train_batch_size": "auto" in {name}')
    if all(_value(config, f"{part}.enabled") is True for part in _DTYPES):
        fix = f'"enabled": "auto" in both sections of {name}'
        yield Problem(f"fp16.enabled true and bf16.enabled true in {name}", "at most one of them", fix)


def check_dtype(settings: Settings, compute: torch.dtype) -> None:
    """Raise PrecisionError if the config enables another dtype than `compute`, or disables `compute`."""
    config, name = _config_of(settings)
    for part, dtype in _DTYPES.items():
        enabled = _value(config, f"{part}.enabled")
        if isinstance(enabled, bool) and enabled != (dtype == compute):
            state = str(enabled).lower()
            what = f"{part}.enabled {state} in {name}, and {dtype_name(compute)} as the compute dtype"
            expected = "a config that enables the compute dtype, and no other dtype"
            other = f", or --dtype {dtype_name(dtype)}" if enabled else ""
            fix = f'"{part}": {{"enabled": "auto"}} in {name}{other}'
            raise PrecisionError.of("the DeepSpeed config and the policy disagree", what, expected, fix)


def _config_of(settings: Settings) -> tuple[Any, str]:
    """Return (the config, its name for messages). The config is empty without DeepSpeed, or if no file can be read."""
    config = settings.deepspeed
    if isinstance(config, dict):
        return config, "the DeepSpeed config"
    text = str(config or "{}")
    try:
        written = text.lstrip().startswith("{")
        return json.loads(text if written else Path(text).read_text(encoding="utf-8")), text
    except (OSError, ValueError):
        return {}, text  # DeepSpeed's error names the file


def _value(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = config.get(part) if isinstance(config, dict) else None
    return config

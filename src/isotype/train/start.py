"""Start from an adapter: `--model_name_or_path` names one, and the run trains it further on its base."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

from isotype.checkpoint.adapter import CONFIG_FILE, Adapter, is_adapter, read_adapter
from isotype.core.errors import CheckpointError, Problem, UsageError
from isotype.precision.by_damage import MIXED
from isotype.train.initial import part_of_base_problems
from isotype.train.settings import Settings

MADE_BY = {
    "lora_r": "r",
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
    "lora_target_modules": "target_modules",
    "lora_modules_to_save": "modules_to_save",
    "lora_bias": "bias",
    "use_dora": "use_dora",
    "use_rslora": "use_rslora",
    "init_lora_weights": "init_lora_weights",
}
"""Arguments that a new adapter is made by, and the field of PEFT's config that each one sets."""


def start_of(settings: Settings) -> tuple[Settings, Adapter | None]:
    """The settings with the base model in the place of an adapter, and that adapter; or as given, and None.

    What no flag says about precision is as the adapter was trained: the base's storage and the compute dtype.

    Raises:
        CheckpointError: the adapter is damaged or names no base model.
        UsageError: arguments that would make another adapter; one that is of another task.
    """
    given = str(settings.model.model_name_or_path)
    if not is_adapter(given):
        return settings, None
    adapter = read_adapter(given)
    if adapter.base is None:
        path = adapter.directory / CONFIG_FILE
        expected, fix = "the model that it was trained on", "correct base_model_name_or_path in that file"
        raise CheckpointError.of("the adapter names no base model", str(path), expected, fix)
    problems = [*_other_task(settings, adapter), *_other_adapter(settings, adapter)]
    problems += part_of_base_problems(
        settings, getattr(adapter.config, "init_lora_weights", None), adapter.directory
    )
    if problems:
        raise UsageError(f"the run cannot start from the adapter {given}", problems)
    model = copy.copy(settings.model)
    model.model_name_or_path = adapter.base
    if "model_revision" not in settings.explicit:
        model.model_revision = adapter.revision or model.model_revision
    saved, request = adapter.policy, settings.precision
    if saved is not None:
        if request.quantization in (None, MIXED if saved.layers else None) and saved.quantized:
            request = replace(
                request,
                quantization=saved.storage,
                double_quant=request.double_quant or saved.double_quant or None,
                quant_storage=request.quant_storage or saved.quant_storage,
                layers=saved.layers,
                base_memory=None,
            )
        if request.dtype == "auto":
            request = replace(request, dtype=saved.compute)
    return replace(settings, model=model, precision=request), adapter


def _other_task(settings: Settings, adapter: Adapter) -> list[Problem]:
    task = getattr(adapter.config.task_type, "value", adapter.config.task_type)
    wanted = settings.method.task_type
    if task in (wanted, None):
        return []
    merged = f"isotype merge {adapter.directory} -o {adapter.directory}-merged"
    return [
        Problem(
            f"an adapter for {task}",
            f"one for {wanted}, which isotype {settings.method.name} trains",
            f"merge it first ({merged}) and start from the merged model",
        )
    ]


def _other_adapter(settings: Settings, adapter: Adapter) -> list[Problem]:
    """The arguments that were really given and say something else than the adapter's own config."""
    problems = []
    if settings.precision.trainable == "full":
        problems.append(
            Problem("--use_peft False", "an adapter to be trained further", "leave it out, or merge the adapter first")
        )  # fmt: skip
    for name, key in MADE_BY.items():
        if name not in settings.explicit:
            continue
        asked: Any = getattr(settings.model, name, getattr(settings.extra, name, None))
        has = getattr(adapter.config, key, None)
        if _plain(asked) != _plain(has):
            problems.append(
                Problem(f"--{name} {asked}", f"the adapter's own: {_plain(has)}", f"leave --{name} out")
            )
    return problems


def _plain(value: Any) -> Any:
    """Names in any order and container compare alike."""
    return sorted(value) if isinstance(value, (list, tuple, set)) else value

"""How the adapter of a run begins: as one that `--model_name_or_path` names, or by one of PEFT's initialisations (`--init_lora_weights`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from isotype.checkpoint.adapter import CONFIG_FILE, Adapter, is_adapter, read_adapter
from isotype.core.arguments import wrong_choice
from isotype.core.errors import CheckpointError, PrecisionError, Problem, UsageError
from isotype.core.formats import FOUR_BITS, MIXED
from isotype.model.heads import task_of
from isotype.precision.policy import PrecisionPolicy
from isotype.train.command.settings import Settings

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
    name = str(settings.model.model_name_or_path)
    if not is_adapter(name):
        return settings, None
    adapter = read_adapter(name)
    if adapter.base is None:
        path = adapter.directory / CONFIG_FILE
        expected, fix = "the model that it was trained on", "correct base_model_name_or_path in that file"
        raise CheckpointError.of("the adapter names no base model", str(path), expected, fix)
    problems = [*_other_task(settings, adapter), *_other_adapter(settings, adapter)]
    problems += part_of_base_problems(
        settings, getattr(adapter.config, "init_lora_weights", None), adapter.directory
    )
    if problems:
        raise UsageError(f"the run cannot start from the adapter {name}", problems)
    base = {"model_name_or_path": adapter.base}
    if adapter.revision and "model_revision" not in settings.command:
        base["model_revision"] = adapter.revision
    saved, request = adapter.policy, settings.precision
    if saved is not None:
        if request.quantization in (None, MIXED if saved.layers else None) and saved.quantization:
            request = replace(
                request,
                quantization=saved.quantization,
                double_quant=request.double_quant or saved.double_quant or None,
                quant_storage=request.quant_storage
                or (saved.quant_storage if saved.storage in FOUR_BITS else None),
                layers=saved.layers,
                base_memory=None,
                quantized_parts="language" if saved.dense else "all",
            )
        if request.dtype == "auto":
            request = replace(request, dtype=saved.compute)
    return replace(settings.but(**base), precision=request), adapter


def _other_task(settings: Settings, adapter: Adapter) -> list[Problem]:
    task = task_of(adapter.config)
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
        if name not in settings.command:
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


# ------------------------------------------------------------------------------------------------------ --init_lora_weights


DRAWN = ("gaussian", "orthogonal")
"""Initialisations that draw A and B so that their product is zero; the base stays as it is."""

OF_FLOATS = ("orthogonal", "olora", "pissa")
"""Initialisations that want a base in a float dtype: PEFT 0.21 draws `orthogonal` in the dtype that a weight is stored in."""

PART_OF_BASE = ("olora", "pissa")
"""Initialisations that take a part of each base weight into the adapter, by a QR or singular value decomposition.

The rest of the base is computed again wherever the adapter is attached: equal up to rounding, as the product of A and B is,
whatever signs the decomposition chooses.
"""

LOFTQ = "loftq"
"""The initialisation from the quantization errors of layers in 4 bits, see `isotype.checkpoint.loftq`."""

_DATA = "it needs passes over data before the adapter is there: save one by PEFT's script and give it as --model_name_or_path"
_REFUSED: Mapping[str, str] = {
    "eva": _DATA,
    "corda": _DATA,
    "lora_ga": _DATA,
    "mica": "its B is not trained, which no policy here knows",
}
"""What PEFT has besides -> why not here."""


def initial_problems(settings: Settings) -> Iterator[Problem]:
    """What is wrong with `--init_lora_weights`, as far as the arguments tell."""
    name, extra = settings.extra.init_lora_weights, settings.extra
    if name is None:
        return
    given, choices = f"--init_lora_weights {name}", (*DRAWN, *PART_OF_BASE, LOFTQ)
    expected = f"one of {', '.join(choices)}"
    if name.startswith("pissa_niter_"):
        fix = "--init_lora_weights pissa: these iterations begin at random, and leave another base at every load"
        yield Problem(given, expected, fix)
    elif name in _REFUSED:
        yield Problem(given, expected, _REFUSED[name])
    elif name not in choices:
        yield wrong_choice(given, name, choices)
    if name == "orthogonal" and settings.model.lora_r % 2:
        fix = f"--lora_r {settings.model.lora_r + 1}"
        yield Problem(f"{given} --lora_r {settings.model.lora_r}", "an even rank", fix)
    if name in OF_FLOATS and settings.precision.quantization is not None:
        yield _quantized(name, settings.precision.quantization)
    if name == LOFTQ:
        yield from _loftq_problems(settings, given)
    if name not in (*PART_OF_BASE, LOFTQ):
        return
    if settings.sharding is not None:
        fix = f"leave --init_lora_weights out, or --fsdp with it (--device {extra.device})"
        yield Problem(f"{given} --fsdp", "weights in one piece, which it decomposes", fix)
    yield from part_of_base_problems(settings, name)


def _loftq_problems(settings: Settings, setting: str) -> Iterator[Problem]:
    if settings.model.use_dora:
        fix = "leave one of the two out"
        yield Problem(
            f"{setting} --use_dora", "LoRA: DoRA's magnitudes are those of the quantized weights", fix
        )
    if brings_tokens(settings.training):
        fix = "leave --init_lora_weights out"
        yield Problem(f"{setting} --chat_template_path", "an adapter that is there before the trainer", fix)


def brings_tokens(training: Any) -> bool:
    """Whether a chat template of another model is taken over, with its tokens; sft and reward have the argument."""
    template = getattr(training, "chat_template_path", None)
    return template is not None and not Path(template).is_file()


def part_of_base_problems(settings: Settings, name: object, adapter: Path | None = None) -> list[Problem]:
    """Whether the method would put a second adapter on the base, which would take its part out of it once more.

    TRL's reference of a preference run, or of one with a KL term, is a copy of the adapter, made by its config.
    """
    if not isinstance(name, str) or not name.startswith(PART_OF_BASE) or settings.method.reference == "none":
        return []
    expected = "an adapter that leaves the base as it is, for the reference model is a copy of it"
    if adapter is not None:
        merged = f"isotype merge {adapter} -o {adapter}-merged"
        return [
            Problem(
                f"an adapter that {name} began", expected, f"merge it first ({merged}), and start from that"
            )
        ]
    return [
        Problem(
            f"--init_lora_weights {name} with {settings.method.name}",
            expected,
            "leave it out, or gaussian or orthogonal",
        )
    ]


def is_its_own_reference(settings: Settings, start: Adapter | None) -> bool:
    """Whether the model is its own reference where its adapter is switched off: one that is new, and leaves the base as it is."""
    new = start is None and settings.extra.init_lora_weights in (None, *DRAWN)
    return new and settings.sharding is None


def check_initial(settings: Settings, policy: PrecisionPolicy) -> None:
    """Whether the base that the policy decided on can give a part of its weights to the adapter.

    Raises:
        PrecisionError: it is quantized.
    """
    name = settings.extra.init_lora_weights
    if name in OF_FLOATS and policy.quantized:
        raise PrecisionError("the adapter cannot begin so", [_quantized(name, policy.storage)])
    if name == LOFTQ and policy.storage not in FOUR_BITS:
        raise PrecisionError.of(
            "the adapter cannot begin so",
            f"--init_lora_weights {name} and a base in {policy.storage}",
            "a base in 4 bits: it begins from what they are off by",
            "--quantization nf4, or leave --init_lora_weights out",
        )


def _quantized(name: str, storage: str) -> Problem:
    setting = f"--init_lora_weights {name} and a base in {storage}"
    why = (
        "what is left of each weight would be rounded again"
        if name in PART_OF_BASE
        else "PEFT draws in its dtype"
    )
    expected = f"a base in float32, bfloat16 or float16: {why}"
    return Problem(setting, expected, "--init_lora_weights gaussian, or leave --quantization out")

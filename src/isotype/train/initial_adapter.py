"""Reads the adapter that `--model_name_or_path` names. For a new adapter, checks `--init_lora_weights`."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from isotype.checkpoint.adapter import ADAPTER_CONFIG, UNUSABLE, Adapter, is_adapter, read_adapter
from isotype.compat.peft import kind_of_adapter
from isotype.core.arguments import wrong_choice
from isotype.core.errors import CheckpointError, PrecisionError, Problem, UsageError
from isotype.core.formats import FOUR_BITS, MIXED
from isotype.model.targets import task_of
from isotype.precision.damages import as_decided
from isotype.precision.policy import PrecisionPolicy
from isotype.train.command.settings import Settings

FIELDS_OF_CONFIG = {
    "lora_r": "r", "lora_target_modules": "target_modules", "lora_modules_to_save": "modules_to_save", "lora_bias": "bias",
    **{name: name for name in ("lora_alpha", "lora_dropout", "use_dora", "use_rslora", "init_lora_weights")},
}  # fmt: skip
"""Maps an argument of a new adapter to the field of `peft.LoraConfig` that it sets."""


def start_of(settings: Settings) -> Settings:
    """Return settings for the adapter that `--model_name_or_path` names, and for its base model.

    Storage and compute dtype come from the arguments, or else from the training of the adapter. If `--model_name_or_path`
    names no adapter, the settings are returned unchanged.

    Raises:
        CheckpointError: the adapter is damaged or names no base model.
        UsageError: arguments contradict the adapter, or the adapter is for another task.
    """
    name = str(settings.model_name_or_path)
    if not is_adapter(name):
        return settings
    adapter = read_adapter(name)
    if adapter.base is None:
        path = adapter.directory / ADAPTER_CONFIG
        expected, fix = "the base model of the adapter", "correct base_model_name_or_path in that file"
        raise CheckpointError.of("the adapter names no base model", str(path), expected, fix)
    initialised_by = getattr(adapter.config, "init_lora_weights", None)
    problems = [
        *_contradictions(settings, adapter),
        *part_of_base_problems(settings, initialised_by, adapter.directory),
    ]
    if problems:
        raise UsageError(f"the run cannot start from the adapter {name}", problems)
    adapter.require_usable()
    base = {"model_name_or_path": adapter.base}
    if adapter.revision and "model_revision" not in settings.command:
        base["model_revision"] = adapter.revision
    saved, request = adapter.policy, settings.precision
    if saved is not None:
        if request.quantization in (None, MIXED if saved.layers else None) and saved.quantization:
            decided = as_decided(request, saved)
            request = replace(
                decided,
                double_quant=request.double_quant or decided.double_quant,
                quant_storage=request.quant_storage or decided.quant_storage,
                quantized_parts="language" if saved.dense else "all",
            )
        if request.dtype == "auto":
            request = replace(request, dtype=saved.compute)
    return replace(settings.but(**base), precision=request, start=adapter)


def _contradictions(settings: Settings, adapter: Adapter) -> Iterator[Problem]:
    """Yield a problem if the adapter's task or kind cannot be trained, and a problem for each argument that contradicts the adapter."""
    task, wanted = task_of(adapter.config), settings.method.task_type
    if task not in (wanted, None):
        merged = f"isotype merge {adapter.directory} -o {adapter.directory}-merged"
        expected = f"an adapter for {wanted}, the task of isotype {settings.method.name}"
        fix = f"merge it first ({merged}), and start from the merged model"
        yield Problem(f"an adapter for {task}", expected, fix)
    kind = kind_of_adapter(adapter.config)
    why = "which adds virtual tokens" if adapter.config.is_prompt_learning else _UNABLE.get(kind)
    if why is not None:
        expected = "an adapter that changes weights, such as LoRA, because PEFT or TRL cannot train this kind further"
        fix = f"train a new LoRA adapter: --model_name_or_path {adapter.base}"
        yield Problem(f"a {kind} adapter, {why}", expected, fix)
    if settings.precision.trainable == "full":
        fix = "omit --use_peft, or merge the adapter first"
        yield Problem("--use_peft False", "training of the adapter that --model_name_or_path names", fix)
    for name, key in FIELDS_OF_CONFIG.items():
        value = settings.value(name)
        value = BOOLEANS.get(value, value) if name == "init_lora_weights" else value
        saved = sorted_names(getattr(adapter.config, key, None))
        if name in settings.command and sorted_names(value) != saved:
            yield Problem(f"--{name} {value}", f"the adapter's value: {saved}", f"omit --{name}")


_UNABLE = {
    "ADAPTION_PROMPT": "whose forward does not return the log-probabilities that TRL's trainers need",
    **UNUSABLE,
}
"""Maps a kind of adapter that a TRL trainer cannot train to the reason."""

BOOLEANS = {"true": True, "false": False}
"""Maps the texts of `--init_lora_weights` to PEFT's booleans. With False, PEFT initialises matrix B with random values (for tests)."""


def sorted_names(value: Any) -> Any:
    """Return a collection of names as a sorted list (for comparisons), and any other value unchanged."""
    return sorted(value) if isinstance(value, (list, tuple, set)) else value


# ------------------------------------------------------------------------------------------------------ --init_lora_weights


DRAWN = ("true", "gaussian", "orthogonal")
"""Initialisations that do not change the model's results, because the product of A and B is zero."""

OF_FLOATS = ("orthogonal", "olora", "pissa")
"""Initialisations that need base weights in a float dtype. PEFT (0.21) initialises `orthogonal` in the dtype of the base."""

PART_OF_BASE = ("olora", "pissa")
"""Initialisations that move a part of each base weight into the adapter, by a QR or singular value decomposition.

The rest of the base weight is not saved. It is computed again whenever the adapter is attached. The recomputed weight is
the same up to rounding, even if the new decomposition has other signs.
"""

LOFTQ = "loftq"
"""Initialisation that compensates a part of the quantization error of 4-bit layers (see `isotype.checkpoint.loftq`)."""

_DATA = "it is computed from data: create an adapter with PEFT's script, and pass the adapter as --model_name_or_path"
_BASE = f"{_DATA} (saved with path_initial_model_for_weight_conversion, because this initialisation also changes base weights)"
_REFUSED: Mapping[str, str] = {
    "eva": _DATA,
    "corda": _BASE,
    "lora_ga": _BASE,
    "mica": "its matrix B is not trained, which isotype does not support",
}
"""Maps an initialisation of PEFT that isotype refuses to the reason."""


def initial_problems(settings: Settings) -> Iterator[Problem]:
    name = settings.init_lora_weights
    if name is None:
        return
    flag, choices = f"--init_lora_weights {name}", (*DRAWN, "false", *PART_OF_BASE, LOFTQ)
    expected = f"one of {', '.join(choices)}"
    if name.startswith("pissa_niter_"):
        fix = "--init_lora_weights pissa, because pissa_niter starts from random values, and every load would change the base differently"
        yield Problem(flag, expected, fix)
    elif name in _REFUSED:
        yield Problem(flag, expected, _REFUSED[name])
    elif name not in choices:
        yield wrong_choice(flag, name, choices)
    if name == "orthogonal" and settings.lora_r % 2:
        fix = f"--lora_r {settings.lora_r + 1}"
        yield Problem(f"{flag} --lora_r {settings.lora_r}", "an even rank", fix)
    if name in OF_FLOATS and settings.precision.quantization is not None:
        yield _quantized(name, settings.precision.quantization)
    if name == LOFTQ and settings.use_dora:
        expected = "LoRA without DoRA, because DoRA computes its magnitudes from the quantized weights"
        yield Problem(f"{flag} --use_dora", expected, "omit one of the two")
    if name == LOFTQ and brings_tokens(settings.training):
        fix = "omit --init_lora_weights"
        expected = "no new tokens: loftq needs the adapter before TRL adds tokens"
        yield Problem(f"{flag} --chat_template_path", expected, fix)
    if name not in (*PART_OF_BASE, LOFTQ):
        return
    if settings.sharding is not None:
        fix = f"omit --init_lora_weights, or omit --fsdp (--device {settings.device})"
        yield Problem(f"{flag} --fsdp", "unsharded weights, because the initialisation decomposes them", fix)
    yield from part_of_base_problems(settings, name)


def brings_tokens(training: Any) -> bool:
    """Return True if `--chat_template_path` names another model. TRL then adds this model's additional tokens."""
    template = getattr(training, "chat_template_path", None)
    return template is not None and not Path(template).is_file()


def _copies_adapter(settings: Settings) -> bool:
    return settings.method.always_copies or settings.method.compares(settings.training)


def bias_problems(settings: Settings) -> Iterator[Problem]:
    """Yield a problem if the method needs two adapters and biases are trained. PEFT allows biases in only one adapter."""
    if not settings.use_peft or not _copies_adapter(settings):
        return
    name, flag = settings.method.name, settings.lora_bias
    bias = flag if settings.start is None else getattr(settings.start.config, "bias", "none")
    if bias not in (None, "none"):
        what, fix = f"an adapter with bias {bias!r}", "merge it first"
        if settings.start is None:
            what, fix = f"--lora_bias {bias} with {name}", "omit --lora_bias"
        expected = "an adapter without biases, because TRL adds a second adapter as the reference"
        yield Problem(what, expected, fix)


def part_of_base_problems(settings: Settings, name: object, adapter: Path | None = None) -> list[Problem]:
    """Return a problem if the initialisation of the adapter changes base weights, and TRL adds a reference adapter.

    The reference adapter, for a preference loss or a KL term, has the same config. The initialisation of the reference
    adapter would change the base weights a second time.
    """
    if not isinstance(name, str) or not name.startswith(PART_OF_BASE) or not _copies_adapter(settings):
        return []
    why = "because TRL adds a second adapter as the reference"
    expected = f"an initialisation that leaves the base unchanged, {why}"
    if adapter is not None:
        merged = f"isotype merge {adapter} -o {adapter}-merged"
        fix = f"merge it first ({merged}), and start from the merged model"
        return [Problem(f"an adapter that was initialised by {name}", expected, fix)]
    what = f"--init_lora_weights {name} with {settings.method.name}"
    return [Problem(what, expected, "omit it, or set it to gaussian or orthogonal")]


def is_its_own_reference(settings: Settings) -> bool:
    """Return True if the base model can serve as the reference model: the adapter is new, the base unchanged, and nothing sharded."""
    new = settings.start is None and settings.init_lora_weights in (None, *DRAWN)
    return new and settings.sharding is None


def check_initial(settings: Settings, policy: PrecisionPolicy) -> None:
    name = settings.init_lora_weights
    if name in OF_FLOATS and policy.quantized:
        raise PrecisionError("the adapter cannot be initialised", [_quantized(name, policy.storage)])
    if name == LOFTQ and policy.storage not in FOUR_BITS:
        what = f"--init_lora_weights {name} and a base in {policy.storage}"
        expected = "a base in 4 bits, whose quantization errors loftq compensates"
        fix = "--quantization nf4, or omit --init_lora_weights"
        raise PrecisionError.of("the adapter cannot be initialised", what, expected, fix)


def _quantized(name: str, storage: str) -> Problem:
    setting = f"--init_lora_weights {name} and a base in {storage}"
    why = "PEFT draws A and B in the dtype of the base"
    if name in PART_OF_BASE:
        why = (
            "a part of each base weight moves into the adapter, and the rest would have to be quantized again"
        )
    expected = f"a base in float32, bfloat16 or float16: {why}"
    return Problem(setting, expected, "--init_lora_weights gaussian, or omit --quantization")

"""The command line of the training commands: TRL's own arguments, and what they say about precision."""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from isotype.core.arguments import Parser, closest
from isotype.core.dtypes import QUANTIZATIONS, dtype_name, parse_dtype
from isotype.core.errors import PrecisionError, Problem, UsageError
from isotype.precision.decide import PrecisionRequest
from isotype.train.limits import number_problems
from isotype.train.methods import Method

_UNSET = object()
_JSON = {
    "model_init_kwargs": '{"attn_implementation": "eager"}',
    "lr_scheduler_kwargs": '{"num_cycles": 2}',
    "gradient_checkpointing_kwargs": '{"use_reentrant": false}',
    "activation_checkpointing_kwargs": '{"use_reentrant": false}',
    "accelerator_config": '{"split_batches": true}',
    "fsdp_config": '{"version": 2}',
    "dataset_kwargs": '{"skip_prepare_dataset": true}',
    "generation_kwargs": '{"top_k": 50}',
}
_FLAGS = (("fp16", "float16"), ("bf16", "bfloat16"))


@dataclass
class IsotypeArguments:
    """What isotype adds to TRL's arguments."""

    quantization: str | None = field(
        default=None,
        metadata={
            "help": "Storage of the frozen base weights; short for --load_in_4bit, --load_in_8bit and "
            "--bnb_4bit_quant_type.",
            "choices": list(QUANTIZATIONS),
        },
    )
    device: str = field(default="auto", metadata={"help": "Device to train on: auto, cpu, cuda, mps, xpu."})
    ask: str | None = field(
        default=None,
        metadata={
            "help": "A question the model answers before and after training. By default the first prompt of "
            "the test split, where evaluation is on (--eval_strategy)."
        },
    )
    columns: str | None = field(
        default=None,
        metadata={
            "help": "The trainer's names for the data set's columns: prompt=question,completion=answer; or alpaca, "
            "for instruction, input and output."
        },
    )
    eval_split: float | None = field(
        default=None,
        metadata={
            "help": "Hold back this share of the training rows (or this many of them) and measure the loss on them, "
            "by default five times in the run (--eval_strategy, --eval_steps)."
        },
    )
    quiet: bool = field(
        default=False,
        metadata={"help": "Say less: the policy in three lines, no example.", "aliases": ["-q"]},
    )
    verbose: bool = field(
        default=False,
        metadata={
            "help": "Say more: every reason in full, what was restored, libraries' warnings.",
            "aliases": ["-v"],
        },
    )
    lora_bias: str = field(
        default="none",
        metadata={
            "help": "Which biases are trained beside the adapters: none, all, or those of the adapted layers.",
            "choices": ["none", "all", "lora_only"],
        },
    )


@dataclass(frozen=True)
class Settings:
    """One parsed command.

    Attributes:
        method: which trainer.
        script, training, model, dataset: TRL's dataclasses, as its own parser made them.
        extra: isotype's own arguments.
        precision: what the flags say about precision, free of contradictions.
        explicit: the names of the arguments that were really given.
        argv: the command line as typed.
        refused: the dtypes that `--bf16 False` and `--fp16 False` rule out.
    """

    method: Method
    script: Any
    training: Any
    model: Any
    dataset: Any
    extra: IsotypeArguments
    precision: PrecisionRequest
    explicit: frozenset[str]
    argv: tuple[str, ...]
    refused: frozenset[str] = frozenset()


def parse_settings(method: Method, argv: Sequence[str]) -> Settings:
    """Parse the arguments of `isotype METHOD`, which are those of `trl METHOD` and isotype's own.

    Raises:
        UsageError: an unknown argument, a missing one, an unreadable config file.
        PrecisionError: flags that contradict each other about dtypes; the error names all of them.
    """
    parser = training_parser(method)
    config_keys = _apply_config(parser, argv)
    arguments = _without_config(argv)
    parser.parse_known_args(arguments)
    problems = list(parser.problems)  # of the config file's values too, which are the defaults
    given, unknown = parser.parse_known_args(arguments, _unset_namespace(parser))
    problems += parser.unknown(unknown)
    model_path = _given_value(parser, given, "model_name_or_path", config_keys)
    if model_path is None:
        problems.append(_no_model(unknown))
    parser.refuse(problems)
    explicit = {name for name, value in vars(given).items() if value is not _UNSET} | config_keys
    flags = {name: _given_value(parser, given, name, config_keys) for name in ("bf16", "fp16")}
    # transformers refuses bf16 on some machines while it parses; what the flags ask for is judged by the policy.
    neutral = ["--bf16", "False", "--fp16", "False"]
    if _given_value(parser, given, "device", config_keys) == "cpu":
        neutral += ["--use_cpu", "True"]
    eight_bit = bool(_given_value(parser, given, "load_in_8bit", config_keys))
    if eight_bit:  # TRL refuses it beside 4 bit, alone; it is judged with all that is said about precision
        neutral += ["--load_in_8bit", "False"]
    for name in _JSON:
        _check_json(name, _given_value(parser, given, name, config_keys))
    try:
        parsed = parser.parse_args_into_dataclasses(args=[*arguments, *neutral])
    except (ValueError, TypeError, OSError) as error:
        wrong = list(number_problems(partial(_given_value, parser, given, config_keys=config_keys)))
        fix = "change what it names"
        said = Problem(" ".join(str(error).split()), f"arguments that trl {method.name} takes together", fix)
        raise UsageError("arguments that cannot work", wrong or [said]) from error
    except ImportError as error:  # PackageNotFoundError, of --deepspeed, is one
        raise UsageError(
            "an argument needs a package that is not installed",
            [Problem(_missing_package(error), "the package", "install it, or leave the argument out")],
        ) from error
    script, training, model, dataset, extra = parsed
    model.load_in_8bit = eight_bit
    model.lora_target_modules = target_modules(model.lora_target_modules)
    if training.use_cpu and extra.device == "auto":
        extra.device = "cpu"
    asked = read_precision_request(training, model, extra, frozenset(explicit), flags)
    refused = frozenset(name for flag, name in _FLAGS if flags[flag] is False)
    return Settings(
        method, script, training, model, dataset, extra, asked, frozenset(explicit), tuple(argv), refused
    )


def _no_model(stray: Sequence[str]) -> Problem:
    """The model is missing; a path or hub id that stands there without a name is most likely it."""
    meant = next((token for token in stray if not token.startswith("-")), "MODEL")
    expected = "a checkpoint directory, a GGUF file, embedded:NAME or a hub id"
    return Problem("no --model_name_or_path", expected, f"--model_name_or_path {meant}")


def _missing_package(error: ImportError) -> str:
    found = re.search(r"'([\w.-]+)[^']*' distribution was not found", str(error))
    return f"no package {found[1]}" if found else str(error)


def target_modules(value: Any) -> Any:
    """`--lora_target_modules` as PEFT takes it: plain names as a list; `all-linear` and regexes as they are.

    TRL makes a string of a list of one name, and PEFT reads a string as a regex of the whole module name.
    """
    if isinstance(value, str) and re.fullmatch(r"[\w.]+([\s,]+[\w.]+)*", value):
        return re.split(r"[\s,]+", value)
    return value


def _check_json(name: str, value: Any) -> None:
    path = name != "model_init_kwargs" and not str(value).startswith("{")  # some are read from files too
    if value is None or isinstance(value, dict) or path:
        return
    try:
        wrong = None if isinstance(json.loads(value), dict) else "it is no object"
    except (TypeError, ValueError) as error:
        wrong = str(error)
    if wrong is not None:
        raise UsageError(
            "an argument is not JSON",
            [
                Problem(
                    f"--{name} {value}: {wrong}",
                    "a JSON object",
                    f"""write it like '{_JSON[name]}'""",
                )
            ],
        )


def read_precision_request(
    training: Any,
    model: Any,
    extra: IsotypeArguments,
    explicit: frozenset[str],
    flags: Mapping[str, bool | None],
) -> PrecisionRequest:
    """What the arguments ask of the policy; every contradiction among them in one error.

    Args:
        training, model, extra: the parsed dataclasses.
        explicit: the names of the arguments that were really given.
        flags: `fp16` and `bf16` as given, None where they were not.

    Raises:
        PrecisionError: two flags disagree; each problem names both.
    """
    problems: list[Problem] = []
    init = _init_kwargs(training)
    dtype = _asked_dtype(training, model, flags, problems)
    quantization = _asked_quantization(model, extra, explicit, init, problems)
    nested = model.use_bnb_nested_quant or _saved_quantization(init).get("bnb_4bit_use_double_quant")
    for flag in ("fp16_full_eval", "bf16_full_eval"):
        if getattr(training, flag):
            problems.append(
                Problem(
                    f"--{flag}",
                    "evaluation under the same policy as training",
                    "leave it out: it would cast the masters too, and evaluation runs in the compute dtype anyway",
                )
            )
    if problems:
        raise PrecisionError("the arguments disagree about precision", problems)
    return PrecisionRequest(
        dtype=dtype,
        quantization=quantization,
        trainable="lora" if model.use_peft else "full",
        double_quant=bool(nested) or None,
        quant_storage=model.bnb_4bit_quant_storage,
    )


def _asked_dtype(training: Any, model: Any, flags: Mapping[str, bool | None], problems: list[Problem]) -> str:
    """The compute dtype that all flags agree on, or "auto"."""
    claims: list[tuple[str, str]] = []
    if model.dtype not in (None, "auto"):
        claims.append((f"--dtype {model.dtype}", dtype_name(parse_dtype(model.dtype))))
    for flag, name in _FLAGS:
        if flags[flag]:
            claims.append((f"--{flag}", name))
    launched = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if launched in ("fp16", "bf16"):
        claims.append(
            (
                f"mixed precision {launched} of accelerate launch",
                {"fp16": "float16", "bf16": "bfloat16"}[launched],
            )
        )
    init = _init_kwargs(training)
    for key in ("dtype", "torch_dtype"):
        if init.get(key) not in (None, "auto"):
            claims.append((f"--model_init_kwargs {key}={init[key]}", dtype_name(parse_dtype(init[key]))))
    compute = _saved_quantization(init).get("bnb_4bit_compute_dtype")
    if compute is not None:
        claims.append(
            (
                f"--model_init_kwargs quantization_config bnb_4bit_compute_dtype={compute}",
                dtype_name(parse_dtype(compute)),
            )
        )
    first = claims[0] if claims else None
    for claim, name in claims[1:]:
        if first and name != first[1]:
            problems.append(
                Problem(
                    f"{first[0]} and {claim}",
                    "one compute dtype (in isotype, --dtype names it and the weights follow)",
                    f"leave {claim} out for {first[1]}, or give --dtype {name}",
                )
            )
    for flag, name in _FLAGS:
        if first and flags[flag] is False and first[1] == name:
            problems.append(
                Problem(
                    f"{first[0]} and --{flag} False",
                    "one compute dtype",
                    f"leave --{flag} False out, or give another --dtype",
                )
            )
    return first[1] if first else "auto"


def _init_kwargs(training: Any) -> dict[str, Any]:
    return training.model_init_kwargs if isinstance(training.model_init_kwargs, dict) else {}


def _saved_quantization(init: Mapping[str, Any]) -> Mapping[str, Any]:
    """What `--model_init_kwargs` says about quantization, in the words of `BitsAndBytesConfig`."""
    config = init.get("quantization_config")
    flat = {key: init[key] for key in ("load_in_4bit", "load_in_8bit") if init.get(key)}
    return {**flat, **config} if isinstance(config, dict) else flat


def _init_quantization(init: Mapping[str, Any], problems: list[Problem]) -> list[tuple[str, str]]:
    """The claim that `--model_init_kwargs` makes about the quantization, if it makes one."""
    config = _saved_quantization(init)
    given = "--model_init_kwargs quantization_config"
    if config.get("load_in_8bit"):
        return [(f"{given} load_in_8bit", "int8")]
    if config.get("load_in_4bit"):
        name = str(config.get("bnb_4bit_quant_type", "fp4"))  # bitsandbytes' own default
        return [(f"{given} load_in_4bit ({name})", name)]
    if init.get("quantization_config"):
        problems.append(
            Problem(
                f"{given} {init['quantization_config']}",
                "load_in_4bit or load_in_8bit of bitsandbytes",
                "leave it out and give --quantization nf4, fp4 or int8",
            )
        )
    return []


def _asked_quantization(
    model: Any,
    extra: IsotypeArguments,
    explicit: frozenset[str],
    init: Mapping[str, Any],
    problems: list[Problem],
) -> str | None:
    """The quantization that all flags agree on."""
    claims: list[tuple[str, str]] = []
    if extra.quantization:
        claims.append((f"--quantization {extra.quantization}", extra.quantization))
    if model.load_in_8bit:
        claims.append(("--load_in_8bit", "int8"))
    chosen_type = "bnb_4bit_quant_type" in explicit
    if model.load_in_4bit:
        four_bit = extra.quantization if extra.quantization in ("nf4", "fp4") else None
        name = model.bnb_4bit_quant_type if chosen_type else (four_bit or model.bnb_4bit_quant_type)
        claims.append(("--load_in_4bit" + (f" --bnb_4bit_quant_type {name}" if chosen_type else ""), name))
    elif chosen_type:
        claims.append((f"--bnb_4bit_quant_type {model.bnb_4bit_quant_type}", model.bnb_4bit_quant_type))
    claims += _init_quantization(init, problems)
    for claim, name in claims[1:]:
        if name != claims[0][1]:
            problems.append(
                Problem(f"{claims[0][0]} and {claim}", "one quantization", "leave one of the two out")
            )
    return claims[0][1] if claims else None


def _given_value(parser: Any, given: argparse.Namespace, name: str, config_keys: set[str]) -> Any:
    """An argument as typed, else as the config file has it, else None."""
    if getattr(given, name, _UNSET) is not _UNSET:
        return getattr(given, name)
    return parser.get_default(name) if name in config_keys else None


def training_parser(method: Method) -> Any:
    """The parser of `isotype METHOD`: TRL's arguments and isotype's own."""
    from trl import TrlParser

    script, training, model, dataset = method.dataclass_types()

    class TrainingParser(Parser, TrlParser):  # type: ignore[misc]  # trl ships no types
        """TRL's arguments, with our complaints."""

    make: Any = TrainingParser
    parser = make((script, training, model, dataset, IsotypeArguments), prog=f"isotype {method.name}")
    parser.description = (
        f"{method.title}, under one precision policy. Takes the arguments of `trl {method.name}`."
    )
    # argparse: the compute dtype is decided by isotype, and LoRA is what isotype is for.
    parser.set_defaults(dtype="auto", use_peft=True, lora_target_modules="all-linear")
    parser.set_defaults(lora_task_type=method.task_type)
    for action in parser._actions:
        if action.dest == "bf16":
            action.nargs, action.const = "?", True  # `--bf16` alone works as `--fp16` does
        if action.dest == "dtype":
            action.choices = None
            action.metavar = "auto|float32|bfloat16|float16"
            action.help = "Compute dtype; the weights follow. auto: the dtype the checkpoint was trained in, where the device runs it."
        if action.dest == "use_peft":
            action.help = (
                "Train adapters on a frozen base (the default here); --use_peft False trains every weight."
            )
    return parser


def _apply_config(parser: Any, argv: Sequence[str]) -> set[str]:
    """Set the parser's defaults from the YAML file of `--config`; returns the names it sets."""
    path = _config_path(argv)
    if path is None:
        return set()
    import yaml

    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(
            "unreadable config file",
            [Problem(f"--config {path}: {error.strerror}", "a YAML file", "check the path")],
        ) from error
    except UnicodeDecodeError as error:
        raise UsageError(
            "unreadable config file",
            [
                Problem(
                    f"--config {path}: not UTF-8 at byte {error.start}", "a YAML file", "convert it to UTF-8"
                )
            ],
        ) from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        at = f", line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
        said = getattr(error, "problem", None) or " ".join(str(error).split())
        raise UsageError(
            "config file is not YAML",
            [Problem(f"--config {path}{at}: {said}", "`name: value` lines", "correct that line")],
        ) from error
    if not isinstance(values, dict):
        held = "nothing" if values is None else f"a {type(values).__name__}"
        raise UsageError(
            "config file is not a mapping",
            [Problem(f"--config {path} holds {held}", "`name: value` lines", "write learning_rate: 1e-4")],
        )
    for name, value in (values.pop("env", None) or {}).items():
        os.environ[name] = str(value)
    known = {action.dest for action in parser._actions}
    unknown = [str(key) for key in values if key not in known]
    if unknown:
        raise UsageError(
            f"unknown names in {path}",
            [_unknown_key(key, sorted(known)) for key in unknown],
        )
    parser.set_defaults_with_config(**_yaml_choices(parser, values))
    return set(values)


def _yaml_choices(parser: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """YAML reads a bare `no` as false; where "no" is one of an argument's choices, that is what was meant."""
    with_no = {action.dest for action in parser._actions if "no" in (action.choices or ())}
    return {name: "no" if value is False and name in with_no else value for name, value in values.items()}


def _config_path(argv: Sequence[str]) -> str | None:
    for position, token in enumerate(argv):
        if token == "--config":
            if position + 1 == len(argv):
                problem = Problem("--config without a value", "a YAML file", "--config FILE.yaml")
                raise UsageError("arguments that cannot work", [problem])
            return argv[position + 1]
        if token.startswith("--config="):
            return token.removeprefix("--config=")
    return None


def _without_config(argv: Sequence[str]) -> list[str]:
    rest, skip = [], False
    for token in argv:
        if skip:
            skip = False
        elif token == "--config":
            skip = True
        elif not token.startswith("--config="):
            rest.append(token)
    return rest


def _unset_namespace(parser: argparse.ArgumentParser) -> argparse.Namespace:
    # argparse fills in defaults only for names that the namespace lacks, so what stays _UNSET was not typed.
    return argparse.Namespace(**{action.dest: _UNSET for action in parser._actions if action.dest != "help"})


def _unknown_key(name: str, known: Sequence[str]) -> Problem:
    meant = closest(name, known)
    fix = f"did you mean {meant[0]}?" if meant else "isotype sft --help lists all"
    return Problem(name, f"a known name: {', '.join(meant)}" if meant else "a known name", fix)

"""The command line of the training commands, and `--config`: TRL's own arguments and ours, and what they say about precision."""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

from isotype.compat.standard import actions_of
from isotype.core.arguments import Parser, closest
from isotype.core.errors import Problem, UsageError, one_line
from isotype.core.renamed import renamed
from isotype.data.methods import Method
from isotype.precision.decide import PrecisionRequest
from isotype.train.dialects.translate import in_own_names
from isotype.train.launched import Sharding
from isotype.train.libraries import require_names
from isotype.train.options.arguments import ARGUMENTS, Argument, IsotypeArguments, number_problems
from isotype.train.options.precision_flags import FLAGS, read_precision_request

_UNSET = object()
AUTO = "auto"
_MEANT = frozenset(
    [
        "gradient_checkpointing",
        "activation_checkpointing",
        "bf16",
        "fp16",
        "per_device_train_batch_size",
        "per_device_eval_batch_size",
        "output_dir",
        "eval_strategy",
        "eval_steps",
        "bnb_4bit_quant_type",
        "model_revision",
        "logging_nan_inf_filter",
        "accelerator_config",
        "lora_task_type",
    ]
)
"""Arguments whose default, where it is given, is not the same as saying nothing."""
_RECOMPUTE = ("gradient_checkpointing", "activation_checkpointing")
"""The argument, and the newer name that transformers 5.23 has for it."""


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
        sharding: how the model is sharded over processes; None where it is not.
        auto_checkpointing: whether gradient checkpointing is to be chosen by the foreseen memory of the step; `training` says on then.
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
    sharding: Sharding | None = None
    auto_checkpointing: bool = False


def parse_settings(method: Method, argv: Sequence[str]) -> Settings:
    """Parse the arguments of `isotype METHOD`, which are those of `trl METHOD` and isotype's own.

    Raises:
        UsageError: an unknown argument, a missing one, an unreadable config file.
        PrecisionError: flags that contradict each other about dtypes; the error names all of them.
    """
    parser = training_parser(method)
    config_keys = apply_config(parser, argv, method.name)
    arguments = without_config(argv)
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
    recompute = {name: _given_value(parser, given, name, config_keys) for name in _RECOMPUTE}
    for name, value in recompute.items():
        neutral += [f"--{name}", "True"] if value == AUTO else []
    for argument in ARGUMENTS:
        if argument.json:
            _check_json(argument, _given_value(parser, given, argument.name, config_keys))
    try:
        parsed = parser.parse_args_into_dataclasses(args=[*arguments, *neutral])
    except (ValueError, TypeError, OSError, OverflowError) as error:
        wrong = list(number_problems(partial(_given_value, parser, given, config_keys=config_keys)))
        message = one_line(error)
        values = vars(parser.parse_known_args([*arguments, *neutral])[0])
        fix = cure_by_trial(
            explicit & values.keys(), partial(_works_without, parser, values)
        ) or cure_by_name(message, explicit, values, f"isotype {method.name}")
        conflict = Problem(message, f"arguments that trl {method.name} takes together", fix)
        raise UsageError("arguments that cannot work", wrong or [conflict]) from error
    except ImportError as error:  # PackageNotFoundError, of --deepspeed, is one
        raise UsageError.of(
            "an argument needs a package that is not installed",
            _missing_package(error),
            "the package",
            "install it, or leave the argument out",
        ) from error
    script, training, model, dataset, extra = parsed
    model.load_in_8bit = eight_bit
    if "model_revision" not in explicit:
        model.model_revision = (training.model_init_kwargs or {}).get("revision", model.model_revision)
    model.lora_target_modules = target_modules(model.lora_target_modules)
    if isinstance(training.gradient_checkpointing_kwargs, dict):
        # torch takes the other kind where nothing is said, transformers this one where nothing else is given.
        training.gradient_checkpointing_kwargs.setdefault("use_reentrant", False)
    if "per_device_eval_batch_size" not in explicit:
        # As many as are trained on, where transformers takes 8: of prompts (GRPO, RLOO), whole groups of completions.
        group = (
            getattr(training, "num_generations_eval", None) or getattr(training, "num_generations", None) or 1
        )
        rows = max(1, training.per_device_train_batch_size)  # a wrong number is told once
        training.per_device_eval_batch_size = -(-rows // group) * group
    if training.use_cpu and extra.device == "auto":
        extra.device = "cpu"
    auto = all(value in (None, AUTO) for value in recompute.values()) and not _says_how(training, explicit)
    asked = read_precision_request(training, model, extra, frozenset(explicit), flags)
    refused = frozenset(name for flag, name in FLAGS if flags[flag] is False)
    return Settings(
        method,
        script,
        training,
        model,
        dataset,
        extra,
        asked,
        frozenset(explicit),
        tuple(argv),
        refused,
        auto_checkpointing=auto,
    )


def _says_how(training: Any, explicit: set[str]) -> bool:
    """Whether the arguments say how activations are to be saved: they ask for it then."""
    return bool(getattr(training, "activation_offloading", False)) or any(
        f"{name}_kwargs" in explicit for name in _RECOMPUTE
    )


def _auto_or_bool(value: str) -> str | bool:
    from transformers.hf_argparser import string_to_bool

    answer: str | bool = AUTO if str(value).lower() == AUTO else string_to_bool(value)
    return answer


def _works_without(parser: Any, values: dict[str, Any], name: str) -> bool:
    """Whether TRL's dataclasses take the values with one of them at its default."""
    try:
        for kind in parser.dataclass_types:
            names = {each.name for each in fields(kind) if each.init}
            kind(**{key: value for key, value in values.items() if key in names and key != name})
    except (ValueError, TypeError, OSError, ImportError, OverflowError):
        return False
    return True


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


def _check_json(argument: Argument, value: Any) -> None:
    name = argument.name
    path = name in ("accelerator_config", "fsdp_config") and not str(value).startswith(
        "{"
    )  # read from files too
    if value is None or isinstance(value, dict) or path:
        return
    try:
        wrong = None if isinstance(json.loads(value), dict) else "it is no object"
    except (TypeError, ValueError, RecursionError) as error:
        wrong = str(error)
    if wrong is not None:
        raise UsageError.of(
            "an argument is not JSON",
            f"--{name} {value}: {wrong}",
            "a JSON object",
            f"write it like '{argument.json}'",
        )


def _given_value(parser: Any, given: argparse.Namespace, name: str, config_keys: set[str]) -> Any:
    """An argument as typed, else as the config file has it, else None."""
    if getattr(given, name, _UNSET) is not _UNSET:
        return getattr(given, name)
    return parser.get_default(name) if name in config_keys else None


def training_parser(method: Method) -> Any:
    """The parser of `isotype METHOD`: TRL's arguments and isotype's own."""
    require_names(method)
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
    for action in actions_of(parser):
        if action.dest == "bf16":
            action.nargs, action.const = "?", True  # `--bf16` alone works as `--fp16` does
        if action.dest == "dtype":
            action.choices = None
            action.metavar = "auto|float32|bfloat16|float16"
            action.help = "Compute dtype; the weights follow. auto: the dtype the checkpoint was trained in, where the device runs it."
        if action.dest in _RECOMPUTE:
            action.type = _auto_or_bool
            action.metavar = "auto|true|false"
        if action.dest == "gradient_checkpointing" and action.option_strings[0] == "--gradient_checkpointing":
            action.help = (
                "Compute activations again in the backward, for less memory and a slower step. auto (default): only in as "
                "many layers as the device's memory asks for."
            )
        if action.dest == "use_peft":
            action.help = (
                "Train adapters on a frozen base (the default here); --use_peft False trains every weight."
            )
    return parser


def _unset_namespace(parser: argparse.ArgumentParser) -> argparse.Namespace:
    # argparse fills in defaults only for names that the namespace lacks, so what stays _UNSET was not typed.
    return argparse.Namespace(
        **{action.dest: _UNSET for action in actions_of(parser) if action.dest != "help"}
    )


def cure_by_trial(explicit: Iterable[str], works_without: Callable[[str], bool]) -> str | None:
    """The arguments of which any one, left out, makes the rest work; None where no single one does.

    Args:
        explicit: the names that were given.
        works_without: whether the command works with this argument at its default.
    """
    cures = [name for name in sorted(explicit) if works_without(name)]
    return f"leave {' or '.join(f'--{name}' for name in cures)} out" if cures else None


def cure_by_name(message: str, explicit: Collection[str], values: Mapping[str, Any], help_of: str) -> str:
    """What to do by the arguments that a message names: those that were given go, the others are shown as they are.

    Args:
        message: of the library.
        explicit: the names that were given.
        values: every argument with its value.
        help_of: the command, whose help is the last resort.
    """
    words = dict.fromkeys(re.findall(r"[a-z][a-z0-9_]*", message))
    named = [name for name in words if name in values and ("_" in name or f"--{name}" in message)]
    out = [f"--{name}" for name in named if name in explicit]
    other = [f"--{name} (now {values[name]})" for name in named if name not in explicit]
    parts = [f"leave {' or '.join(out)} out"] * bool(out)
    parts += [f"{'or change' if out else 'change'} {' or '.join(other)}"] * bool(other)
    given = [f"--{name}" for name in sorted(explicit) if name in values]
    last = f"leave out one of {', '.join(given)}" if given else "see what each takes"
    return ", ".join(parts) or f"{last}; {help_of} --help-all lists all"


# ------------------------------------------------------------------------------------------------------ --config FILE


def apply_config(parser: Any, argv: Sequence[str], method: str) -> set[str]:
    """Set the parser's defaults from the YAML file of `--config`, isotype's own or another trainer's; returns the names it sets."""
    path = _config_path(argv)
    if path is None:
        return set()
    values, problems = in_own_names(_content(path), method, path)
    for name, value in (values.pop("env", None) or {}).items():
        os.environ[name] = str(value)
    known = {action.dest for action in actions_of(parser)}
    headline = f"what {path} asks for is not done here" if problems else f"unknown names in {path}"
    problems += [_unknown_key(str(key), sorted(known)) for key in values if key not in known]
    if problems:
        raise UsageError(headline, problems)
    parser.set_defaults_with_config(**_yaml_choices(parser, values))
    return set(values)


def _content(path: str) -> dict[str, Any]:
    """The mapping in a YAML file."""
    import yaml

    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError.of(
            "unreadable config file", f"--config {path}: {error.strerror}", "a YAML file", "check the path"
        ) from error
    except UnicodeDecodeError as error:
        raise UsageError.of(
            "unreadable config file",
            f"--config {path}: not UTF-8 at byte {error.start}",
            "a YAML file",
            "convert it to UTF-8",
        ) from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        at = f", line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
        message = getattr(error, "problem", None) or one_line(error)
        raise UsageError.of(
            "config file is not YAML",
            f"--config {path}{at}: {message}",
            "`name: value` lines",
            "correct that line",
        ) from error
    if not isinstance(values, dict):
        content = "nothing" if values is None else f"a {type(values).__name__}"
        raise UsageError.of(
            "config file is not a mapping",
            f"--config {path} holds {content}",
            "`name: value` lines",
            "write learning_rate: 1e-4",
        )
    return values


def config_text(method: Method, argv: Sequence[str]) -> str:
    """A training command as the shortest file of `--config` that means the same."""
    import yaml

    parser = training_parser(method)
    defaults = {action.dest: parser.get_default(action.dest) for action in actions_of(parser)}
    path = _config_path(argv)
    values, problems = ({}, []) if path is None else in_own_names(_content(path), method.name, path)
    problems += [_unknown_key(str(key), sorted(defaults)) for key in values if key not in {"env", *defaults}]
    given, unknown = parser.parse_known_args(without_config(argv), _unset_namespace(parser))
    parser.refuse([*problems, *parser.problems, *parser.unknown(unknown)])
    values |= {name: value for name, value in vars(given).items() if value is not _UNSET}
    said = {n: v for n, v in values.items() if n in _MEANT or n not in defaults or defaults[n] != v}
    return str(yaml.safe_dump(said, sort_keys=False, allow_unicode=True))


def _yaml_choices(parser: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """YAML reads a bare `no` as false; where "no" is one of an argument's choices, that is what was meant."""
    with_no = {action.dest for action in actions_of(parser) if "no" in (action.choices or ())}
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


def without_config(argv: Sequence[str]) -> list[str]:
    rest, skip = [], False
    for token in argv:
        if skip:
            skip = False
        elif token == "--config":
            skip = True
        elif not token.startswith("--config="):
            rest.append(token)
    return rest


def _unknown_key(name: str, known: Sequence[str]) -> Problem:
    former = renamed(name, known)
    if former is not None:
        return former
    meant = closest(name, known)
    fix = f"did you mean {meant[0]}?" if meant else "isotype sft --help lists all"
    return Problem(name, f"a known name: {', '.join(meant)}" if meant else "a known name", fix)

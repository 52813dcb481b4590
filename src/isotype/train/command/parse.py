"""Parses a training command from a command line, a `--config` file or keywords, and checks each value.

A command line may begin with another program, such as `accelerate launch -m axolotl.cli.train FILE`.
"""

import argparse
import functools
import json
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from isotype.compat.standard import actions_of
from isotype.core.arguments import Parser, did_you_mean, separated, unknown_name
from isotype.core.errors import PrecisionError, Problem, UsageError, one_line
from isotype.data.locate import is_data_file
from isotype.data.methods import METHODS, SAME_METHODS
from isotype.train.command.arguments import ARGUMENTS, Argument, name_problems, number_problems
from isotype.train.command.command import Command, ConfigFile, Value, specs
from isotype.train.command.precision import read_precision_request
from isotype.train.dialects.reader import tables
from isotype.train.dialects.translate import BY_HAND, dialect_of, in_isotype_names, method_of, other_program

_JSON = {argument.name: argument for argument in ARGUMENTS if argument.json}
_FILES = ("accelerator_config", "fsdp_config", "deepspeed", "parallelism_config")
"""Arguments whose value is JSON or another text, such as the path of a JSON file."""
MODELS = "a checkpoint directory, a GGUF file, embedded:NAME or a hub id"
"""Valid values of `--model_name_or_path`."""


def parse_command(
    method: str,
    argv: Sequence[str] = (),
    keywords: Mapping[str, Any] | None = None,
    *,
    add_arguments: Callable[[argparse.ArgumentParser], None] | None = None,
    model: str | None = None,
    problems_of: Callable[[argparse.Namespace], list[Problem]] = lambda options: [],
    prog: str | None = None,
) -> tuple[Command, argparse.Namespace]:
    """Return the training command, and the arguments of the caller. Flags override keywords, and keywords override
    the config file.

    Args:
        keywords: values by argument name. None means that the argument is not set.
        add_arguments: adds the caller's arguments (those of `check` or `plan`) to the parser. They replace training arguments
            with the same names.
        model: the model. If `model` is None, the first word that belongs to no argument is the model.
        problems_of: returns the problems of the caller's arguments.

    Raises:
        UsageError: unknown arguments, invalid values or an unreadable file. The error lists all problems.
    """
    argv = named_as_config(argv)
    parser, mine = _cached_parser(method, prog or f"isotype {method}", add_arguments)
    namespace, stray = parser.parse_known_args(argv)
    typed = vars(namespace)
    problems = list(parser.problems)
    trains = add_arguments is None
    model = _model_among(stray, model, typed, trains, problems)
    parser.stray = functools.partial(_argument_before, typed=typed, trains=trains)
    file, refused = None, UsageError("")
    try:
        if typed.get("config") is not None:
            file = read_config(typed["config"], method, trains=trains)
    except UsageError as error:
        refused = error
    values: dict[str, Value] = {} if file is None else dict(file.values)
    if model is not None:
        values.pop("model_name_or_path", None)  # `model` wins over the file, as a flag does
        values = {"model_name_or_path": Value(model, (model,)), **values}
    by_keyword = ((name, value, None) for name, value in (keywords or {}).items() if value is not None)
    for name, value, texts in (*by_keyword, *((name, raw, _texts(raw)) for name, raw in typed.items())):
        if name not in mine and name != "config":
            problems += _add(values, method, name, value, texts)
    dialect = dialect_of({token[2:].partition("=")[0]: "" for token in stray if token.startswith("--")})
    unknown = parser.unknown(stray)
    problems += unknown if dialect is None else _translated(argv, method, dialect, mine, trains)
    ours = argparse.Namespace(**{name: typed[name] for name in mine if name in typed})
    problems += problems_of(ours)
    named = dialect or any(known.swap and "--model_name_or_path" in known.swap[1] for known in problems)
    if not (named or "model_name_or_path" in values or refused.problems or trains):
        expected = "a model, a training command with its arguments, or package.module:function"
        problems.append(Problem("no model", expected, f"{parser.prog} MODEL --device t4"))
    command = Command(method, values, file)
    if problems or refused.problems:
        problems += value_problems(command)
    if refused.problems:
        headline = f"{refused.headline}, and invalid arguments" if problems else refused.headline
        raise UsageError(headline, [*refused.problems, *problems], refused.hint) from refused
    parser.refuse(problems)
    return command, ours


def _model_among(
    stray: list[str], model: str | None, typed: Mapping[str, Any], trains: bool, problems: list[Problem]
) -> str | None:
    """Remove the model from `stray` (words that belong to no argument) and return it. Add a problem for a second model."""
    # A value directly after an unknown argument belongs to this argument.
    after = [False, *(word.startswith("-") and "=" not in word for word in stray)]
    values = [at for at, word in enumerate(stray) if not (word.startswith("-") or after[at])]
    if values and not _argument_before(stray[values[0]], {}, trains=trains):
        if model is not None and values[0] == 0:
            problems.append(_two_models(model, stray.pop(0)))
        elif model is None and "model_name_or_path" not in typed:
            return stray.pop(values[0])
    if model is not None and "model_name_or_path" in typed:
        problems.append(_two_models(model, "--model_name_or_path"))
    return model


def _argument_before(word: str, typed: Mapping[str, Any], *, trains: bool) -> str:
    """Return the flag that the user omitted before the value `word`; "" if no flag fits or `typed` contains the flag."""
    name = ""
    if is_data_file(Path(word)) or word.lower().endswith(".arrow"):
        name = "dataset_name"
    elif not trains and not Path(word).exists():
        from isotype.precision.devices.names import profile_names

        name = "device" if word.lower() in ("cpu", "cuda", *profile_names()) else ""
    return f"--{name}" if name and typed.get(name) is None else ""


def _two_models(first: str, second: str) -> Problem:
    """Describe the error of a command with two models. The first "model" is often a misspelled or unknown method."""
    meant = SAME_METHODS.get(first.lower(), first.lower())
    fix = did_you_mean(meant, METHODS, "omit one of the two", 1, 0.7, "isotype check {}".format)
    swap = ((first,), (meant,)) if meant in METHODS else None
    return Problem(f"{first} and {second}", "one model", fix, swap)


def _translated(
    argv: Sequence[str], method: str, dialect: str, mine: Collection[str], trains: bool
) -> list[Problem]:
    """Translate arguments of axolotl or LLaMA-Factory. Return a problem whose fix is the translated command.

    If the translation fails, return the problems of the translation.
    """
    import yaml

    line: dict[str, list[str]] = {}
    before: list[str] = []
    for word in separated(argv):
        if re.match(r"--?[A-Za-z]", word):
            line[word.lstrip("-")] = []
        else:
            (line[next(reversed(line))] if line else before).append(word)
    if Path(*line.get("dataset", ())).is_file():  # the file itself, not a name of dataset_info.json
        line["dataset_name"] = line.pop("dataset")
    ours = {*mine, "dataset_name", *(name for name, spec in specs(method).items() if spec.holder == "added")}
    kept = [word for name in line if name in ours for word in (f"--{name}", *line[name])]
    read = {n: yaml.safe_load(" ".join(words) or "true") for n, words in line.items() if n not in ours}
    content, problems = in_isotype_names(read, method, "command line", trains=trains)
    words = Command(method, {name: Value(value) for name, value in content.items()}).arguments()
    program = "LLaMA-Factory" if dialect == "llama_factory" else dialect
    what = f"{program}'s arguments: --{', --'.join(name for name in read if name not in specs(method))}"
    expected = f"isotype's arguments, or a file of {program}"
    fix = "run the corrected command, or write these arguments as `name: value` into FILE.yaml"
    return problems or [Problem(what, expected, fix, (separated(argv), (*before, *words, *kept)))]


def value_problems(command: Command) -> list[Problem]:
    """Return the problems of a command: numbers out of range, unknown names, and contradictory precision arguments."""
    problems = [*number_problems(command.given), *name_problems(command.given)]
    try:
        read_precision_request(command)
    except (PrecisionError, UsageError) as error:
        problems += error.problems
    return problems


def _texts(raw: Any) -> tuple[str, ...]:
    if isinstance(raw, bool):  # a bare flag, or --no_name
        return () if raw else ("False",)
    return tuple(raw) if isinstance(raw, list) else (raw,)


def _add(
    values: dict[str, Value], method: str, name: str, raw: Any, texts: tuple[str, ...] | None
) -> list[Problem]:
    arguments = specs(method)
    if name not in arguments:
        return [unknown_name(name, raw, list(arguments), f"isotype {method} --help-all")]
    value, problem = arguments[name].read(raw)
    if problem is None and name in _JSON:
        value, problem = _object(_JSON[name], value)
    elif isinstance(value, dict):
        problem = Problem(f"--{name} {json.dumps(value)}", "a text", f"{name}: VALUE")
    if problem is not None:
        return [problem]
    values.pop(name, None)  # a repeated argument is written at its last position
    values[name] = Value(value, texts)
    return []


def _object(argument: Argument, value: Any) -> tuple[Any, Problem | None]:
    """Return (JSON object or path of a JSON file, None), or (None, problem) if the argument's value is invalid."""
    if isinstance(value, dict) or (argument.name in _FILES and not str(value).lstrip().startswith("{")):
        return value, None
    try:
        content, wrong = json.loads(value), "not an object"
        if isinstance(content, dict):
            return content, None
    except (TypeError, ValueError, RecursionError) as error:
        wrong = str(error)
    what = f"--{argument.name} {value}: {wrong}"
    return None, Problem(what, "a JSON object", f"write it like '{json.dumps(argument.json)}'")


def _parser(
    method: str, prog: str, add_arguments: Callable[[argparse.ArgumentParser], None] | None
) -> tuple[Parser, frozenset[str]]:
    """Return (parser, names of the caller's arguments). The parser does not convert training arguments."""
    parser = Parser(prog=prog, add_help=False)
    if add_arguments is not None:
        add_arguments(parser)
    mine = frozenset(action.dest for action in actions_of(parser))
    hidden: dict[str, Any] = {"default": argparse.SUPPRESS}
    parser.add_argument("--config", **hidden)
    for spec in specs(method).values():
        if spec.name in mine:
            continue
        nargs = "+" if spec.many else "?" if spec.bare else None
        const = True if spec.bare else None
        parser.add_argument(*spec.flags, dest=spec.name, nargs=nargs, const=const, **hidden)
        if spec.negated:
            names = (f"--no_{spec.name}", f"--no-{spec.name.replace('_', '-')}")
            parser.add_argument(*names, dest=spec.name, action="store_const", const=False, **hidden)
    return parser, mine


_cached_parser = functools.lru_cache(maxsize=32)(_parser)
"""`_parser` with a cache. The parser is cached: a command is parsed several times, and adding hundreds of arguments takes milliseconds."""


def training_parser(method: str) -> Parser:
    """Return a training command's parser for `--help-all`, with its description and help texts."""
    parser = _parser(method, f"isotype {method}", None)[0]
    parser.usage = f"isotype {method} --model_name_or_path MODEL --dataset_name DATA [flags]"
    title = METHODS[method].title
    parser.description = f"{title}, under one precision policy. Accepts the arguments of `trl {method}`."
    for action in actions_of(parser):
        spec = specs(method).get(action.dest)
        if spec is not None and action.const is not False:
            default = "" if spec.default in (None, "") else f" (default: {spec.default})"
            kind = "true|false" if spec.kind == "bool" else spec.kind.upper()
            action.choices, action.metavar = spec.choices or None, None if spec.choices else kind
            action.help = f"{spec.help}{default}".replace("%", "%%")
    return parser


def named_as_config(argv: Sequence[str]) -> list[str]:
    """Return `argv` with `--config` before the first word if this word is a file with settings."""
    name = argv[0] if argv else ""
    named = name.endswith((".yaml", ".yml")) and not name.startswith("-")
    if name.endswith(".json") and Path(name).is_file():  # a config.json describes a model
        try:
            content = json.loads(Path(name).read_text(encoding="utf-8"))
        except ValueError:
            content = None
        known = isinstance(content, dict) and (dialect_of(content) or other_program(content))
        named = bool(known) and "input_features" not in content  # LeRobot's config.json has it, too
    return ["--config", *argv] if named else list(argv)


def first_words(argv: Sequence[str]) -> tuple[str | None, str | None, list[str]]:
    """Split `[METHOD] [MODEL] …`, the words after `isotype check` or `plan`, into (method, model, other words).

    The first word is the model, unless it is a method or a file with settings.
    """
    words = list(argv)
    refuse_program(words)
    method = words.pop(0) if words and words[0] in METHODS else None
    words = named_as_config(words)
    model = words.pop(0) if words and method is None and not words[0].startswith("-") else None
    return method, model, words


def method_of_config(argv: Sequence[str]) -> str | None:
    """Return the training method of the file after `--config`, or None without `--config`."""
    words = [word for token in argv for word in token.split("=", 1 if token.startswith("--config=") else 0)]
    path = next((value for flag, value in pairwise(words) if flag == "--config"), None)
    return None if path is None else method_of(_mapping(path)[0])


def read_config(path: str, method: str, *, trains: bool = True) -> ConfigFile:
    """Read a YAML file of isotype or another training program. Set the environment variables in the file's `env`."""
    content, lines = _mapping(path)
    content, problems = in_isotype_names(content, method, path, trains=trains)
    env = {str(name): str(value) for name, value in (content.pop("env", None) or {}).items()}
    os.environ.update(env)
    known = specs(method)
    hint, others = f"isotype {method} --help-all", [key for key in content if key not in known]
    headline = f"unknown names in {path}" if others else f"invalid values in {path}"
    headline = f"{path} requests features that isotype lacks" if problems else headline
    problems += [unknown_name(str(key), content[key], sorted(known), hint) for key in others]
    values: dict[str, Value] = {}
    for name, value in content.items():
        if value is not None and name in known:
            at = f"{path}:{lines[name]}" if name in lines else path
            added = _add(values, method, name, value, None)
            problems += [Problem(f"{p.given} ({at})", p.expected, p.fix) for p in added]
    if problems:
        raise UsageError(headline, problems)
    return ConfigFile(path, values, env)


def _mapping(path: str) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the mapping in a YAML file, and the line number of each name."""
    import yaml

    try:
        text = Path(path).read_text(encoding="utf-8")
        values = yaml.safe_load(text)
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except OSError as error:
        what = f"--config {path}: {error.strerror}"
        raise UsageError.of("unreadable config file", what, "a YAML file", "check the path") from error
    except UnicodeDecodeError as error:
        what = f"--config {path}: not UTF-8 at byte {error.start}"
        raise UsageError.of("unreadable config file", what, "a YAML file", "convert it to UTF-8") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        at = f", line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
        message = getattr(error, "problem", None) or one_line(error)
        headline, what = "config file is not YAML", f"--config {path}{at}: {message}"
        raise UsageError.of(headline, what, "`name: value` lines", "correct that line") from error
    if not isinstance(values, dict):
        content = "nothing" if values is None else f"a {type(values).__name__}"
        what, fix = f"--config {path} holds {content}", "write learning_rate: 1e-4"
        raise UsageError.of("config file is not a mapping", what, "`name: value` lines", fix)
    return values, {key.value: key.start_mark.line + 1 for key, _ in getattr(node, "value", ())}


LAUNCHERS = ("python", "python3", "accelerate", "torchrun", "deepspeed")
"""Commands that start a Python script."""
TRAINERS = ("axolotl", "llamafactory-cli", "swift", "trl")
"""Commands of other programs that train."""
_MODULES = {"llamafactory": "llamafactory-cli"} | {name: name for name in (*TRAINERS, "isotype")}
_NAMING = ("axolotl", "llamafactory-cli")
"""Programs whose files or flags contain the training method."""
_LOW = re.compile(
    r"(?=.* --(train|tuner|sft)_type full\b)(?=.* --(torch_)?dtype bf(loat)?16\b)(?!.* --(deepspeed|fsdp)\b)"
)
"""Words of ms-swift that train all weights in bfloat16. With them, DeepSpeed and FSDP update float32 copies."""
_COUNTS = ("--num_processes", "--nproc_per_node", "--nproc-per-node", "--num_gpus", "NPROC_PER_NODE")


def refuse_program(words: Sequence[str]) -> None:
    """Raise UsageError if `words` begin with another program. The fix in the error is isotype's command for the same training."""
    line = separated(words)
    start = next((at for at, word in enumerate(line) if not re.match(r"env$|\w+=", word)), len(line))
    named = line[start] if line[start + 1 :] else ""  # a single word may be a model
    expected = "MODEL, or a training command of isotype"
    if (script := "".join(line[start : start + 1])).endswith(".py"):
        rest = line[start:]
        at = rest.index("--device") if "--device" in rest else len(rest)
        run = ("run", *rest[at : at + 2], *rest[:at], *rest[at + 2 :])
        fix = f"isotype run {script} runs it; isotype check {Path(script).stem}:FUNCTION checks a function in it that returns (model, inputs)"
        problem = Problem(f"the script {script}", expected, fix, (("check", *line), run))
        raise UsageError("not a model", [problem])
    if (program := tables()["commands"].get(named)) and not line[start + 1].startswith("-"):
        what, fix = f"{named}, the command of {program}", BY_HAND.format(method="sft")
        raise UsageError.of("the command begins with another program", what, expected, fix)
    if named not in (*LAUNCHERS, *TRAINERS, "isotype"):
        return
    problem = Problem(named, expected, "begin with the method; isotype run starts a Python script")
    for at, (word, after) in enumerate(pairwise(line[start:]), start):
        module = after.partition(".")[0] if word == "-m" else None
        trains = _MODULES.get(module) if module else Path(word).name in _MODULES and Path(word).name
        if trains:
            end, kept = _kept(line, at + 1 + (word == "-m"), trains)
            variables = (word.split("=") for word in line[:at] if word.count("=") == 1)
            pairs = (*variables, *pairwise(line[:at]), *os.environ.items())
            counts = [count for name, count in pairs if name in _COUNTS and count.isdigit()]
            known = bool(kept) or trains in _NAMING
            if known:
                kept += ("--devices", counts[0]) if counts else ()
                kept += ("--use_peft", "False") if trains == "trl" and not _sets_use_peft(line) else ()
                kept += (
                    ("--master_dtype", "bfloat16") if trains == "swift" and _LOW.match(" ".join(line)) else ()
                )
            fix = f"write {' '.join(kept)} instead" if kept else "remove it"
            swap = (tuple(line[:end]), kept) if known else None
            problem = Problem(" ".join(line[:end]), expected, fix, swap)
            break
        if named in LAUNCHERS and (module or after.endswith(".py")):
            end = at + (word != "-m") if named.startswith("python") else start
            script = "isotype run starts a Python script"
            problem = Problem(named, expected, script, (("check", *line[:end]), ("run",)))
            break
    raise UsageError("the command begins with another program", [problem])


def _kept(line: Sequence[str], at: int, program: str) -> tuple[int, tuple[str, ...]]:
    """Return the number of words before the arguments of `program`, and the method or file for isotype's command."""
    word = "".join(line[at : at + 1])
    if program in _NAMING:
        at += word == "train"
        word = "".join(line[at : at + 1])
        return (at + 1, (word,)) if word.endswith((".yaml", ".yml", ".json")) else (at, ())
    if word.startswith("--"):
        return at, ("sft",)
    if word == "rlhf":
        word = next((value for name, value in pairwise(line) if name == "--rlhf_type"), "")
    method = SAME_METHODS.get(word, word)
    return (at + 1, (method,)) if method in METHODS else (at, ())


def _sets_use_peft(line: Sequence[str]) -> bool:
    """Return True if the words or their `--config` file set `use_peft`. Without `use_peft`, `trl` trains every weight."""
    files = [Path(value) for name, value in pairwise(line) if name == "--config" and Path(value).is_file()]
    texts = (*line, *(file.read_text(encoding="utf-8", errors="replace") for file in files))
    return any("use_peft" in text.replace("-", "_") for text in texts)

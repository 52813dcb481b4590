"""`--config FILE`: arguments from YAML, checked like those of the command line."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from isotype.compat.standard import actions_of
from isotype.core.arguments import closest
from isotype.core.errors import Problem, UsageError
from isotype.core.renamed import renamed


def apply_config(parser: Any, argv: Sequence[str]) -> set[str]:
    """Set the parser's defaults from the YAML file of `--config`; returns the names it sets."""
    path = _config_path(argv)
    if path is None:
        return set()
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
        message = getattr(error, "problem", None) or " ".join(str(error).split())
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
    for name, value in (values.pop("env", None) or {}).items():
        os.environ[name] = str(value)
    known = {action.dest for action in actions_of(parser)}
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

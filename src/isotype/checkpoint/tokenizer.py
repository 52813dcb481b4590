"""The tokenizer or image processor of a checkpoint; its files are checked, and their code is not run."""

from __future__ import annotations

import re
import warnings
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from isotype.checkpoint.formats.config import BUILD_ERRORS
from isotype.checkpoint.formats.json_file import Entry, entry_problems, read_json
from isotype.compat.hub import asking
from isotype.core.errors import CheckpointError, Problem, first_line
from isotype.core.pretrained import TOKENIZER_FILES, code_named, pretrained

_ENDS = (".json", ".model", "_config.json")
_HEADLINE = "the tokenizer cannot be read"
_AGAIN = "correct the file, or copy it again from the model that the weights come from"
_FILE_NAME = re.compile(r"[\w.-]*[\w-]", re.ASCII)
_ENTRIES = (
    Entry("model_max_length", float | None, "a number of tokens"),
    Entry("chat_template", str | list | dict | None, "a template, or a list of templates with their names"),
    Entry("tokenizer_class|processor_class", str | None, "the name of a class"),
    Entry("auto_map", list | dict | None, "an object"),
)


def tokenizer_of(source: str | Path, revision: str | None = None, *, required: bool = False) -> Any | None:
    """Return the tokenizer or processor of a directory or hub id; None if it has none and none is required.

    Raises:
        CheckpointError: its files are damaged, or need code of the checkpoint; with `required`, there is none.
    """
    import transformers

    if isinstance(source, Path):
        if not any((source / f"tokenizer{end}").is_file() for end in _ENDS):
            if required:
                raise _none(source, "no tokenizer.json, tokenizer.model or tokenizer_config.json in it")
            return None
        _check_files(source)
    why = ""
    try:
        with asking(source) as why:
            at = {} if revision is None else {"revision": revision}
            tokenizer = pretrained(transformers.AutoProcessor, source, **at)
    except (OSError, *BUILD_ERRORS) as error:
        if isinstance(source, str):
            if required:
                raise _none(source, why or first_line(error)) from error
            return None
        if lacking := _lacking(str(error)):
            raise CheckpointError(
                _HEADLINE, [replace(lacking, given=f"{source}: {lacking.given}")]
            ) from error
        reason = _reason(source) or first_line(error)
        raise CheckpointError.of(_HEADLINE, f"{source}: {reason}", "a tokenizer", _AGAIN) from error
    for file, key, reference in code_named(source, revision):
        kind = type(getattr(tokenizer, "tokenizer", tokenizer)).__name__
        cls = read_json(file).get("tokenizer_class") if key == "auto_map.AutoTokenizer" else None
        if cls is not None and not hasattr(transformers, str(cls)):
            warnings.warn(
                f"{file}: {key} names {reference}, code of the checkpoint that is not run; transformers' {kind} reads its files",
                stacklevel=2,
            )
    return tokenizer


def _lacking(message: str) -> Problem | None:
    """Return the problem of a missing package for a picture processor; None for other errors."""
    if find_spec("PIL") is None and re.search(r"image processor|\bPIL\b|[Pp]illow", message):
        return Problem(
            "its processor of pictures needs pillow", "the package pillow", "pip install 'isotype[vision]'"
        )
    if re.search(r"[Tt]orchvision", message):
        kind = re.search(r"\w+Processor", message)
        fix = "pip install torchvision; beside a torch for CPUs, from https://download.pytorch.org/whl/cpu (--index-url)"
        what = (
            f"{kind.group() if kind else 'its processor'}, which has no class for pillow, needs torchvision"
        )
        return Problem(what, "the package torchvision", fix)
    return None


def _none(source: str | Path, reason: str) -> CheckpointError:
    expected = "tokenizer.json and tokenizer_config.json beside the weights"
    fix = "copy them from the model that the weights come from"
    return CheckpointError.of("no tokenizer in the checkpoint", f"{source}: {reason}", expected, fix)


def _check_files(directory: Path) -> None:
    """Refuse files that are no objects, or whose entries have types that transformers does not take."""
    problems: list[Problem] = []
    for file in ("tokenizer.json", "special_tokens_map.json", "added_tokens.json", *TOKENIZER_FILES):
        path = directory / file
        content = read_json(path) if path.is_file() else {}
        problems += entry_problems(content, _ENTRIES, path, _AGAIN)
        templates = content.get("chat_template")
        for each in templates if isinstance(templates, list) else ():
            name, text = (each.get(k) if isinstance(each, dict) else None for k in ("name", "template"))
            if not isinstance(name, str) or not isinstance(text, str):
                what = f"{path}: chat_template holds {each!r:.60}"
                problems.append(Problem(what, "a name and a template", _AGAIN))
            elif not _FILE_NAME.fullmatch(name):
                what = f"{path}: chat_template has the name {name!r}"
                expected = "letters, digits, '-', '_' and '.': the template is saved under it"
                problems.append(Problem(what, expected, _AGAIN))
    if problems:
        raise CheckpointError(_HEADLINE, problems)


def _reason(source: Path) -> str:
    """Return why transformers refuses the files, which its factory of tokenizers and processors hides."""
    from transformers import AutoTokenizer

    try:
        pretrained(AutoTokenizer, source)
    except Exception as error:  # noqa: BLE001 - tokenizers raises no other class; its message is passed on
        return f"{type(error).__name__}: {first_line(error)}"
    return ""

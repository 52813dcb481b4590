"""Translation of axolotl's and LLaMA-Factory's YAML into isotype's names, each by its table."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from isotype.core.errors import Problem
from isotype.train.dialects import axolotl, llama_factory
from isotype.train.dialects.reader import Reader

logger = logging.getLogger(__name__)
Dialect = Literal["axolotl", "llama_factory"]
_NEWER = frozenset(
    ("model_class", "peft_config", "dist_config", "train_dataset", "kernel_config", "sample_backend")
)
"""Names of LLaMA-Factory's second file format (its `examples/v1`)."""
_METHOD = ("stage", "rl", "reward_model")


def dialect_of(values: Mapping[str, Any]) -> Dialect | None:
    """Return the trainer of a file, by names that only one trainer has; None for isotype's own."""
    if "base_model" in values:
        return "axolotl"
    ours = {"stage", "finetuning_type", "template"} & set(values) or len(_NEWER & set(values)) > 1
    return "llama_factory" if ours else None


def translated(values: Mapping[str, Any], method: str, folder: Path) -> Reader:
    """Translate an axolotl or LLaMA-Factory file into arguments of `isotype METHOD`; raise ValueError for others.

    `folder` is the file's; relative paths are searched in the working folder, then there.
    """
    dialect = dialect_of(values)
    if dialect is None:
        raise ValueError("a file of no other trainer")
    room = axolotl if dialect == "axolotl" else llama_factory
    reader = Reader.of(dialect, values, method, folder)
    own = None if _newer_form(reader) else room.method_of(reader)
    if own is None:
        refused = {problem.given.partition(":")[0] for problem in reader.problems}
        reader.notes["not read, for what is refused"] = [name for name in reader.given if name not in refused]
    else:
        reader.method = own
        reader.apply_rules()
        room.topics(reader)
        reader.finish()
    if own not in (None, method):
        what = next((f"{name}: {reader.get(name)}" for name in _METHOD if reader.get(name)), "no rl")
        fix = f"isotype {own} --config …, with this file"
        reader.problems.append(Problem(what, f"a file for isotype {method}", fix))
    return reader


def _newer_form(reader: Reader) -> bool:
    """Return True if it is LLaMA-Factory's second file format, which is refused."""
    newer = sorted(_NEWER & reader.given.keys())
    for name in newer:
        expected = "LLaMA-Factory's first form (stage, finetuning_type, dataset, …)"
        reader.refuse(f"{name}: a name of its form v1", expected, "write the file in that form")
    return bool(newer)


def in_own_names(values: dict[str, Any], method: str, path: str) -> tuple[dict[str, Any], list[Problem]]:
    """Return the content of a file of `--config` in isotype's names, and its refused names; log unused ones."""
    if dialect_of(values) is None:
        return values, []
    reader = translated(values, method, Path(path).parent)
    logger.warning("%s: %s", path, reader.text())
    return reader.values, reader.problems

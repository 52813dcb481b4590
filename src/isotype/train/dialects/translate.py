"""Translates YAML files of axolotl and LLaMA-Factory into isotype's arguments, with the tables in tables.yaml."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from isotype.core.errors import Problem
from isotype.train.dialects import axolotl, llama_factory
from isotype.train.dialects.reader import Reader, tables

logger = logging.getLogger(__name__)
Dialect = Literal["axolotl", "llama_factory"]
_NEWER = {"model_class", "peft_config", "dist_config", "train_dataset", "kernel_config", "sample_backend"}
"""Names of LLaMA-Factory's second file format (the files in its `examples/v1`)."""
_METHOD = ("stage", "rl", "reward_model")
BY_HAND = "isotype check MODEL checks only a model; isotype {method} --help lists isotype's names"
_MODULES = {"axolotl": axolotl, "llama_factory": llama_factory}


def dialect_of(values: Mapping[str, Any]) -> Dialect | None:
    """Return the program whose names a file uses; None if the file uses isotype's names."""
    if "base_model" in values:
        return "axolotl"
    ours = {"stage", "finetuning_type"} & set(values) or len(_NEWER & set(values)) > 1
    ours = ours or ("template" in values and "model" not in values)  # ms-swift has `template` and `model`
    return "llama_factory" if ours else None


def method_of(values: Mapping[str, Any]) -> str:
    """Return the training method of a file. The method of a file that does not name a method is `sft`."""
    dialect = dialect_of(values)
    if dialect is None:
        return "sft"
    return _MODULES[dialect].method_of(Reader.of(dialect, values, "sft", Path())) or "sft"


def translated(
    dialect: Dialect, values: Mapping[str, Any], method: str, folder: Path, *, trains: bool = True
) -> Reader:
    """Translate a file of axolotl or LLaMA-Factory into arguments of `isotype METHOD`.

    Relative paths are looked up in the working directory, and then in the `folder` of the file. Unless `trains` is set,
    the data sets need not be on this machine.
    """
    module = _MODULES[dialect]
    reader = Reader.of(dialect, values, method, folder)
    reader.trains = trains
    newer = sorted(_NEWER & reader.given.keys())
    for name in newer:
        what = f"{name}: a name of LLaMA-Factory's second file format (v1)"
        expected = "LLaMA-Factory's first file format (stage, finetuning_type, dataset, …)"
        reader.refuse(what, expected, "write the file in the first format")
    requested = None if newer else module.method_of(reader)
    if requested is None:
        refused = {problem.given.partition(":")[0] for problem in reader.problems}
        left = [name for name in reader.given if name not in refused]
        reader.notes["not read, because other names are refused"] = left
    else:
        reader.method = requested
        reader.apply_rules()
        module.topics(reader)
        reader.finish()
    if requested not in (None, method):
        what = next((f"{name}: {reader.get(name)}" for name in _METHOD if reader.get(name)), "no rl")
        fix = f"run isotype {requested} --config with this file"
        reader.problems.append(Problem(what, f"a file for isotype {method}", fix))
    return reader


def other_program(values: Mapping[str, Any]) -> tuple[str, str] | None:
    """If the file is for a program whose files isotype does not translate, return this program and a fix, else None."""
    groups = (group for name, group in values.items() if isinstance(group, dict) and name != "deepspeed")
    named = set(values).union(*groups)
    program = next((about for name, about in tables()["others"].items() if name in named), None)
    return None if program is None else (program[0], program[1] if len(program) > 1 else BY_HAND)


def in_isotype_names(
    values: dict[str, Any], method: str, path: str, *, trains: bool
) -> tuple[dict[str, Any], list[Problem]]:
    """Return the values of a file by isotype's names, and a problem for each refused name. Log the names that are not used."""
    if other := other_program(values):
        expected = "a file of isotype, TRL, axolotl or LLaMA-Factory"
        return {}, [Problem(f"a file of {other[0]}", expected, other[1].format(path=path, method=method))]
    dialect = dialect_of(values)
    if dialect is None:
        return values, []
    reader = translated(dialect, values, method, Path(path).parent, trains=trains)
    logger.warning("%s: %s", path, reader.text())
    return reader.values, reader.problems

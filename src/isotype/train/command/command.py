"""A training command as a value: it is parsed once, changed by replacing values, and written as a command line or YAML."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from isotype.core.arguments import wrong_choice
from isotype.core.errors import Problem
from isotype.data.methods import METHODS

AUTO = "auto"
PLANNED = ("per_device_train_batch_size", "max_length", "quantization")
"""Arguments that accept `auto`: `isotype plan` for this machine then chooses the value."""
RECOMPUTE = ("gradient_checkpointing", "activation_checkpointing")
"""Gradient checkpointing and its newer name in transformers 5.23; with `auto`, the step's estimated memory decides."""

Holder = Literal["script", "training", "model", "dataset", "isotype"]
HOLDERS: tuple[Holder, ...] = ("script", "training", "model", "dataset", "isotype")
"""The dataclasses of a training's arguments, in the order of `Method.dataclass_types`."""

TABLE = Path(__file__).with_name("table.json")
_TRUE, _FALSE = ("yes", "true", "t", "y", "1"), ("no", "false", "f", "n", "0")


def boolean(text: str) -> bool:
    """Return True or False for a word that transformers accepts as a boolean; raise ValueError for any other."""
    word = text.lower()
    if word not in (*_TRUE, *_FALSE):
        raise ValueError(text)
    return word in _TRUE


_READERS: Mapping[str, tuple[Callable[[str], Any], tuple[type, ...], str, str]] = {
    "int": (int, (int,), "a whole number", "8"),
    "float": (float, (int, float), "a number", "0.1"),
    "bool": (boolean, (bool,), "True or False", "True"),
    "str": (str, (str, dict, list, int, float, bool), "a text", "VALUE"),
}
"""For each `Spec.kind`: parser, types accepted from YAML and Python; for messages: expected value, example."""


@dataclass(frozen=True)
class Spec:
    """An argument of a training command.

    Attributes:
        kind: `int`, `float`, `bool` or `str`.
        bare: `--name` alone means True.
        none: `none` means None.
        negated: `--no_name` means False.
    """

    name: str
    holder: Holder
    kind: str
    default: Any = None
    bare: bool = False
    many: bool = False
    none: bool = False
    negated: bool = False
    choices: tuple[Any, ...] = ()
    aliases: tuple[str, ...] = ()
    help: str = ""

    @property
    def flags(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((f"--{self.name}", f"--{self.name.replace('_', '-')}", *self.aliases)))

    def read(self, raw: Any) -> tuple[Any, Problem | None]:
        """Convert a text, or a value from YAML or Python; return (value, None), or (None, problem) for an invalid value."""
        if self.many and isinstance(raw, (list, tuple, set, frozenset)):
            items = sorted(raw) if isinstance(raw, (set, frozenset)) else raw
            read = [self._read_one(item) for item in items]
            return [value for value, _ in read], next((problem for _, problem in read if problem), None)
        value, problem = self._read_one(raw)
        return ([value] if self.many and not isinstance(value, str) and problem is None else value), problem

    def _read_one(self, raw: Any) -> tuple[Any, Problem | None]:
        convert, types, expected, example = _READERS[self.kind]
        if self.name in (*PLANNED, *RECOMPUTE) and isinstance(raw, str) and raw.lower() == AUTO:
            return AUTO, None
        if raw is None or (self.none and isinstance(raw, str) and raw.lower() in ("none", "null")):
            return None, None
        if self.kind == "bool" and raw in (0, 1):
            return bool(raw), None
        if raw is False and "no" in self.choices:
            return "no", None  # YAML reads a bare `no` as False
        if isinstance(raw, str):
            try:
                value = convert(raw)
            except ValueError:
                value = None
        else:
            right = isinstance(raw, types) and (bool in types or not isinstance(raw, bool))
            value = raw if right else None
        if value is None:
            example = example if self.default in (None, "") else self.default
            return None, Problem(f"--{self.name} {raw}", expected, f"--{self.name} {_word(example)}")
        if self.choices and value not in self.choices:
            return None, wrong_choice(f"--{self.name} {raw}", str(value), map(str, self.choices))
        return value, None


@cache
def specs(method: str) -> Mapping[str, Spec]:
    """Return a method's arguments by name: the fields of TRL's, transformers' and isotype's dataclasses."""
    entries: list[dict[str, Any]] = json.loads(TABLE.read_text(encoding="utf-8"))["arguments"]
    chosen = [entry for entry in entries if method in entry.pop("methods", METHODS)]
    for entry in chosen:
        entry |= {key: tuple(entry[key]) for key in ("choices", "aliases") if key in entry}
    return {entry["name"]: Spec(**entry) for entry in chosen}


_MEANT = frozenset((
    "gradient_checkpointing", "activation_checkpointing", "bf16", "fp16", "per_device_train_batch_size",
    "per_device_eval_batch_size", "output_dir", "eval_strategy", "eval_steps", "bnb_4bit_quant_type",
    "model_revision", "logging_nan_inf_filter", "accelerator_config", "lora_task_type",
))  # fmt: skip
"""Arguments that `to_yaml` writes even with their default value: isotype or TRL acts differently if they are given."""


@dataclass(frozen=True)
class Value:
    """A given value of an argument.

    Attributes:
        value: the converted value, or `auto`.
        texts: the words typed after the argument's name; None if `words` writes them from the value.
        origin: `command line`, `keyword`, or the path and line of a file; "" if isotype has chosen the value.
    """

    value: Any
    texts: tuple[str, ...] | None = None
    origin: str = ""

    def words(self) -> tuple[str, ...]:
        if self.texts is not None:
            return self.texts
        values = self.value if isinstance(self.value, (list, tuple)) else [self.value]
        return tuple(_word(value) for value in values)


def _word(value: Any) -> str:
    if isinstance(value, (dict, list)):
        return json.dumps(value)
    if isinstance(value, float) and float(short := f"{value:g}") == value:
        return short
    return "none" if value is None else str(value)


@dataclass(frozen=True)
class ConfigFile:
    """The file named by `--config`: its values by argument name, and the environment variables that it sets."""

    path: str
    values: Mapping[str, Value]
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Command:
    """A training command.

    Attributes:
        values: the given values by argument name, in order; any other argument has the default of its `Spec`.
        file: the configuration file; None if there is none.
        processes: number of processes that a launcher starts on one machine; 1 without a launcher.
    """

    method: str
    values: Mapping[str, Value]
    file: ConfigFile | None = None
    processes: int = 1

    def __contains__(self, name: str) -> bool:
        return name in self.values

    def __getitem__(self, name: str) -> Any:
        """Return the value of an argument or its default; None if the method has no such argument."""
        if name in self.values:
            return self.values[name].value
        spec = self.specs.get(name)
        return None if spec is None else spec.default

    def given(self, name: str) -> Any:
        return self.values[name].value if name in self.values else None

    @property
    def specs(self) -> Mapping[str, Spec]:
        return specs(self.method)

    @property
    def rows(self) -> int:
        """Rows in an optimizer step, over all micro-batches and processes; `auto` counts as the default batch size."""
        rows = self["per_device_train_batch_size"]
        rows = self.specs["per_device_train_batch_size"].default if rows == AUTO else rows
        return int(rows) * int(self["gradient_accumulation_steps"]) * self.processes

    @property
    def planned(self) -> tuple[str, ...]:
        """The arguments among `PLANNED` that are given as `auto`."""
        return tuple(name for name in PLANNED if self.given(name) == AUTO)

    def but(self, **values: Any) -> Command:
        """Return the command with other values; None restores the default."""
        result = {name: value for name, value in self.values.items() if values.get(name, value) is not None}
        for name, value in values.items():
            if value is not None and not (name in result and result[name].value == value):
                result[name] = Value(value)
        return replace(self, values=result)

    def tokens(self) -> tuple[str, ...]:
        command = ("isotype", self.method, *self.arguments())
        if self.processes > 1:
            command = ("torchrun", "--standalone", "--nproc_per_node", str(self.processes), "-m", *command)
        return (*self.environment(), *command)

    def environment(self) -> tuple[str, ...]:
        """Return `env NAME=VALUE …` for the variables of the config file; () if `arguments` names the file, which then sets them."""
        if self.file is None or not self.file.env or self._taken_back() is not None:
            return ()
        return ("env", *(f"{name}={value}" for name, value in self.file.env.items()))

    def arguments(self) -> tuple[str, ...]:
        """Return the words after `isotype METHOD`: all arguments, or `--config FILE` and values that differ from FILE."""
        config: tuple[str, ...] = ()
        written = self.values
        if self.file is not None and (taken_back := self._taken_back()) is not None:
            config = ("--config", self.file.path)
            of_file = self.file.values
            changed = {
                n: v for n, v in self.values.items() if n not in of_file or of_file[n].value != v.value
            }
            written = {**changed, **taken_back}
        return (*config, *(token for name, value in written.items() for token in self._written(name, value)))

    def _taken_back(self) -> dict[str, Value] | None:
        """Return the defaults that undo the file's arguments which this command lacks; None if one cannot be written."""
        assert self.file is not None
        missing = [name for name in self.file.values if name not in self.values]
        defaults = {name: self.specs[name].default for name in missing}
        writable = all(value is not None or self.specs[name].none for name, value in defaults.items())
        return {name: Value(value) for name, value in defaults.items()} if writable else None

    def _written(self, name: str, value: Value) -> tuple[str, ...]:
        words = value.words()
        if len(words) == 1 and words[0].startswith("-"):
            return (f"--{name}={words[0]}",)
        return (f"--{name}", *words)

    def to_yaml(self) -> str:
        """Return the command as the shortest equivalent file for `--config`, in the order of `specs`."""
        import yaml

        ordered = [
            name
            for name, spec in self.specs.items()
            if name in self.values and (name in _MEANT or self.values[name].value != spec.default)
        ]
        content = {name: self.values[name].value for name in ordered}
        if self.file is not None and self.file.env:
            content["env"] = dict(self.file.env)
        return str(yaml.safe_dump(content, sort_keys=False, allow_unicode=True))

    def same_settings(self, other: Command) -> bool:
        return (
            not self.difference(other) and self.method == other.method and self.processes == other.processes
        )

    def difference(self, other: Command) -> dict[str, tuple[Any, Any]]:
        """Return (this command's value, the other command's value) for each argument whose values differ."""
        names = dict.fromkeys((*self.values, *other.values))
        return {name: (self[name], other[name]) for name in names if self[name] != other[name]}


def with_dtype(command: Command, dtype: str | None) -> Command:
    """Return the command with `--dtype`, without arguments that contradict it; None: the checkpoint's dtype."""
    init = command.given("model_init_kwargs")
    of_file = {} if command.file is None else command.file.values
    values: dict[str, Any] = {"dtype": dtype}
    for flag, name in (("bf16", "bfloat16"), ("fp16", "float16")):
        if flag not in of_file or dtype is None:
            values[flag] = None
        elif name != dtype:
            values[flag] = False  # a flag of the file that agrees stays: False would exclude its dtype
    if isinstance(init, Mapping):
        config = init.get("quantization_config")
        rest = {key: value for key, value in init.items() if key not in ("dtype", "torch_dtype")}
        if isinstance(config, Mapping):
            rest["quantization_config"] = {k: v for k, v in config.items() if k != "bnb_4bit_compute_dtype"}
        values["model_init_kwargs"] = rest or None
    return command.but(**values)


def with_storage(command: Command, storage: str | None, memory: int | None = None) -> Command:
    """Return the command with `--quantization`, without other arguments for storage; None: stored in the compute dtype."""
    others = ("load_in_4bit", "load_in_8bit", "bnb_4bit_quant_type")
    size = None if memory is None else str(memory)
    return command.but(quantization=storage, base_memory=size, **dict.fromkeys(others))


def without_absent_device(command: Command, present: bool) -> Command:
    """Return the command; without `--device` if the checked device is not `present` in this machine."""
    return command if present or "device" not in command else command.but(device=None)

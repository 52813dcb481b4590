"""`Command`: a training command that cannot be changed. It can be copied with changes, and written as words or YAML."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Self

from isotype.core.arguments import wrong_choice, wrong_number
from isotype.core.errors import Problem
from isotype.core.formats import MIXED
from isotype.core.names import parse_size
from isotype.data.methods import METHODS

AUTO = "auto"
PLANNED = ("per_device_train_batch_size", "max_length", "quantization")
"""Arguments that accept `auto`. If the value is `auto`, the plan for this machine (`isotype plan`) chooses a value."""
RECOMPUTE = ("gradient_checkpointing", "activation_checkpointing")
"""Old and new name (transformers 5.23) of the argument for gradient checkpointing. With `auto`, the estimated memory decides."""

HOLDERS = ("script", "training", "model", "dataset")
"""Short names of TRL's dataclasses of arguments, in the order of `Method.dataclass_types`."""

TABLE, ADDED = (Path(__file__).with_name(name) for name in ("table.json", "added.json"))
"""The arguments of TRL and transformers, written by `tools.command_table`, and the arguments that isotype adds."""
_TRUE, _FALSE = ("yes", "true", "t", "y", "1"), ("no", "false", "f", "n", "0")


def boolean(text: str) -> bool:
    """Parse a boolean as transformers does. Raise ValueError for a word that transformers does not accept."""
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
"""Maps `Spec.kind` to (parser, types in YAML and Python, expected value in messages, example in messages)."""


@dataclass(frozen=True)
class Spec:
    """An argument of a training command.

    Attributes:
        holder: the TRL dataclass with the argument, one of `HOLDERS`; `added` for an argument that isotype adds.
        kind: `int`, `float`, `bool` or `str`.
        bare: True if `--name` without a value means True.
        none: True if the word `none` means None.
        negated: True if the flag `--no_name` exists and means False.
    """

    name: str
    holder: str
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
        """Convert a text, or a value from YAML or Python. Return (value, None), or (None, problem) if `raw` is invalid."""
        if self.many and isinstance(raw, (list, tuple, set, frozenset)):
            items = sorted(raw) if isinstance(raw, (set, frozenset)) else raw
            read = [self._read_one(item) for item in items]
            return [value for value, _ in read], next((problem for _, problem in read if problem), None)
        value, problem = self._read_one(raw)
        # `lora_target_modules` may also be one text, as its default is.
        alone = not self.many or value is None or isinstance(self.default, str)
        return (value if alone or problem is not None else [value]), problem

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
        if self.name == "scale_rewards" and (named := _SCALED.get(str(raw).lower())):
            return named, None
        if isinstance(raw, str):
            try:
                value = convert(raw)
            except ValueError:
                value = None
        else:
            right = isinstance(raw, types) and (bool in types or not isinstance(raw, bool))
            value = raw if right else None
        if value is None:
            example = example if self.default in (None, "", -1) else self.default
            flag = f"--{self.name}"
            problem = wrong_number(flag, str(raw), expected, _word(example))
            if self.bare and isinstance(raw, str) and ("/" in raw or Path(raw).exists()):
                # The flag needs no value: the word after it is the model or the data set.
                problem = replace(problem, swap=((flag, raw), (raw, flag)))
            return None, problem
        if self.choices and value not in self.choices:
            return None, wrong_choice(f"--{self.name} {raw}", str(value), map(str, self.choices))
        return value, None


_SCALED = {"true": "group", "false": "none"}
"""Maps the text of a boolean for `--scale_rewards`, in lower case, to TRL's name of this value."""


@cache
def specs(method: str) -> Mapping[str, Spec]:
    """Return a method's arguments by name: arguments of TRL and transformers, and arguments that isotype adds."""
    entries: list[dict[str, Any]] = json.loads(TABLE.read_text(encoding="utf-8"))["arguments"]
    entries += json.loads(ADDED.read_text(encoding="utf-8"))
    chosen = [entry for entry in entries if method in entry.pop("methods", METHODS)]
    for entry in chosen:
        entry |= {key: tuple(entry[key]) for key in ("choices", "aliases") if key in entry}
    return {entry["name"]: Spec(**entry) for entry in chosen}


_MEANT = frozenset((
    "gradient_checkpointing", "activation_checkpointing", "bf16", "fp16", "per_device_train_batch_size",
    "per_device_eval_batch_size", "output_dir", "eval_strategy", "eval_steps", "bnb_4bit_quant_type",
    "model_revision", "logging_nan_inf_filter", "accelerator_config", "lora_task_type",
))  # fmt: skip
"""`to_yaml` writes these arguments even if they have their default value, because an explicit default has another effect than no value."""


@dataclass(frozen=True)
class Value:
    """A value of an argument from the user or from isotype.

    Attributes:
        value: the converted value, or `auto`.
        texts: the words that the user typed after the argument's name, or None to derive the words from `value`.
    """

    value: Any
    texts: tuple[str, ...] | None = None

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
    """The content of the `--config` file: values by argument name, and environment variables."""

    path: str
    values: Mapping[str, Value]
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Command:
    """A training command.

    Attributes:
        values: the values that were set, by argument name, in order. All other arguments have the defaults of their `Spec`.
        processes: number of processes that a launcher starts on one machine; 1 without a launcher.
    """

    method: str
    values: Mapping[str, Value]
    file: ConfigFile | None = None
    processes: int = 1

    def __contains__(self, name: str) -> bool:
        return name in self.values

    def __getitem__(self, name: str) -> Any:
        """Return an argument's value (or its default), or None if the method has no such argument."""
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
        """Rows in an optimizer step, over all micro-batches and processes. `auto` counts as the default batch size."""
        rows = self["per_device_train_batch_size"]
        rows = self.specs["per_device_train_batch_size"].default if rows == AUTO else rows
        return int(rows) * int(self["gradient_accumulation_steps"]) * self.processes

    @property
    def least_rows(self) -> int:
        """Smallest valid number of rows in a micro-batch. KTO's loss compares each prompt with the answer of another row."""
        pairs = METHODS[self.method].loss == "unpaired" and self["loss_type"] != "apo_zero_unpaired"
        return 2 if pairs else 1

    @property
    def planned(self) -> tuple[str, ...]:
        return tuple(name for name in PLANNED if self.given(name) == AUTO)

    def but(self, **values: Any) -> Self:
        """Return a copy of the command with `values` changed. None restores the default of an argument."""
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
        """Return `env NAME=VALUE …` with the config file's variables, or () if the command has `--config FILE`."""
        if self.file is None or not self.file.env or self._restored_defaults() is not None:
            return ()
        return ("env", *(f"{name}={value}" for name, value in self.file.env.items()))

    def arguments(self) -> tuple[str, ...]:
        """Return the words after `isotype METHOD`: all arguments, or `--config FILE` and the values that FILE does not set."""
        config: tuple[str, ...] = ()
        written = self.values
        if self.file is not None and (restored := self._restored_defaults()) is not None:
            config, of_file = ("--config", self.file.path), self.file.values
            same = {name for name, value in of_file.items() if name in self and self[name] == value.value}
            written = {**{n: v for n, v in self.values.items() if n not in same}, **restored}
        return (*config, *(token for name, value in written.items() for token in self._written(name, value)))

    def _restored_defaults(self) -> dict[str, Value] | None:
        """Return the defaults of arguments that only the config file sets. They are written after `--config`.

        Return None if one of these defaults cannot be written as a word.
        """
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
        """Return the command as a `--config` file, as short as possible and in the order of `specs`."""
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

    def same_settings(self, other: Self) -> bool:
        same = self.method == other.method and self.processes == other.processes
        return same and not self.difference(other)

    def difference(self, other: Self) -> dict[str, tuple[Any, Any]]:
        """Return the arguments whose values differ, as a dictionary: name -> (value in this command, value in `other`)."""
        names = dict.fromkeys((*self.values, *other.values))
        return {name: (self[name], other[name]) for name in names if self[name] != other[name]}


def with_dtype(command: Command, dtype: str | None) -> Command:
    """Set `--dtype`, and remove arguments that contradict it. None requests the checkpoint's dtype."""
    init = command.given("model_init_kwargs")
    of_file = {} if command.file is None else command.file.values
    values: dict[str, Any] = {"dtype": dtype}
    for flag, name in (("bf16", "bfloat16"), ("fp16", "float16")):
        if flag not in of_file or dtype is None:
            values[flag] = None
        elif name != dtype:
            values[flag] = False
        # The flag of `dtype` itself keeps its value: False would exclude `dtype`.
    if isinstance(init, Mapping):
        rest = {key: value for key, value in init.items() if key not in ("dtype", "torch_dtype")}
        if isinstance(config := init.get("quantization_config"), Mapping):
            rest["quantization_config"] = {k: v for k, v in config.items() if k != "bnb_4bit_compute_dtype"}
        values["model_init_kwargs"] = rest or None
    return command.but(**values)


def with_storage(command: Command, storage: str | None, memory: int | None = None) -> Command:
    """Set `--quantization`, and remove other storage arguments. None stores weights in the compute dtype.

    With `memory` (bytes), the storage is `mixed`, and `--base_memory` is `memory`.
    """
    others = ("load_in_4bit", "load_in_8bit", "bnb_4bit_quant_type")
    size = None
    if memory is not None:
        storage, typed = MIXED, str(command["base_memory"])
        size = typed if parse_size(typed) == memory else str(memory)
    return command.but(quantization=storage, base_memory=size, **dict.fromkeys(others))


def without_absent_device(command: Command, present: bool) -> Command:
    """Remove `--device` from the command if this machine does not have the device (`present` is False)."""
    return command if present or "device" not in command else command.but(device=None)

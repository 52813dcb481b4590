"""A training command as a value: parsed once, changed by replacing values, written as a command line or as YAML."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from isotype.data.methods import METHODS, Method
from isotype.train.command.spec import AUTO, PLANNED, Spec, specs

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


@dataclass(frozen=True)
class Value:
    """A value that somebody gave.

    Attributes:
        value: as the argument takes it; `auto` where it is to be chosen.
        texts: the words behind its name as they were typed; None where it is written from the value.
        origin: where it is from: `command line`, a file and line, `keyword`; "" of a value that isotype chose.
    """

    value: Any
    texts: tuple[str, ...] | None = None
    origin: str = ""

    def words(self) -> tuple[str, ...]:
        """What stands behind the name on a command line."""
        if self.texts is not None:
            return self.texts
        values = self.value if isinstance(self.value, (list, tuple)) else [self.value]
        return tuple(_word(each) for each in values)


def _word(value: Any) -> str:
    if isinstance(value, (dict, list)):
        return json.dumps(value)
    if isinstance(value, float) and float(short := f"{value:g}") == value:
        return short
    return "none" if value is None else str(value)


@dataclass(frozen=True)
class ConfigFile:
    """The file of `--config`.

    Attributes:
        path: as it was typed.
        values: what it says, by the names of arguments.
        env: variables that it sets.
    """

    path: str
    values: Mapping[str, Value]
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Command:
    """One training command.

    Attributes:
        method: name of the training method.
        values: what was given, by name, in the order in which it was; what is not here has the default of its `Spec`.
        file: the configuration that it was read from; None without one.
        processes: how many processes of one machine train together, which a launcher starts; 1 without one.
    """

    method: str
    values: Mapping[str, Value]
    file: ConfigFile | None = None
    processes: int = 1

    def __contains__(self, name: str) -> bool:
        return name in self.values

    def __getitem__(self, name: str) -> Any:
        """The value of an argument, its default where none was given; None where the method has no such argument."""
        if name in self.values:
            return self.values[name].value
        spec = self.specs.get(name)
        return None if spec is None else spec.default

    def given(self, name: str) -> Any:
        """The value that somebody gave, or None."""
        return self.values[name].value if name in self.values else None

    @property
    def specs(self) -> Mapping[str, Spec]:
        """The arguments that its method takes."""
        return specs(self.method)

    @property
    def rows(self) -> int:
        """Rows of an optimizer step: of all micro-batches and processes; of `auto` rows, those of the default."""
        rows = self["per_device_train_batch_size"]
        rows = self.specs["per_device_train_batch_size"].default if rows == AUTO else rows
        return int(rows) * int(self["gradient_accumulation_steps"]) * self.processes

    @property
    def planned(self) -> tuple[str, ...]:
        """The arguments that a plan of the machine is to choose."""
        return tuple(name for name in PLANNED if self.given(name) == AUTO)

    def of(self) -> Method:
        """The training method."""
        return METHODS[self.method]

    def but(self, **values: Any) -> Command:
        """The command with other values; None takes a value out, so that its default holds."""
        kept = {name: value for name, value in self.values.items() if values.get(name, value) is not None}
        for name, value in values.items():
            if value is not None and not (name in kept and kept[name].value == value):
                kept[name] = Value(value)
        return replace(self, values=kept)

    def with_processes(self, count: int) -> Command:
        """The command that so many processes of one machine run together."""
        return replace(self, processes=count)

    def tokens(self) -> tuple[str, ...]:
        """The command line, `isotype` first; behind a launcher where there are several processes.

        Of a command from a file: the file and what differs from it; all of it, where a value of the file cannot be taken back in words.
        """
        launcher = (
            ("torchrun", "--standalone", "--nproc_per_node", str(self.processes), "-m")
            if self.processes > 1
            else ()
        )
        return (*self.environment(), *launcher, "isotype", self.method, *self.arguments())

    def environment(self) -> tuple[str, ...]:
        """What sets the variables of the file's `env` in front of a command line that cannot name the file; else nothing."""
        if self.file is None or not self.file.env or self._taken_back() is not None:
            return ()
        return ("env", *(f"{name}={value}" for name, value in self.file.env.items()))

    def arguments(self) -> tuple[str, ...]:
        """The command line behind `isotype METHOD`."""
        kept: tuple[str, ...] = ()
        written = self.values
        if self.file is not None and (taken_back := self._taken_back()) is not None:
            kept = ("--config", self.file.path)
            of_file = self.file.values
            changed = {
                n: v for n, v in self.values.items() if n not in of_file or of_file[n].value != v.value
            }
            written = {**changed, **taken_back}
        return (*kept, *(token for name, value in written.items() for token in self._written(name, value)))

    def _taken_back(self) -> dict[str, Value] | None:
        """The defaults of what the file says and the command does not; None where one of them has no words."""
        assert self.file is not None
        missing = [name for name in self.file.values if name not in self.values]
        defaults = {name: self.specs[name].default for name in missing}
        speakable = all(value is not None or self.specs[name].none for name, value in defaults.items())
        return {name: Value(value) for name, value in defaults.items()} if speakable else None

    def _written(self, name: str, value: Value) -> tuple[str, ...]:
        words = value.words()
        if len(words) == 1 and words[0].startswith("-"):
            return (f"--{name}={words[0]}",)
        return (f"--{name}", *words)

    def to_yaml(self) -> str:
        """The command as the shortest file for `--config` that means the same, by topics."""
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
        """Whether two commands train alike: the same method and values, however they were written."""
        return (
            not self.difference(other) and self.method == other.method and self.processes == other.processes
        )

    def difference(self, other: Command) -> dict[str, tuple[Any, Any]]:
        """The arguments whose values differ -> (this one's, the other's)."""
        names = dict.fromkeys((*self.values, *other.values))
        return {name: (self[name], other[name]) for name in names if self[name] != other[name]}


def with_dtype(command: Command, dtype: str | None) -> Command:
    """The command that computes in a dtype, by one argument alone; None: as the checkpoint was trained."""
    init = command.given("model_init_kwargs")
    of_file = {} if command.file is None else command.file.values
    # A flag of a file is switched off: beside the dtype, that rules out nothing else.
    values: dict[str, Any] = {
        name: False if name in of_file and dtype is not None else None for name in ("bf16", "fp16")
    }
    values["dtype"] = dtype
    if isinstance(init, Mapping):
        config = init.get("quantization_config")
        rest = {key: value for key, value in init.items() if key not in ("dtype", "torch_dtype")}
        if isinstance(config, Mapping):
            rest["quantization_config"] = {k: v for k, v in config.items() if k != "bnb_4bit_compute_dtype"}
        values["model_init_kwargs"] = rest or None
    return command.but(**values)


def with_storage(command: Command, storage: str | None, memory: int | None = None) -> Command:
    """The command whose base is stored so, by one argument alone; None: in the compute dtype."""
    others = ("load_in_4bit", "load_in_8bit", "bnb_4bit_quant_type")
    size = None if memory is None else str(memory)
    return command.but(quantization=storage, base_memory=size, **dict.fromkeys(others))


def here(command: Command, present: bool) -> Command:
    """The command for the device that was judged: the name of one that is not in this machine means nothing there."""
    return command if present or "device" not in command else command.but(device=None)

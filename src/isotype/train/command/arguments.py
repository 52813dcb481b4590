"""Valid values of a training command's arguments, and the short help.

Importing this module does not import torch, so that `isotype sft --help` is fast.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from isotype.core.arguments import wrong_choice
from isotype.core.errors import Problem
from isotype.core.names import grouped
from isotype.core.tables import table
from isotype.data.methods import METHODS, Loss

Read = Callable[[str], Any]
"""Function that takes the name of an argument and returns its value, or None if the method has no such argument."""


@dataclass(frozen=True)
class Limit:
    """The valid numbers of an argument, from `least` to `most`. `above` excludes `least`, and `below` excludes `most`."""

    least: float
    most: float = math.inf
    above: bool = False
    below: bool = False
    fix: str = ""

    def takes(self, value: float) -> bool:
        low = value > self.least if self.above else value >= self.least
        high = value < self.most if self.below else value <= self.most
        return math.isfinite(value) and low and high

    def words(self) -> str:
        low = f"more than {self.least:g}" if self.above else f"at least {self.least:g}"
        if self.most == math.inf:
            return low
        return f"{low}, {'less than' if self.below else 'at most'} {self.most:.10g}"


@dataclass(frozen=True)
class Argument:
    """Facts about an argument that TRL's dataclasses do not contain.

    Attributes:
        group: heading above the argument in the short help, or "" if the short help omits the argument.
        example, text: an example value and a short description for the short help.
        losses: losses (`Method.loss`) of the methods whose short help lists the argument; () for all methods.
        choices_of: dotted name of another library's enumeration or registry of valid names. Set if the library checks the
            argument only after the model is loaded.
        more: valid names that are not in `choices_of`.
        lower: True if users write the names of `choices_of` in lower case.
        json: an example value for an argument that takes a JSON object.
    """

    name: str
    group: str = ""
    example: str = ""
    text: str = ""
    losses: Sequence[Loss] = ()
    limit: Limit | None = None
    choices_of: str = ""
    more: Sequence[str] = ()
    lower: bool = False
    json: Mapping[str, Any] | None = None

    @property
    def choices(self) -> list[str]:
        module, _, name = self.choices_of.rpartition(".")
        names = [str(getattr(item, "value", item)) for item in getattr(import_module(module), name)]
        return [*self.more, *(name.lower() if self.lower else name for name in names)]


_TABLE: Any = table(__file__)
_LIMITS = {name: Limit(**limit) for name, limit in _TABLE["limits"].items()}
_COUNT = _LIMITS["count"]  # products of such counts fit into 64 bits


def _argument(limit: Any = None, **values: Any) -> Argument:
    named = _LIMITS[limit] if isinstance(limit, str) else limit and Limit(**limit)
    return Argument(**values, limit=named)


ARGUMENTS = tuple(_argument(**entry) for entry in _TABLE["arguments"])
"""Facts about arguments. The order of `ARGUMENTS` is the order in which problems with arguments are reported."""


def count_problems(counts: Mapping[str, Any]) -> list[Problem]:
    """Return a problem for each whole number that is out of range. The parser reports values of other types."""
    wrong = ((name, n) for name, n in counts.items() if isinstance(n, int) and not _COUNT.takes(n))
    return [Problem(f"--{name} {n}", _COUNT.words(), _COUNT.fix) for name, n in wrong]


def number_problems(read: Read) -> Iterator[Problem]:
    """Yield a problem for each number that is out of range, and for impossible numbers of steps or epochs."""
    adapters = read("use_peft") is not False
    for argument in ARGUMENTS:
        name, limit = argument.name, argument.limit
        if limit is None or (name.startswith("lora_") and not adapters):
            continue
        what, _, unit = name.partition("_")
        strategy = read(f"{what}_strategy")
        if unit == "steps" and strategy not in (None, "steps"):
            continue
        value = _number(read(name))
        if value is not None and not limit.takes(value):
            yield Problem(f"--{name} {read(name)}", limit.words(), limit.fix)
    steps, epochs = _number(read("max_steps")), _number(read("num_train_epochs"))
    if steps is not None and steps < 1 and steps != -1:
        meant = f"--max_steps {-steps:g}, or " if steps < -1 else ""
        fix = f"{meant}omit --max_steps to train for --num_train_epochs"
        yield Problem(f"--max_steps {steps:g}", "at least 1 step, or -1 for whole epochs", fix)
    elif epochs is not None and (steps is None or steps < 1) and not 0 < epochs < math.inf:
        yield Problem(f"--num_train_epochs {epochs:g}", "a finite number, more than 0", "3 is the default")


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or value is None:
        return None
    try:
        return float(value)  # YAML reads 1e-4 as text
    except (TypeError, ValueError):
        return None


def name_problems(read: Read) -> Iterator[Problem]:
    """Yield a problem for each unknown name that another library would report only after the model is loaded."""
    for argument in ARGUMENTS:
        if not argument.choices_of:
            continue
        value = read(argument.name)
        for choice in value if isinstance(value, (list, tuple)) else [value]:
            # A kernel of the hub is named by its repository, `owner/name` or `paged|owner/name`.
            named = isinstance(choice, str) and "/" not in choice
            if named and not {choice, choice.lower()} & {*argument.choices}:
                yield wrong_choice(f"--{argument.name} {choice}", choice, argument.choices)


def common_arguments(method: str) -> dict[str, list[Argument]]:
    loss = METHODS[method].loss
    common = (a for a in ARGUMENTS if a.group and loss in (a.losses or (loss,)))
    return grouped(common, lambda argument: argument.group)


def short_help(method: str) -> str:
    """Return help that fits on one screen of 80 columns."""
    lines = [f"usage: isotype {method} --model_name_or_path MODEL --dataset_name DATA […]", ""]
    for group, arguments in common_arguments(method).items():
        lines.append(f"{group}:")
        for argument in arguments:
            flag = f"  --{argument.name} {argument.example}"
            lines.append(f"{flag:<41} {argument.text}".rstrip())
    lines += [
        "",
        "-q prints less, -v prints more. --print-config prints the command as a file for",
        "--config and does not train. --help-all lists every argument, also those of",
        f"trl {method}. isotype check {method} … checks the run without starting it.",
    ]
    return "\n".join(lines) + "\n"

"""The numbers and names that a training argument takes, as data; read before anything is loaded."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from isotype.core.arguments import wrong_choice
from isotype.core.errors import Problem

Read = Callable[[str], Any]
"""The value of an argument by its name; None where it was not given or the method has none."""


@dataclass(frozen=True)
class Limit:
    """The numbers that an argument takes: from `least` (`above`: more than it) to `most` (`below`: less than it)."""

    least: float
    most: float = math.inf
    above: bool = False
    below: bool = False
    fix: str = ""

    def takes(self, value: float) -> bool:
        """Whether `value` is one of them; NaN and infinity never are."""
        low = value > self.least if self.above else value >= self.least
        high = value < self.most if self.below else value <= self.most
        return math.isfinite(value) and low and high

    def words(self) -> str:
        """The limits in words."""
        low = f"more than {self.least:g}" if self.above else f"at least {self.least:g}"
        return (
            low
            if self.most == math.inf
            else f"{low}, {'less than' if self.below else 'at most'} {self.most:.10g}"
        )


_COUNT = Limit(1, fix="give at least 1")
_NOT_NEGATIVE = Limit(0, fix="give 0 or more")
_SEED = Limit(0, 2**32 - 1, fix="give a number within these")
_EVERY = Limit(0, above=True, fix="a number of steps, or a share of them below 1")
_SHARE = Limit(0, 1, below=True, fix="give a share of 1")

LIMITS: dict[str, Limit] = {
    "learning_rate": Limit(0, 1e3, fix="1e-4 is a common start"),
    **dict.fromkeys(
        (
            "per_device_train_batch_size",
            "per_device_eval_batch_size",
            "gradient_accumulation_steps",
            "max_length",
            "max_completion_length",
            "steps_per_generation",
            "generation_batch_size",
            "num_iterations",
            "dataset_num_proc",
            "early_stopping_patience",
        ),
        _COUNT,
    ),
    **dict.fromkeys(
        (
            "warmup_steps",
            "weight_decay",
            "adam_epsilon",
            "dataloader_num_workers",
            "neftune_noise_alpha",
            "beta",
            "epsilon",
            "eval_delay",
            "early_stopping_threshold",
        ),
        _NOT_NEGATIVE,
    ),
    **dict.fromkeys(("seed", "data_seed"), _SEED),
    **dict.fromkeys(("logging_steps", "save_steps", "eval_steps"), _EVERY),
    **dict.fromkeys(("adam_beta1", "adam_beta2", "label_smoothing_factor"), _SHARE),
    "label_smoothing": Limit(0, 0.5, fix="the share of pairs whose order is wrong"),
    "temperature": Limit(0, above=True, fix="1 is the method's own"),
    "top_p": Limit(0, 1, above=True, fix="1 keeps every token"),
    "num_generations": Limit(2, fix="give at least 2: a completion is compared with others of its prompt"),
}
LORA_LIMITS: dict[str, Limit] = {
    "lora_r": _COUNT,
    "lora_alpha": Limit(0, above=True, fix="twice --lora_r is a common choice; at 0 an adapter does nothing"),
    "lora_dropout": Limit(0, 1, below=True, fix="0 to 0.1 is common; at 1 nothing reaches the adapter"),
}


def number_problems(read: Read) -> Iterator[Problem]:
    """What is wrong with the numbers of a training command, each by itself and the length of the training."""
    adapters = {} if read("use_peft") is False else LORA_LIMITS
    for name, limit in {**LIMITS, **adapters}.items():
        what, _, unit = name.partition("_")
        strategy = read(f"{what}_strategy")
        if unit == "steps" and strategy is not None and getattr(strategy, "value", strategy) != "steps":
            continue
        value = _number(read(name))
        if value is not None and not limit.takes(value):
            yield Problem(f"--{name} {read(name)}", limit.words(), limit.fix)
    yield from _length_problems(read)


def _length_problems(read: Read) -> Iterator[Problem]:
    steps, epochs = _number(read("max_steps")), _number(read("num_train_epochs"))
    if steps is not None and steps < 1 and steps != -1:
        meant = f"--max_steps {-steps:g}, or " if steps < -1 else ""
        fix = f"{meant}leave it out to train for --num_train_epochs"
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
    """What is wrong with the names of things that other libraries look up long after the model is loaded."""
    for name, known in _KNOWN.items():
        value = read(name)
        for each in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(each, str) and not _is_known(each, choices := known()):
                yield wrong_choice(f"--{name} {each}", each, choices)


def _is_known(name: str, choices: list[str]) -> bool:
    # A kernel of the hub is named by its repository, `owner/name` or `paged|owner/name`.
    return name in choices or name.lower() in choices or "/" in name


def _reporters() -> list[str]:
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

    return ["none", "all", *INTEGRATION_TO_CALLBACK]


def _attentions() -> list[str]:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    return ["eager", *ALL_ATTENTION_FUNCTIONS.valid_keys()]


def _task_types() -> list[str]:
    from peft import TaskType

    return [each.value for each in TaskType]


def _compilers() -> list[str]:
    from accelerate.utils import DynamoBackend

    return [each.value.lower() for each in DynamoBackend]


_KNOWN: dict[str, Callable[[], list[str]]] = {
    "report_to": _reporters,
    "attn_implementation": _attentions,
    "lora_task_type": _task_types,
    "torch_compile_backend": _compilers,
}

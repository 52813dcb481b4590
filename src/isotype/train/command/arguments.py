"""Facts about the arguments of a training command: valid numbers, names and JSON, and the short help.

Importing this module does not import torch, so that `isotype sft --help` is fast.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from isotype.core.arguments import wrong_choice
from isotype.core.errors import Problem
from isotype.core.names import grouped
from isotype.data.methods import METHODS, Loss

Read = Callable[[str], Any]
"""Function that takes an argument's name and returns its value, or None if the method has no such argument."""


@dataclass(frozen=True)
class Limit:
    """The range of valid numbers for an argument. `above` excludes `least` itself; `below` excludes `most` itself."""

    least: float
    most: float = math.inf
    above: bool = False
    below: bool = False
    fix: str = ""

    def takes(self, value: float) -> bool:
        """Return True if `value` is finite and in the range."""
        low = value > self.least if self.above else value >= self.least
        high = value < self.most if self.below else value <= self.most
        return math.isfinite(value) and low and high

    def words(self) -> str:
        low = f"more than {self.least:g}" if self.above else f"at least {self.least:g}"
        if self.most == math.inf:
            return low
        return f"{low}, {'less than' if self.below else 'at most'} {self.most:.10g}"


_COUNT = Limit(1, 10**7, fix="give a number in this range")  # their products stay within 64 bits
_NOT_NEGATIVE = Limit(0, fix="give 0 or more")
_SEED = Limit(0, 2**32 - 1, fix="give a number in this range")
_EVERY = Limit(0, above=True, fix="give a number of steps, or a share of all steps below 1")
_GROUP = Limit(2, fix="give at least 2: a completion is compared with others of its prompt")
_SCALE = Limit(0, above=True, fix="twice --lora_r is a common choice; at 0 an adapter does nothing")
_DROPOUT = Limit(0, 1, below=True, fix="0 to 0.1 is common; at 1 nothing reaches the adapter")
_SHARE = Limit(0, 1, below=True, fix="give a share between 0 and 1")


def _names(module: str, name: str, what: Callable[[Any], list[str]] = list) -> Callable[[], list[str]]:
    """Return a function that imports the object `module.name` and returns the list of names that `what` gets from it."""
    return lambda: what(getattr(import_module(module), name))


@dataclass(frozen=True)
class Argument:
    """Facts about an argument that are not in TRL's dataclasses.

    Attributes:
        group: heading above the argument in the short help, or "" if the short help leaves the argument out.
        example, text: an example value and a short description for the short help.
        losses: values of `Method.loss`; the short help lists the argument for these methods, or for all if empty.
        choices: returns the valid names, if another library checks the argument only after the model is loaded.
        json: an example value for an argument that takes a JSON object.
    """

    name: str
    group: str = ""
    example: str = ""
    text: str = ""
    losses: tuple[Loss, ...] = ()
    limit: Limit | None = None
    choices: Callable[[], list[str]] | None = None
    json: str = ""


def _limited(limit: Limit, names: str) -> Iterator[Argument]:
    return (Argument(name, limit=limit) for name in names.split())


_NOT_RL: tuple[Loss, ...] = ("labels", "preference", "reward", "unpaired")
_COMPARED: tuple[Loss, ...] = ("preference", "unpaired")

ARGUMENTS: tuple[Argument, ...] = (
    Argument("model_name_or_path", "model and data", "MODEL", "directory, GGUF, hub id, or an adapter"),
    Argument("dataset_name", "model and data", "DATA", "JSONL, CSV, parquet, directory, hub id"),
    Argument("columns", "model and data", "alpaca", "or prompt=question,completion=answer"),
    Argument("eval_split", "model and data", "0.05", "share of rows held back for evaluation"),
    Argument("output_dir", "model and data", "DIR", "adapter, checkpoints, report"),
    Argument("quantization", "precision", "nf4", "storage: nf4, fp4, int8, mxfp4, mixed"),
    Argument("dtype", "precision", "bfloat16", "compute dtype; auto by default"),
    Argument("device", "precision", "cuda", "auto, cpu, cuda, mps, xpu"),
    Argument("learning_rate", "training", "2e-4", limit=Limit(0, 1e3, fix="1e-4 is a common start")),
    Argument("num_train_epochs", "training", "3", "or --max_steps N"),
    Argument("per_device_train_batch_size", "training", "8", "rows in a batch", limit=_COUNT),
    Argument("per_device_eval_batch_size", limit=_COUNT),
    Argument("gradient_accumulation_steps", "training", "1", "micro-batches in a step", limit=_COUNT),
    Argument("max_length", "training", "1024", "tokens; longer rows are cut", _NOT_RL, _COUNT),
    Argument("gradient_checkpointing", "training", "auto", "True: less memory, a slower step"),
    Argument("packing", "training", "True", "join short rows into longer ones", ("labels",)),
    Argument(
        "beta", "training", "0.1", "higher: nearer to the reference model", _COMPARED, limit=_NOT_NEGATIVE
    ),
    Argument("reward_funcs", "training", "my_rewards.length", "or accuracy_reward, …", ("policy",)),
    Argument("num_generations", "training", "8", "completions of each prompt", ("policy",), _GROUP),
    Argument("max_completion_length", "training", "256", "tokens of a completion", ("policy",), _COUNT),
    *_limited(
        _COUNT, "steps_per_generation generation_batch_size num_iterations dataset_num_proc tokens_per_step"
    ),
    Argument("lora_r", "adapter", "16", "rank of the adapters", limit=_COUNT),
    Argument("lora_alpha", "adapter", "32", "adapters' scale: alpha / rank", limit=_SCALE),
    Argument("lora_dropout", limit=_DROPOUT),
    Argument("lora_target_modules", "adapter", "all-linear", "or names: q_proj v_proj"),
    Argument(
        "lora_task_type", choices=_names("peft", "TaskType", lambda kinds: [kind.value for kind in kinds])
    ),
    Argument("adapt", "adapter", "language", "or projector, vision, all"),
    Argument("use_dora", "adapter", "True"),
    Argument("init_lora_weights", "adapter", "loftq", "or pissa, olora, gaussian, orthogonal"),
    Argument("use_peft", "adapter", "False", "train every weight"),
    Argument(
        "early_stopping_patience",
        "progress and results",
        "3",
        "evaluations before an early stop",
        limit=_COUNT,
    ),
    Argument("early_stopping_threshold", limit=_NOT_NEGATIVE),
    Argument("save_steps", "progress and results", "500", "steps between checkpoints", limit=_EVERY),
    Argument("resume_from_checkpoint", "progress and results", "true", "the newest complete checkpoint"),
    Argument("logging_steps", "progress and results", "10", "steps between lines of output", limit=_EVERY),
    Argument("eval_steps", limit=_EVERY),
    Argument(
        "report_to",
        "progress and results",
        "wandb",
        "tensorboard, wandb, trackio, mlflow",
        choices=_names(
            "transformers.integrations.integration_utils",
            "INTEGRATION_TO_CALLBACK",
            lambda names: ["none", "all", *names],
        ),
    ),
    Argument("push_to_hub", "progress and results", "True", "upload the result"),
    Argument("config", "progress and results", "FILE.yaml", "arguments as name: value lines"),
    *_limited(
        _NOT_NEGATIVE, "warmup_steps weight_decay adam_epsilon dataloader_num_workers neftune_noise_alpha"
    ),
    *_limited(_NOT_NEGATIVE, "epsilon eval_delay"),
    *_limited(_SEED, "seed data_seed"),
    *_limited(_SHARE, "adam_beta1 adam_beta2 label_smoothing_factor"),
    Argument("label_smoothing", limit=Limit(0, 0.5, fix="give the share of wrongly ordered pairs")),
    Argument("temperature", limit=Limit(0, above=True, fix="1 is the default")),
    Argument("top_p", limit=Limit(0, 1, above=True, fix="1 keeps every token")),
    Argument(
        "attn_implementation",
        choices=_names(
            "transformers.modeling_utils",
            "ALL_ATTENTION_FUNCTIONS",
            lambda functions: ["eager", *functions.valid_keys()],
        ),
    ),
    Argument(
        "torch_compile_backend",
        choices=_names(
            "accelerate.utils", "DynamoBackend", lambda kinds: [kind.value.lower() for kind in kinds]
        ),
    ),
    Argument("model_init_kwargs", json='{"attn_implementation": "eager"}'),
    Argument("lr_scheduler_kwargs", json='{"num_cycles": 2}'),
    Argument("gradient_checkpointing_kwargs", json='{"use_reentrant": false}'),
    Argument("activation_checkpointing_kwargs", json='{"use_reentrant": false}'),
    Argument("accelerator_config", json='{"split_batches": true}'),
    Argument("fsdp_config", json='{"version": 2}'),
    Argument("dataset_kwargs", json='{"skip_prepare_dataset": true}'),
    Argument("generation_kwargs", json='{"top_k": 50}'),
    Argument("chat_template_kwargs", json='{"enable_thinking": false}'),
    Argument("liger_kernel_config", json='{"rope": false}'),
    Argument("transformers_continuous_batching_config", json='{"max_batch_tokens": 4096}'),
)
"""Facts about arguments. The order of `ARGUMENTS` is the order in which problems with arguments are reported."""


def count_problems(counts: Mapping[str, Any]) -> list[Problem]:
    """Return a problem for each count that is out of range. The parser reports values that are not whole numbers."""
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
    """Yield a problem for each unknown name that another library would report only after loading the model."""
    for argument in ARGUMENTS:
        if argument.choices is None:
            continue
        value = read(argument.name)
        for choice in value if isinstance(value, (list, tuple)) else [value]:
            # A kernel of the hub is named by its repository, `owner/name` or `paged|owner/name`.
            if isinstance(choice, str) and "/" not in choice:
                choices = argument.choices()
                if not {choice, choice.lower()} & {*choices}:
                    yield wrong_choice(f"--{argument.name} {choice}", choice, choices)


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

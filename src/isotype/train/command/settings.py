"""Builds TRL's dataclasses and a precision request from a training command."""

import copy
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

import torch

from isotype.checkpoint.adapter import Adapter
from isotype.compat.transformers import train_on_first_gpu
from isotype.core.errors import PrecisionError, Problem, UsageError, one_line
from isotype.data.methods import METHODS, Method
from isotype.precision.decide import PrecisionRequest
from isotype.precision.devices.profile import device_profile
from isotype.train.command.arguments import number_problems
from isotype.train.command.command import AUTO, HOLDERS, RECOMPUTE, Command, specs
from isotype.train.command.parse import MODELS, value_problems
from isotype.train.command.precision import read_precision_request
from isotype.train.launched import Sharding, processes
from isotype.train.libraries import require_names


@dataclass(frozen=True)
class Settings:
    """A command and the dataclasses of its trainer. A Settings object is never changed in place. Its method `but`
    returns a changed copy.

    `settings.NAME` is the value of an argument in any of the dataclasses.

    Attributes:
        sharding: how the model is sharded over processes, or None if it is not sharded.
        start: the adapter to train further, or None for a new adapter. The field `model` then has the name of this adapter's
            base model.
        auto_checkpointing: True if the estimated memory of the step decides about gradient checkpointing. Before this decision,
            gradient checkpointing is on in `training`.
        decided: values that isotype decides in the run, by argument name. These values replace values of the command.
    """

    command: Command
    script: Any
    training: Any
    model: Any
    dataset: Any
    added: Mapping[str, Any]
    precision: PrecisionRequest
    sharding: Sharding | None = None
    start: Adapter | None = None
    auto_checkpointing: bool = False
    decided: Mapping[str, Any] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        if name not in _NAMES:
            raise AttributeError(f"{name} is not an argument of a training")
        return self.value(name)

    def value(self, name: str) -> Any:
        """Return an argument's value: isotype's decision, the user's value, or the default; None if the method lacks the argument."""
        spec = self.command.specs.get(name)
        if spec is None or spec.holder == "added":
            return self.added.get(name)
        value = getattr(getattr(self, spec.holder), name, None)
        return getattr(value, "value", value)  # of an enumeration of transformers

    @property
    def method(self) -> Method:
        return METHODS[self.command.method]

    @property
    def data_name(self) -> str:
        return self.dataset_name or "datasets"

    def but(self, **values: Any) -> Self:
        """Return a copy with values that isotype has decided in the run. Names that the method lacks have no effect."""
        decided = {**self.decided, **values}
        return replace(self, decided=decided, **_built(self.command, decided))


def settings_of(command: Command) -> Settings:
    """Return the settings of a command.

    Raises:
        UsageError: no model, numbers out of range, or a combination of arguments that TRL or transformers does not accept.
        PrecisionError: arguments about dtypes contradict each other. The error lists all contradictions.
    """
    if problems := list(_incomplete(command)):
        hint = f"isotype {command.method} --help lists the arguments"
        raise UsageError("invalid arguments", [*problems, *value_problems(command)], hint)
    require_names(METHODS[command.method])
    try:
        precision = read_precision_request(command)
    except PrecisionError as error:
        others = [problem for problem in value_problems(command) if problem not in error.problems]
        raise PrecisionError(error.headline, [*error.problems, *others]) from error
    # An argument that configures checkpointing or offloads activations switches `auto` off.
    configured = any(f"{name}_kwargs" in command for name in RECOMPUTE) or command["activation_offloading"]
    auto = all(command.given(name) in (None, AUTO) for name in RECOMPUTE) and not configured
    return Settings(command, precision=precision, auto_checkpointing=auto, **_built(command, {}))


def _incomplete(command: Command) -> Iterator[Problem]:
    if command["model_name_or_path"] is None:
        yield Problem("no --model_name_or_path", MODELS, "--model_name_or_path MODEL")
    if "tokens_per_step" in command:
        what = f"--tokens_per_step {command['tokens_per_step']}"
        fix = "add --per_device_train_batch_size auto, or omit --tokens_per_step"
        yield Problem(what, "a batch size that the plan chooses", fix)
    if command["parallelism_config"] is not None:
        expected = "the whole model in each process, or a part of the model with --fsdp full_shard"
        yield Problem("--parallelism_config", expected, "omit it")


def _values(command: Command, decided: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of all arguments by name: values of the command, isotype's decisions, and values that follow from these."""
    ours = ("dtype", "use_peft", "lora_target_modules", "lora_task_type")  # their defaults differ from TRL's
    values: dict[str, Any] = {name: command[name] for name in ours}
    values |= {name: value.value for name, value in command.values.items()}
    values |= decided
    # The constructors would refuse `bf16` on some machines, and `load_in_8bit` together with `load_in_4bit`.
    # `read_precision_request` checks all arguments about precision together.
    values |= {"bf16": False, "fp16": False, "load_in_8bit": False}
    # A check needs no DeepSpeed; `machine_problems` refuses a training without it.
    if find_spec("deepspeed") is None:
        values.pop("deepspeed", None)
    # On a machine without an accelerator, accelerate connects processes only with `use_cpu`.
    on_cpu = values.get("use_cpu") or (processes() > 1 and not torch.accelerator.is_available())
    if on_cpu and values.get("device", "auto") == "auto":
        values["device"] = "cpu"
    if values.get("device") == "cpu":
        values["use_cpu"] = True
    values |= {name: True for name in RECOMPUTE if values.get(name) == AUTO}
    if names := values.get("datasets"):  # TRL's command line takes the path of each data set
        values["datasets"] = [n if isinstance(n, dict) else {"path": str(n)} for n in names]
    if (start := values.get("init_lora_weights")) is not None:  # a config file may have a boolean
        values["init_lora_weights"] = str(start).lower()
    profile = device_profile(values.get("device", "auto")) if values.get("tf32") else None
    if profile is not None and not profile.present:
        values["tf32"] = None  # transformers would check the GPU of this machine
        if profile.kind != "cuda" or profile.supports(torch.bfloat16) != "native":
            expected, fix = "an NVIDIA GPU of compute capability 8.0 or higher", "omit --tf32"
            raise UsageError.of("invalid arguments", f"--tf32 True on {profile.title}", expected, fix)
    for name in (f"{name}_kwargs" for name in RECOMPUTE):
        if isinstance(values.get(name), dict):
            # transformers has this default only if no other keyword is given; torch's own default is True.
            values[name] = {"use_reentrant": False, **values[name]}
    implied = {name: v for name, v in _implied(command, values).items() if values.get(name) in (None, "")}
    return {**values, **implied, "disable_tqdm": True}


def _implied(command: Command, values: Mapping[str, Any]) -> dict[str, Any]:
    model = str(values.get("model_name_or_path", "model"))
    # `Path.stem` is not used: it would cut ".6B" from "Qwen3-0.6B".
    name = Path(model).resolve().name.removeprefix("embedded:").removesuffix(".gguf") or "model"
    implied: dict[str, Any] = {
        "output_dir": str(Path("runs") / f"{command.method}-{name}"),
        # This filter keeps non-finite losses out of the log. For this, the host waits for the loss of every micro-batch.
        # isotype ends a run before such a loss changes the weights.
        "logging_nan_inf_filter": False,
    }
    init = values.get("model_init_kwargs")
    if isinstance(init, Mapping) and "revision" in init:
        implied["model_revision"] = init["revision"]
    # The default is the training's batch size, not transformers' 8. GRPO and RLOO need whole groups of completions.
    group = command["num_generations_eval"] or command["num_generations"] or 1
    rows = max(1, command["per_device_train_batch_size"])  # a number below 1 is reported elsewhere
    implied["per_device_eval_batch_size"] = -(-rows // group) * group
    if values.get("eval_split") is not None:
        implied["eval_strategy"] = "steps"
        if "eval_strategy" not in values:
            implied["eval_steps"] = 0.2
    if values.get("early_stopping_patience") is not None:
        implied["metric_for_best_model"] = "loss"
    return implied


def _built(command: Command, decided: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `Settings` by name: TRL's dataclasses and isotype's values."""
    kinds = METHODS[command.method].dataclass_types()
    names = {item.name for kind in kinds for item in fields(kind) if item.init}
    if absent := [n for n in command.values if n not in names and command.specs[n].holder != "added"]:
        installed = f"transformers {version('transformers')} and trl {version('trl')}"
        expected, fix = f"an argument of the installed {installed}", "omit it, or install newer versions"
        raise UsageError("invalid arguments", [Problem(f"--{name}", expected, fix) for name in absent])
    try:
        parts = _constructed(command, decided)
    except (ValueError, TypeError, OSError, OverflowError) as error:
        wrong = list(number_problems(command.given))
        message = one_line(error)
        named = {name: command[name] for name in command.specs} | _values(command, decided)
        works = partial(_works, command, decided)
        fix = fix_of_message(message, command.values, named, f"isotype {command.method}")
        if fixes := [f"--{name}" for name in sorted(command.values) if works(**{name: None})]:
            fix = f"omit {' or '.join(fixes)}"
        elif "num_generations" in message and (fixes := list(_whole_groups(command, works))):
            fix = " or ".join(fixes)
        conflict = Problem(message, f"arguments that trl {command.method} accepts together", fix)
        raise UsageError("invalid arguments", wrong or [conflict]) from error
    # Values that the constructors would refuse or change.
    training, model = parts["training"], parts["model"]
    for name in _COMPLETED & decided.keys():
        setattr(training, name, decided[name])
    if training.deepspeed and _COMPLETED & decided.keys():
        _fill_deepspeed_config(training)
    train_on_first_gpu(training)
    training.deepspeed = command.given("deepspeed")
    model.load_in_8bit = bool(command.given("load_in_8bit"))
    model.lora_target_modules = module_names(model.lora_target_modules)
    model.lora_modules_to_save = module_names(model.lora_modules_to_save)
    return parts


_NAMES = frozenset(name for method in METHODS for name in specs(method))
_COMPLETED = frozenset({"bf16", "fp16", "mixed_precision"})
"""Attributes that `PrecisionPolicy` sets later, because the constructor of TrainingArguments may not accept bf16."""


def _fill_deepspeed_config(training: Any) -> None:
    """Fill the values "auto" of the DeepSpeed config again, because the constructor filled them without the dtype."""
    from accelerate.utils import DeepSpeedPlugin
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    training.hf_deepspeed_config = HfTrainerDeepSpeedConfig(training.deepspeed)
    training.hf_deepspeed_config.trainer_config_process(training)
    training.deepspeed_plugin = DeepSpeedPlugin(hf_ds_config=training.hf_deepspeed_config)


def _constructed(command: Command, decided: Mapping[str, Any]) -> dict[str, Any]:
    values, specs = _values(command, decided), command.specs
    added = {name: values.get(name, spec.default) for name, spec in specs.items() if spec.holder == "added"}
    built: dict[str, Any] = {"added": added}
    for kind, holder in zip(METHODS[command.method].dataclass_types(), HOLDERS, strict=True):
        names = {item.name for item in fields(kind) if item.init and item.name in values}
        arguments = {name: values[name] for name in names if name in specs and specs[name].holder == holder}
        built[holder] = kind(**copy.deepcopy(arguments))  # transformers changes the objects that it gets
    return built


def _works(command: Command, decided: Mapping[str, Any], **values: Any) -> bool:
    try:
        _constructed(command.but(**values), decided)
    except (ValueError, TypeError, OSError, ImportError, OverflowError):
        return False
    return True


def _whole_groups(command: Command, works: Callable[..., bool]) -> Iterator[str]:
    """Yield arguments with which a batch contains only whole groups: fewer completions per prompt, or a larger batch."""
    rows, group = command["per_device_train_batch_size"], command["num_generations"]
    larger = range(rows + 1, rows + group + 1)
    choices = {"num_generations": range(group - 1, 1, -1), "per_device_train_batch_size": larger}
    for name, values in choices.items():
        yield from [f"--{name} {value}" for value in values if works(**{name: value})][:1]


def module_names(value: Any) -> Any:
    """Return names of modules for PEFT: a list of names, or a string for `all-linear` or a regular expression.

    TRL turns a list with one name into a string, and PEFT reads this string as a regular expression for the whole
    module name. Names may be separated by commas or written as a list (`['q_proj', 'v_proj']`).
    """
    text = " ".join(value) if isinstance(value, list) else str(value or "")
    text = re.sub(r"['\"]", "", text[1:-1]) if text.startswith("[") and text.endswith("]") else text
    if re.fullmatch(r"[\w.]+([\s,]+[\w.]+)*,?", text):
        return re.split(r"[\s,]+", text.removesuffix(","))
    return value


def fix_of_message(message: str, explicit: Collection[str], values: Mapping[str, Any], help_of: str) -> str:
    """Return a fix for the error message of a library: omit or change the arguments that the message names."""
    words = dict.fromkeys(re.findall(r"[a-z][a-z0-9_]*", message))
    named = [name for name in words if name in values and ("_" in name or f"--{name}" in message)]
    # A word such as "Packing" names an argument only if the user gave this argument.
    named = named or [name for name in explicit if re.search(rf"\b{name}\b", message, re.IGNORECASE)]
    # A message may write the last two words of a name with a space: "batch size", "Label smoothing".
    spoken = message.lower()
    named = named or [name for name in explicit if "_" in name and " ".join(name.split("_")[-2:]) in spoken]
    out = [f"--{name}" for name in named if name in explicit]
    other = [f"--{name} (now {values[name]})" for name in named if name not in explicit]
    parts = [f"omit {' or '.join(out)}"] * bool(out)
    parts += [f"{'or change' if out else 'change'} {' or '.join(other)}"] * bool(other)
    given = [f"--{name}" for name in sorted(explicit) if name in values]
    last = f"omit one of {', '.join(given)}" if given else "correct the arguments"
    return ", ".join(parts) or f"{last}; {help_of} --help-all lists all arguments"

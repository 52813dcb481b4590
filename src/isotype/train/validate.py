"""Checks a training command before a weight is read. All problems in the command's arguments are reported at once."""

import inspect
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from importlib.util import find_spec
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from isotype.compat.hub import asking, offline_if_unreachable
from isotype.core.arguments import did_you_mean, wrong_choice
from isotype.core.dtypes import HALVES, dtype_name
from isotype.core.errors import CheckpointError, PrecisionError, Problem, UsageError, first_line, one_line
from isotype.core.names import listed, pattern_problems
from isotype.core.optimizers import package_of
from isotype.core.pretrained import pretrained
from isotype.data.locate import data_error
from isotype.data.methods import METHODS
from isotype.data.tokens import token_faults
from isotype.model.parts import ALL, PARTS, read_parts
from isotype.precision.devices.profile import DeviceProfile, device_profile
from isotype.precision.policy import PrecisionPolicy
from isotype.train.command.arguments import name_problems, number_problems
from isotype.train.command.command import Command
from isotype.train.command.settings import Settings, settings_of
from isotype.train.compilation import compiler_problems
from isotype.train.initial_adapter import bias_problems, check_initial, initial_problems, start_of
from isotype.train.launched import check_dtype, config_problems, whole_weight_problems
from isotype.train.rows.data import check_pictures
from isotype.train.signals import early_stopping_problems

_ATTENTION = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}
_REPORTERS = ("wandb", "tensorboard", "trackio", "mlflow", "comet_ml", "clearml", "swanlab")
_TEMPLATE = "a .jinja file, or a directory or hub id with a tokenizer"


def checked_settings(command: Command, bare: bool = False) -> Settings:
    """Return the settings of a command. Raise UsageError or PrecisionError if a check refuses an argument.

    If `bare` is True (`isotype check MODEL` without a method), this machine is not checked.
    """
    settings = start_of(settings_of(command))
    here = device_profile(settings.device).present and not bare
    _refuse_first(
        [*argument_problems(settings), *(machine_problems(settings) if here else ())],
        optimizer_problems(settings) if here else (),
    )
    return settings


def check_settings(settings: Settings) -> None:
    """Check arguments, then optimizer and hub, and then files. Raise UsageError after the first of these checks that fails."""
    first = [*argument_problems(settings), *machine_problems(settings)]
    _refuse_first(first, chain(optimizer_problems(settings), _hub(settings)), _read_later(settings))


def _refuse_first(*groups: Iterable[Problem]) -> None:
    """Raise UsageError with all problems of the first group that has problems. Later groups are not checked."""
    if problems := next(filter(None, map(list, groups)), None):
        raise UsageError("invalid arguments", problems)


def machine_problems(settings: Settings) -> list[Problem]:
    """Return the problems of arguments that depend on this machine (files, packages, compiler, devices)."""
    return [
        *_paths(settings),
        *_packages(settings),
        *_offload(settings),
        *compiler_problems(settings.training, settings.device),
    ]


def argument_problems(settings: Settings) -> list[Problem]:
    return [
        *number_problems(settings.value),
        *name_problems(settings.value),
        *_checkpointing(settings),
        *_schedule(settings),
        *_trainer(settings),
        *_flash(settings),
        *bias_problems(settings),
        *_model_arguments(settings),
        *_adapter(settings),
        *early_stopping_problems(settings),
        *config_problems(settings),
        *initial_problems(settings),
        *(whole_weight_problems(settings) if settings.training.fsdp else ()),
    ]


def _adapter(settings: Settings) -> Iterator[Problem]:
    """Yield a problem for an invalid `--lora_task_type`, `--lora_target_modules` or `--adapt`."""
    task, method = settings.lora_task_type, settings.method
    if "lora_task_type" in settings.command and task != method.task_type:
        fits = [other.name for other in METHODS.values() if other.task_type == task]
        expected = f"{method.task_type}, the task of isotype {method.name}"
        fix = f"omit it{f', or run isotype {fits[0]}, whose task is {task}' if fits else ''}"
        yield Problem(f"--lora_task_type {task} with {method.name}", expected, fix)
    targets, parts = settings.lora_target_modules, settings.adapt
    if isinstance(targets, str) and targets != "all-linear":
        yield from pattern_problems({"--lora_target_modules": [targets]})
    if parts is None:
        return
    try:
        read_parts(parts)
    except ValueError as error:
        yield wrong_choice(f"--adapt {error}", str(error), (*PARTS, ALL))


def _trainer(settings: Settings) -> Iterator[Problem]:
    """Yield a problem for each combination of arguments that the trainer would refuse only after the model is loaded."""
    method, losses = settings.method, settings.loss_type or ""
    if settings.padding_free and settings.packing is False and settings.max_length is not None:
        what = f"--padding_free True with --max_length {settings.max_length}, but without --packing"
        expected = "--packing True or no max_length, because TRL does not cut rows with --padding_free True"
        yield Problem(what, expected, "--packing True, or --max_length none")
    if (settings.dataset_streaming or settings.streaming) and settings.max_steps <= 0:
        expected = "the number of steps, because the length of a stream is unknown"
        yield Problem("--dataset_streaming without --max_steps", expected, "add --max_steps N")
    if method.loss == "unpaired" and losses != "apo_zero_unpaired":
        if settings.per_device_train_batch_size == 1:
            expected = "at least 2 rows, because the loss compares each prompt with the answer of another row"
            fix = "--per_device_train_batch_size 2, or --loss_type apo_zero_unpaired"
            yield Problem(f"--per_device_train_batch_size 1 with {method.name}", expected, fix)
        if (order := settings.train_sampling_strategy) != "sequential":
            what = f"--train_sampling_strategy {order} with {method.name}"
            fix = "omit it, or --loss_type apo_zero_unpaired"
            yield Problem(what, "sequential, because the loss pairs neighboring rows", fix)
    if settings.train_sampling_strategy == "group_by_length" and method.loss in ("preference", "reward"):
        what, expected = f"--train_sampling_strategy group_by_length with {method.name}", "rows with one text"
        yield Problem(what, expected, "omit it")
    if method.loss in ("preference", "unpaired") and not settings.beta and "sft" not in losses:
        expected = "more than 0, because the loss does not depend on the model at 0"
        yield Problem(f"--beta 0 with {method.name}", expected, "omit it, or --beta 0.01")
    if "exo_pair" in losses and not settings.label_smoothing:
        yield Problem("--loss_type exo_pair", "label smoothing above 0", "add --label_smoothing 1e-3")
    if settings.sync_ref_model and settings.use_peft:
        expected = "--use_peft False, because an adapter's reference model is its unchanged base model"
        yield Problem("--sync_ref_model True with adapters", expected, "omit one of the two")


def _attention(settings: Settings) -> Any:
    return settings.attn_implementation or (settings.model_init_kwargs or {}).get("attn_implementation")


def _flash(settings: Settings) -> Iterator[Problem]:
    name = str(_attention(settings))
    if not name.startswith("flash_attention"):
        return
    profile = device_profile(settings.device)
    fix = "--attn_implementation sdpa"
    if profile.kind not in ("cuda", "rocm") or profile.flash_attention.isdisjoint(HALVES):
        expected = "an NVIDIA GPU of compute capability 8.0 or later, or an AMD CDNA GPU"
        swap = (("--attn_implementation", name), fix.split())
        yield Problem(f"--attn_implementation {name} on {profile.title}", expected, fix, swap)


_CHECKPOINT = sorted(
    {*inspect.signature(checkpoint).parameters, "preserve_rng_state", "every_n_layers", "offload"}
    - {"function", "args", "kwargs", "context_fn"}
)
"""Valid keys of `--gradient_checkpointing_kwargs`: arguments of PyTorch and transformers that can be written in JSON."""


def _checkpointing(settings: Settings) -> Iterator[Problem]:
    arguments = settings.gradient_checkpointing_kwargs or {}
    for name in sorted(arguments.keys() - _CHECKPOINT):
        fix = did_you_mean(name, _CHECKPOINT, "omit it", n=1, shown=repr)
        yield Problem(f"--gradient_checkpointing_kwargs: {name!r}", f"one of {', '.join(_CHECKPOINT)}", fix)
    every = arguments.get("every_n_layers", 1)
    if not isinstance(every, int) or every < 1:
        what = f"--gradient_checkpointing_kwargs: every_n_layers {every!r}"
        yield Problem(what, "a whole number of at least 1", "1 checkpoints every layer, 2 every second layer")


def _offload(settings: Settings) -> Iterator[Problem]:
    if settings.device != "cpu" and torch.accelerator.is_available():
        return
    arguments = settings.gradient_checkpointing_kwargs or {}
    expected = "a GPU, because only activations on a GPU can be moved to CPU memory"
    if arguments.get("offload"):
        yield Problem("--gradient_checkpointing_kwargs: offload, on a CPU", expected, "omit it")
    if settings.activation_offloading:
        yield Problem("--activation_offloading, on a CPU", expected, "omit it")


def _paths(settings: Settings) -> Iterator[Problem]:
    template = settings.chat_template_path
    is_path = str(template).endswith((".jinja", ".j2")) or str(template).startswith((".", "/", "~"))
    if template is not None and (is_path or template.count("/") > 1) and not Path(template).exists():
        what = f"--chat_template_path {template}: no such file or directory"
        yield Problem(what, _TEMPLATE, "check the path")
    output, model = settings.output_dir, Path(str(settings.model_name_or_path))
    if output and model.is_dir() and Path(output).resolve() == model.resolve():
        setting = f"--output_dir {output} is the model's own directory"
        yield Problem(setting, "another directory for the results", "give another one")
    existing = next(path for path in (Path(output), *Path(output).absolute().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        why = "cannot be written" if existing.is_dir() else "is a file"
        expected = "a directory that can be created and written"
        yield Problem(f"--output_dir {output}: {existing} {why}", expected, "give another one")


def _packages(settings: Settings) -> Iterator[Problem]:
    reporters = settings.report_to if isinstance(settings.report_to, list) else [settings.report_to]
    attention = _attention(settings)
    wanted = [
        ("--use_vllm", settings.use_vllm and "vllm"),
        (f"--deepspeed {settings.deepspeed}", settings.deepspeed and "deepspeed"),
        *((f"--report_to {name}", name) for name in reporters if name in _REPORTERS),
        (f"--attn_implementation {attention}", not any(_flash(settings)) and _ATTENTION.get(attention)),
        (f"--optim {settings.optim}", package_of(settings.optim)),
    ]
    for argument, package in wanted:
        if package and find_spec(package) is None:
            fix = f"pip install {package.replace('_', '-')}, or omit {argument.split()[0]}"
            yield Problem(argument, f"the package {package}, which is not installed", fix)


def optimizer_problems(settings: Settings) -> Iterator[Problem]:
    """Build the optimizer for one parameter, and yield a problem if the optimizer cannot be built."""
    from transformers import Trainer

    try:
        kind, arguments = Trainer.get_optimizer_cls_and_kwargs(settings.training, torch.nn.Linear(1, 1))
        kind([torch.nn.Parameter(torch.zeros(1))], **arguments)
    except _BUILD_ERRORS as error:
        fix = "omit --optim and --optim_args, or add the --optim_args that this error requires"
        yield _unbuilt(f"--optim {settings.optim}", error, fix)


def _schedule(settings: Settings) -> Iterator[Problem]:
    """Build the schedule of the learning rate for one parameter, and yield a problem if the schedule cannot be built."""
    from transformers import get_scheduler

    kind, arguments = settings.lr_scheduler_type, settings.lr_scheduler_kwargs
    setting = f"--lr_scheduler_type {kind}"
    setting += f" --lr_scheduler_kwargs {json.dumps(arguments)}" if arguments else ""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    try:
        get_scheduler(kind, optimizer, 1, 10, dict(arguments or {}))
    except _BUILD_ERRORS as error:
        yield _unbuilt(setting, error, _schedule_fix(kind))


_BUILD_ERRORS = (ValueError, TypeError, ImportError, NotImplementedError, RuntimeError, AttributeError)


def _unbuilt(setting: str, error: Exception, fix: str) -> Problem:
    expected = "arguments from which the optimizer and its schedule can be built"
    return Problem(f"{setting}: {one_line(error)}", expected, fix)


def _schedule_fix(kind: str) -> str:
    from transformers import SchedulerType
    from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION

    common = {"optimizer", "num_warmup_steps", "num_training_steps", "last_epoch", "kwargs"}
    parameters = inspect.signature(TYPE_TO_SCHEDULER_FUNCTION[SchedulerType(kind)]).parameters
    takes = [name for name in parameters if name not in common]
    if not takes:
        return "omit --lr_scheduler_kwargs, because this schedule has no arguments"
    return f"--lr_scheduler_kwargs of {', '.join(takes)}, or --lr_scheduler_type linear"


def _hub(settings: Settings) -> Iterator[Problem]:
    if not settings.push_to_hub or not settings.training.should_save:
        return
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError, LocalTokenNotFoundError
    from huggingface_hub.utils import validate_repo_id

    name = settings.hub_model_id or Path(settings.output_dir).name
    later = f"omit --push_to_hub, and upload afterwards: hf upload {name} {settings.output_dir}"
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        message = str(error).partition(":")[0]
        expected = f"NAME or OWNER/NAME ({message})"
        yield Problem(f"--hub_model_id {name!r}", expected, "--hub_model_id OWNER/NAME")
        return
    try:
        HfApi(token=settings.hub_token).whoami()
    except LocalTokenNotFoundError:
        what, fix = f"--push_to_hub to {name} without a token", f"hf auth login, or --hub_token; or {later}"
        yield Problem(what, f"a token with write permission for {name}", fix)
    except Exception as error:  # noqa: BLE001 - from any HTTP library of the hub's client; it is reported unchanged
        setting = f"--push_to_hub to {name}: the hub cannot be used ({first_line(error)})"
        yield Problem(setting, "a reachable hub and a valid token", later)


def _read_later(settings: Settings) -> Iterator[Problem]:
    from transformers import AutoConfig, AutoTokenizer

    scorer = "a directory or hub id with a model that scores texts"
    for flag, kind, expected in (
        ("chat_template_path", AutoTokenizer, _TEMPLATE),
        ("reward_model_name_or_path", AutoConfig, scorer),
    ):
        name = settings.value(flag)
        if not name or Path(name).is_file():
            continue
        why = ""
        try:
            with nullcontext("") if Path(name).is_dir() else offline_if_unreachable() as why:
                pretrained(kind, name)
        except (OSError, ValueError) as error:
            setting = f"--{flag} {name}: {why or first_line(error)}"
            yield Problem(setting, expected, "check the spelling and the network, or use a local path")


def _model_arguments(settings: Settings) -> Iterator[Problem]:
    init = settings.model_init_kwargs or {}
    if settings.use_liger_kernel:
        yield Problem(
            "--use_liger_kernel: Liger replaces the forwards of norms and MLPs, including those that follow the precision policy",
            "norms and MLPs that follow the precision policy",
            "omit it, because fused layers (--fuse, the default) have kernels for the same operations",
        )
    for name, flag in (("attn_implementation", "attn_implementation"), ("revision", "model_revision")):
        value = settings.value(flag)
        if name in init and flag in settings.command and init[name] != value:
            both = f"--{flag} {value} and --model_init_kwargs {name}={init[name]}"
            yield Problem(both, f"one {name}", "omit one of the two")
    if settings.trust_remote_code or init.get("trust_remote_code"):
        expected = "an architecture that transformers has, because isotype runs no code from a checkpoint"
        yield Problem("--trust_remote_code", expected, "omit it")
    if settings.use_cpu and not settings.device.startswith("cpu"):
        what = f"--use_cpu True and --device {settings.device}"
        yield Problem(what, "one device", "omit one of the two")


def training_device(settings: Settings) -> DeviceProfile:
    """Return the profile of `--device`. Raise UsageError if this machine lacks the device, or its index is above 0."""
    device, name = settings.device, settings.method.name
    profile = device_profile(device)
    if not profile.present:
        fix = (
            f"omit --device to train on {device_profile('auto').title}, or check the run for {profile.title}"
        )
        problem = Problem(f"--device {device}", "a device of this machine", fix, ((name,), ("check", name)))
        raise UsageError(f"{profile.title} is not in this machine", [problem])
    if index := torch.device(profile.name).index:
        headline, expected = "the trainer uses the first visible GPU", "a device without an index"
        fix = f"CUDA_VISIBLE_DEVICES={index} isotype {name} …"
        raise UsageError.of(headline, f"--device {device}", expected, fix)
    return profile


def check_policy(settings: Settings, policy: PrecisionPolicy) -> None:
    """Raise PrecisionError if an argument contradicts the decided policy."""
    check_initial(settings, policy)
    check_dtype(settings, policy.compute)
    name = str(_attention(settings))
    if name.startswith("flash_attention") and policy.compute == torch.float32:
        what = f"--attn_implementation {name}, and float32 as the compute dtype"
        fix = "--dtype bfloat16, or --attn_implementation sdpa"
        raise PrecisionError.of("flash-attn has no kernel for float32", what, "bfloat16 or float16", fix)
    for flag, name, other in (("bf16", "bfloat16", "float16"), ("fp16", "float16", "bfloat16")):
        if settings.command.given(flag) is False and dtype_name(policy.compute) == name:
            headline = "the arguments disagree about precision"
            expected = "a compute dtype that no argument excludes"
            what = f"--dtype auto, which is {name} in this run, and --{flag} False"
            raise PrecisionError.of(headline, what, expected, f"--dtype float32, or --dtype {other}")


def check_tokenizer(settings: Settings, source: Path | str, tokenizer: Any, data: Any) -> None:
    """Check that the tokenizer fits the data, the arguments and the model's vocabulary.

    Raises:
        UsageError: conversations without a chat template, a special token that is not in the vocabulary, or no completions for
            `--completion_only_loss True`.
        CheckpointError: the model has no embedding for some token ids of the tokenizer.
        DataError: rows have token ids without an embedding, or images although the model accepts none.
    """
    from transformers import AutoConfig

    inner = getattr(tokenizer, "tokenizer", tokenizer)
    if problems := list(_tokenizer(settings, tokenizer, data)):
        raise UsageError("the tokenizer does not fit", problems)
    _check_completions(settings, data)
    check_pictures(settings, tokenizer, data)
    with asking(source):
        config = pretrained(AutoConfig, source, revision=settings.model_revision)
    size = getattr(config.get_text_config(), "vocab_size", None)
    # Added tokens need no embedding unless they are special: Gemma 3 1B has an unused image token without one.
    special = [i for i in (inner.eos_token_id, inner.bos_token_id, inner.pad_token_id) if i is not None]
    largest = max([inner.vocab_size - 1, *special])
    if size is not None and largest >= size:
        headline = "the tokenizer is larger than the model's vocabulary"
        what = f"a tokenizer with ids up to {largest} and a model with {size} embeddings"
        fix = "copy the tokenizer from the original model of these weights"
        raise CheckpointError.of(headline, what, f"ids below {size}", fix)
    problems = [
        replace(problem, given=f"{split}, row {at + 1}: {problem.given}")
        for split, rows in data.items()
        if hasattr(rows, "__len__") and hasattr(rows, "column_names")
        for at, problem in token_faults(rows, size)
    ]
    if problems:
        raise data_error(settings.data_name, problems)


def _tokenizer(settings: Settings, tokenizer: Any, data: Any) -> Iterator[Problem]:
    from trl import is_conversational

    inner = getattr(tokenizer, "tokenizer", tokenizer)
    rows = islice(data[settings.dataset_train_split], 1)
    template = getattr(tokenizer, "chat_template", None) or settings.chat_template_path
    if not template and any(is_conversational(row) for row in rows):
        fix = "add chat_template.jinja to the model's directory, or use prompts of plain text"
        if "chat_template_path" in settings.command.specs:
            fix = "--chat_template_path FILE.jinja, or prompts and completions of plain text"
        expected = "a chat template, which renders a conversation as text"
        yield Problem("conversations, and a tokenizer without a chat template", expected, fix)
    for flag in ("eos_token", "pad_token"):
        token = settings.value(flag)
        if token is not None and token not in inner.get_vocab():
            expected = f"a token of the vocabulary; the tokenizer's default is {getattr(inner, flag)}"
            yield Problem(f"--{flag} {token}", expected, "omit it, or correct the spelling")


def _check_completions(settings: Settings, data: Any) -> None:
    columns: dict[str, Any] = next(iter(data[settings.dataset_train_split]), {})
    labelled = {"prompt", "completion"} <= columns.keys() or "labels" in columns
    if settings.completion_only_loss is True and not labelled:
        what = f"--completion_only_loss True with the columns {listed(map(repr, columns))}"
        fix = "for conversations, --assistant_only_loss True; otherwise, omit --completion_only_loss"
        expected = "'prompt' and 'completion', or 'completion_mask'"
        raise UsageError.of("the data has no completions", what, expected, fix)


def plain_turns(settings: Settings, tokenizer: Any, data: Any) -> Iterator[str]:
    """If the prompts are plain text, but the model has a chat template, yield a hint."""
    row: dict[str, Any] = next(iter(data[settings.dataset_train_split]), {})
    prompt = row.get("prompt")
    if not isinstance(prompt, str) or not getattr(tokenizer, "chat_template", None):
        return
    special = getattr(tokenizer, "tokenizer", tokenizer).get_added_vocab()
    if not any(token in prompt for token in special):  # with special tokens, prompts are already rendered
        yield (
            "the prompts are plain text, so the model's chat template is not used; --apply_chat_template True "
            "turns prompts into user messages and answers into assistant messages"
        )

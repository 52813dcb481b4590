"""Locks the output directory of a run, finds the checkpoint to resume, and compares its settings with the command's."""

import dataclasses
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from datetime import date
from pathlib import Path
from typing import Any

from rich.console import Console

from isotype.checkpoint.adapter import is_adapter, read_adapter
from isotype.checkpoint.checkpoint import Checkpoint, open_checkpoint
from isotype.compat.templates import writes_date
from isotype.core.dtypes import dtype_name
from isotype.core.errors import CheckpointError, Problem
from isotype.core.files import only_writer, recover
from isotype.core.tables import table
from isotype.core.terminal import printed_command
from isotype.data.load import fingerprint_of_rows
from isotype.precision.policy import POLICY_FILE, PrecisionPolicy
from isotype.report.run.record import JSON_NAME
from isotype.report.text import say
from isotype.train.command.command import Command
from isotype.train.command.settings import Settings
from isotype.train.initial_adapter import FIELDS_OF_CONFIG, LOFTQ, sorted_names
from isotype.train.launched import from_rank_0, processes
from isotype.train.output import checkpoints

_NO_RESUME = (None, False, "False", "false")


@contextmanager
def output_directory(settings: Settings, console: Console) -> Iterator[None]:
    """Create the output directory, and lock it in the process that writes. At the end, remove the directory if it is empty."""
    root = Path(settings.output_dir)
    command = printed_command(settings.command.tokens())
    missing = [path for path in (root, *root.parents) if not path.exists()]
    try:
        root.mkdir(parents=True, exist_ok=True)
        with only_writer(root, command) if settings.training.should_save else nullcontext() as unlocked:
            if unlocked is not None:
                say(console, f"note: {unlocked}")
            yield
    finally:
        for path in missing:
            with suppress(OSError):  # the folder is not empty, or could not be created
                path.rmdir()


def resume_point(settings: Settings) -> Path | None:
    """Return the complete checkpoint that the run resumes; None if the run starts from the beginning."""
    requested = settings.resume_from_checkpoint
    if requested in _NO_RESUME:
        return None
    root = Path(settings.output_dir)
    with settings.training.main_process_first(desc="looking for checkpoints"):
        if settings.training.should_save:
            recover(root)
    whole = checkpoints.whole_checkpoints(root)
    if str(requested).lower() in ("true", "last", "latest"):
        return next((path for path in reversed(whole) if _unusable(path) is None), None)
    path = Path(str(requested))
    reason = _unusable(path)
    if reason is None:
        if is_adapter(path):
            read_adapter(path)
        elif list(path.glob("model*.safetensors")):
            open_checkpoint(path)
        return path
    others = ", ".join(p.name for p in reversed(whole) if p.resolve() != path.resolve())
    headline, what = "no checkpoint to resume from", f"--resume_from_checkpoint {requested}: {reason}"
    fix = f"omit --resume_from_checkpoint, because {root} has no other complete checkpoint"
    if others:
        fix = f"complete checkpoints in {root}: {others}"
    raise CheckpointError.of(headline, what, "a complete folder checkpoint-N", fix)


def _unusable(checkpoint: Path) -> str | None:
    return checkpoints.damage(checkpoint, contents=True) or checkpoints.unreadable_state(checkpoint)


def check_resume(identity: Mapping[str, Any], resume: Path) -> None:
    """Raise CheckpointError with all differences between `identity` and the settings of the checkpoint's run.

    Only values that the checkpoint records are compared. The numbers of steps and epochs may differ. The number of
    processes may differ if a step has the same number of rows.
    """
    if problems := [_problem(name, was, now, resume) for name, was, now in _different(resume, identity)]:
        raise CheckpointError(
            f"{resume} belongs to a run with other settings",
            problems,
            hint="a checkpoint can be resumed only with the settings of its run; omit --resume_from_checkpoint, and "
            "set another --output_dir to start again",
        )


def print_overwritten_run(settings: Settings, console: Console) -> None:
    root = Path(settings.output_dir)
    kinds = checkpoints.RESULT_FILES.values()
    results = [name for names in kinds for name in names for _ in root.glob(name)]
    if (root / JSON_NAME).is_file() and results:
        finished = f"a finished run ({results[0]}, {JSON_NAME})"
        say(console, f"note: {root} has {finished}; this run will overwrite it")


def print_resume_point(
    settings: Settings, identity: Mapping[str, Any], resume: Path | None, console: Console
) -> None:
    """Print the path of the resumed checkpoint and of each incomplete checkpoint."""
    root = settings.output_dir
    if settings.resume_from_checkpoint in _NO_RESUME:
        return
    newer = False
    for path in checkpoints.all_checkpoints(root):
        reason = checkpoints.damage(path, contents=newer or resume is None)
        newer = newer or path == resume
        if reason is not None:
            say(console, f"note: {path} is not complete: {reason}")
    if resume is None:
        say(console, f"no complete checkpoint in {root}: starting at step 0")
        return
    say(console, f"resuming from {resume}")
    if changed := changed_length(resume, identity):
        say(console, f"note: {changed}")


def resume_command(command: Command, output_dir: str, checkpoint: Path) -> str:
    """Return the command line that resumes `checkpoint` with the current number of processes."""
    directory = {} if "output_dir" in command else {"output_dir": output_dir}
    command = command.but(resume_from_checkpoint=None, **directory)
    command = command.but(resume_from_checkpoint=str(checkpoint))
    if processes() == 1:
        return printed_command(command.tokens())
    if "FSDP_VERSION" in os.environ and command["fsdp"] in (None, ""):
        command = command.but(fsdp="full_shard")  # requested by the config of accelerate launch
    machine = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    machines = processes() // max(machine, 1)
    where: tuple[str, ...] = ("--standalone",)
    if machines > 1:
        where = ("--nnodes", str(machines), "--rdzv_backend", "c10d", "--rdzv_endpoint", "HOST:29500")
    launcher = (*command.environment(), "torchrun", *where, "--nproc_per_node", str(machine), "-m")
    return printed_command((*launcher, "isotype", command.method, *command.arguments()))


# ------------------------------------------------------------------------------------------------------ the same run


RUN_FILE = "isotype_run.json"
"""File in a checkpoint that records the settings of the run."""

TEMPLATE_DATE, RECOMPUTED = "template_date", "gradient_checkpointing"
"""Names of values in `RUN_FILE` that a resumed run keeps."""


def saved_settings(resume: Path | None) -> Mapping[str, Any]:
    """Return the content of `RUN_FILE` in the resumed checkpoint, or an empty dict without a checkpoint or `RUN_FILE`."""
    return {} if resume is None else checkpoints.read_json(resume / RUN_FILE) or {}


def template_date(resume: Path | None) -> date | None:
    """Return the date for chat templates that a checkpoint records, or None if it records none."""
    try:
        return date.fromisoformat(saved_settings(resume)[TEMPLATE_DATE])
    except (KeyError, TypeError, ValueError):
        return None


def store_date(settings: Settings, day: str, tokenizer: Any) -> None:
    """Store the date of the run in the tokenizer. `datasets` then includes the date in the cache key of tokenized rows."""
    if writes_date(tokenizer) or settings.chat_template_path is not None:
        getattr(tokenizer, "tokenizer", tokenizer).template_date = day


def date_note(rows: Any, day: str, resume: Path | None, tokenizer: Any) -> str | None:
    from trl import is_conversational

    if not writes_date(tokenizer) or not is_conversational(next(iter(rows), {})):
        return None
    if resume is None:
        which = "the day on which the run started, also after a resume"
    elif template_date(resume) is None:
        which = f"today ({resume.name} records no day, and its run may have used another day)"
    else:
        which = f"the day that the resumed {resume.name} records"
    return f"the chat template can write a date; the date in this run is {day}, {which}"


_NAMES: Any = table(__file__, "identity.json")
# Arguments of transformers that change a run's results, and arguments of TRL that do not.
_DECISIVE, _INDECISIVE = _NAMES["decisive"].split(), _NAMES["indecisive"].split()
_POLICY: Mapping[str, str | None] = _NAMES["policy"]
"""Maps a field of the policy to the argument that sets the field, or to None."""
_PARTS = {True: "language", False: "all"}
"""The value of `--quantized_parts` for True (the policy's `dense` names modules) and for False."""
_BATCH = "rows in an optimizer step"
_NAMED_BY = {"weights": ("model_name_or_path", "model_revision"), "rows": ("dataset_name", "dataset_config")}


def identity_of(
    settings: Settings, checkpoint: Checkpoint, policy: PrecisionPolicy, rows: Any, resume: Path | None
) -> dict[str, Any]:
    """Return the settings that determine the numerical results of a run, by argument name, as plain JSON values.

    Some names are not arguments, such as `rows in an optimizer step` (of all processes). `weights` and `rows` are
    fingerprints of the model and the training rows, or None. The trainer must not have changed `settings` before.

    Raises:
        CheckpointError: the resumed checkpoint belongs to a run with other settings.
    """
    from transformers import TrainingArguments

    training = settings.training
    names = {field.name for field in dataclasses.fields(training)}
    fields = names - {field.name for field in dataclasses.fields(TrainingArguments)} - {*_INDECISIVE}
    fields = {name for name in fields if not name.startswith(("vllm_", "use_vllm"))}
    steps = settings.gradient_accumulation_steps
    settings_by_name = {
        "method": settings.method.name,
        "model_name_or_path": str(settings.model_name_or_path),
        "model_revision": settings.model_revision,
        "weights": checkpoint.fingerprint,
        "dataset_name": settings.dataset_name,
        "dataset_config": settings.dataset_config,
        "rows": fingerprint_of_rows(rows),
        "reward_funcs": settings.reward_funcs,
        _BATCH: settings.per_device_train_batch_size * steps * training.world_size,
        "gradient_accumulation_steps": steps,
        "processes": training.world_size,
        "max_steps": settings.max_steps,
        "num_train_epochs": settings.num_train_epochs,
        **{name: getattr(training, name) for name in (*_DECISIVE, *sorted(fields)) if name in names},
        **{name: getattr(policy, name) for name in _POLICY},
        "layers": policy.layer_formats,
        "use_peft": policy.trainable == "lora",
        "adapt": settings.adapt,
        **(_lora(settings) if policy.trainable == "lora" else {}),
    }
    identity: dict[str, Any] = json.loads(json.dumps(settings_by_name, default=_plain))
    # The day that the checkpoint records, or today in rank 0.
    identity[TEMPLATE_DATE] = from_rank_0(lambda: template_date(resume) or date.today()).isoformat()
    if resume is not None:
        check_resume(identity, resume)
    return identity


def changed_length(checkpoint: Path, identity: Mapping[str, Any]) -> str | None:
    """Describe a change in the number of steps or epochs if the learning rate schedule depends on this number."""
    saved = checkpoints.read_json(checkpoint / RUN_FILE)
    schedule = str(identity["lr_scheduler_type"])
    if saved is None or schedule.startswith("constant"):
        return None
    changed = [name for name in ("max_steps", "num_train_epochs") if saved.get(name) != identity[name]]
    if not changed:
        return None
    changes = ", ".join(f"--{name} {identity[name]:g} instead of {saved.get(name):g}" for name in changed)
    return f"{changes}: the {schedule} schedule continues with the new length"


def _different(checkpoint: Path, identity: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    saved = checkpoints.read_json(checkpoint / RUN_FILE)
    foreign = saved is None
    saved = _from_other_files(checkpoint) if saved is None else saved
    skipped = {"max_steps", "num_train_epochs", "processes"}
    for counted, names in _NAMED_BY.items():
        comparable = saved.get(counted) is not None and identity[counted] is not None
        skipped |= set(names) if comparable else {counted}
    if saved.get("processes") != identity["processes"] or saved.get(_BATCH) != identity[_BATCH]:
        skipped.add("gradient_accumulation_steps")  # only the number of rows in a step matters
    if saved.get("use_peft") != identity["use_peft"]:
        skipped |= {name for name in saved if name.startswith(("lora_", "use_dora", "use_rslora", "master"))}
    for name, was in saved.items():
        if name in skipped or name not in identity:
            continue
        now = identity[name]
        if foreign and name == "lora_target_modules" and (isinstance(was, str) or isinstance(now, str)):
            continue  # PEFT's config replaces a pattern by the names of the matching modules
        if name == "model_name_or_path" and _same_model(str(was), str(now)):
            continue
        if was != now:
            yield name, was, now


def _from_other_files(checkpoint: Path) -> dict[str, Any]:
    """Return the settings in the policy file and PEFT config of a checkpoint, with the same names as in `identity_of`."""
    settings: dict[str, Any] = {}
    policy = checkpoints.read_json(checkpoint / POLICY_FILE)
    if policy is not None:
        settings |= {key: policy.get(key) for key in ("storage", "compute", "master")}
    adapter = checkpoints.read_json(checkpoint / "adapter_config.json")
    settings["use_peft"] = adapter is not None
    if adapter is not None:
        if adapter.get("base_model_name_or_path"):
            settings["model_name_or_path"] = str(adapter["base_model_name_or_path"])
        settings |= {flag: sorted_names(adapter[k]) for flag, k in FIELDS_OF_CONFIG.items() if k in adapter}
    return settings


def _lora(settings: Settings) -> dict[str, Any]:
    if settings.start is not None:
        flags = {flag: getattr(settings.start.config, key, None) for flag, key in FIELDS_OF_CONFIG.items()}
    else:
        flags = {flag: settings.value(flag) for flag in FIELDS_OF_CONFIG}
    if flags["init_lora_weights"] in (None, LOFTQ):
        flags["init_lora_weights"] = True  # as in PEFT's config of an adapter on an unchanged base
    flags["lora_target_parameters"] = settings.lora_target_parameters
    return {flag: sorted_names(value) for flag, value in flags.items()}


def _problem(name: str, was: Any, now: Any, checkpoint: Path) -> Problem:
    setting, expected = f"--{name} {_words(now)}", _words(was)
    fix = f"omit --{name}" if was is None else f"--{name} {expected}"
    again, flag = "or start again in another --output_dir", _POLICY.get(name)
    if name == "weights":
        setting = f"the weights of --model_name_or_path have the fingerprint {now}"
        fix = f"use the model of that run, {again}"
    elif name == "rows":
        setting, fix = f"the training rows: {now}", f"use the same rows in the same order, {again}"
    elif name == _BATCH:
        setting = f"{now} {name}"
        fix = "keep per_device_train_batch_size x gradient_accumulation_steps x processes the same"
    elif name == "method":
        setting, expected, fix = f"isotype {now}", f"isotype {was}", f"resume with isotype {was}"
    elif name == "layers":
        setting = expected = "all layers in one format"
        fix = "omit --quantization mixed"
        if now:
            setting = f"{len(now)} layers in another format than most layers"
        if was:
            expected = f"{len(was)} layers in another format"
            fix = "--quantization mixed with the --base_memory of that run"
    elif name == "dense":
        setting, expected = f"{flag} {_PARTS[bool(now)]}", _PARTS[bool(was)]
        fix = f"{flag} {expected}"
    elif name in _POLICY:
        plain = name == "storage" and was in ("float32", "bfloat16", "float16")
        setting, fix = f"{name} {now}", "use the settings of that run"
        if flag is not None:
            fix = f"omit {flag}, or set --dtype {was}" if plain else f"{flag} {was}"
    return Problem(setting, f"{expected}, as in {checkpoint.name}", fix)


def _words(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _same_model(saved: str, named: str) -> bool:
    if Path(saved).is_dir() and Path(named).is_dir():
        return Path(saved).resolve() == Path(named).resolve()
    return saved == named or Path(saved).name == Path(named).name  # a moved folder, or another machine


def _plain(value: Any) -> Any:
    if isinstance(value, (set, frozenset, tuple)):
        return sorted(value)
    return dtype_name(value) if type(value).__name__ == "dtype" else str(getattr(value, "value", value))

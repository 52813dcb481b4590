"""RUN: from parsed arguments to a trained adapter and a run report."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from rich.console import Console

from isotype.checkpoint.staging import recover
from isotype.errors import CheckpointError, IsotypeError, Problem, SaveError, UsageError
from isotype.precision.hardware import DeviceProfile, device_profile
from isotype.precision.policy import PrecisionPolicy
from isotype.report.run import RunRecord, Sample, write_run_report
from isotype.train import describe
from isotype.train.governed import (
    enforce_trainer,
    governed,
    masters_of,
    mixed_precision_name,
)
from isotype.train.saved import all_checkpoints, damage, whole_checkpoints
from isotype.train.settings import Settings


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
        record: what the report says.
        adapter: directory of the saved adapter (or model), None where the run did not get there.
        report: path of the HTML report.
        checkpoint: the last whole checkpoint of this run, or the one it went on from; None where there is none.
    """

    record: RunRecord
    adapter: Path | None
    report: Path
    checkpoint: Path | None = None


def run(settings: Settings, console: Console) -> Outcome:
    """Run one training command from its parsed arguments.

    Everything that can be wrong with the arguments, the data, the device and the checkpoint's headers is found
    before any weights are read.

    Raises:
        IsotypeError: bad arguments, data, checkpoint or precision; a full disk at save time.
    """
    from isotype.data.load import load_training_data
    from isotype.resolve import resolve_precision

    profile = _training_device(settings)
    rewards = _rewards(settings)
    _place_outputs(settings)
    resume = _resume_point(settings)
    data = load_training_data(
        settings.script,
        settings.dataset,
        settings.method.name,
        need_test=settings.training.eval_strategy != "no",
        text_field=getattr(settings.training, "dataset_text_field", "text"),
    )
    wishes = settings.wishes
    policy = resolve_precision(
        settings.model.model_name_or_path,
        wishes.dtype,
        wishes.quantization,
        settings.extra.device,
        wishes.trainable,
        master=wishes.master,
        double_quant=wishes.double_quant,
        quant_storage=wishes.quant_storage,
    )
    apply_to_arguments(policy, settings.training)
    describe.show_policy(console, policy)
    trainer, sample = _build(settings, policy, data, rewards, resume, console)
    return _train(settings, policy, profile, trainer, sample, resume, console)


def apply_to_arguments(policy: PrecisionPolicy, training: Any) -> None:
    """Set `fp16`, `bf16` and what follows from them on transformers' TrainingArguments."""
    training.bf16 = policy.compute == torch.bfloat16
    training.fp16 = policy.compute == torch.float16
    training.mixed_precision = mixed_precision_name(policy)


def _training_device(settings: Settings) -> DeviceProfile:
    profile = device_profile(settings.extra.device)
    if not profile.present:
        raise UsageError(
            f"{profile.title} is not in this machine",
            [Problem(f"--device {settings.extra.device}", "a device that is here", "leave --device out")],
        )
    index = torch.device(profile.name).index
    if index:
        raise UsageError(
            "the trainer takes the first GPU it sees",
            [
                Problem(
                    f"--device {settings.extra.device}",
                    "a device without an index",
                    f"CUDA_VISIBLE_DEVICES={index} isotype {settings.method.name} …",
                )
            ],
        )
    return profile


def _place_outputs(settings: Settings) -> None:
    if "output_dir" not in settings.explicit:
        name = Path(str(settings.model.model_name_or_path)).stem.replace("embedded:", "") or "model"
        settings.training.output_dir = str(Path("runs") / f"{settings.method.name}-{name}")
    root = Path(settings.training.output_dir)
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            "cannot write to the output directory",
            [
                Problem(
                    f"--output_dir {root}: {error.strerror}",
                    "a directory that can be made",
                    "give another one",
                )
            ],
        ) from error
    settings.training.disable_tqdm = True
    if not torch.cuda.is_available():
        settings.training.dataloader_pin_memory = False  # torch warns where there is nothing to pin for


_NO_RESUME = (None, False, "False", "false")


def _resume_point(settings: Settings) -> Path | None:
    """The whole checkpoint that the run goes on from, or None for a start from the beginning."""
    asked = settings.training.resume_from_checkpoint
    if asked in _NO_RESUME:
        return None
    root = Path(settings.training.output_dir)
    with settings.training.main_process_first(desc="looking for checkpoints"):
        if settings.training.should_save:
            recover(root)
    whole = whole_checkpoints(root)
    if str(asked).lower() in ("true", "last", "latest"):
        return whole[-1] if whole else None
    path = Path(str(asked))
    reason = damage(path)
    if reason is None:
        return path
    others = ", ".join(p.name for p in reversed(whole))
    raise CheckpointError(
        "no checkpoint to go on from",
        [
            Problem(
                f"--resume_from_checkpoint {asked}: {reason}",
                "a folder checkpoint-N that was saved to the end",
                f"whole in {root}: {others}" if whole else f"there is none in {root}: leave the argument out",
            )
        ],
    )


def _build(
    settings: Settings,
    policy: PrecisionPolicy,
    data: Any,
    rewards: dict[str, Any],
    resume: Path | None,
    console: Console,
) -> tuple[Any, Sample | None]:
    """The trainer under the policy, and the sample question with the answer before training."""
    from transformers import set_seed

    from isotype.checkpoint.load import dense_source
    from isotype.train.models import adapted_model, processing_class

    training, method = settings.training, settings.method
    source = dense_source(settings.model.model_name_or_path, policy.plain)
    tokenizer = processing_class(
        source, revision=settings.model.model_revision, trust_remote_code=training.trust_remote_code
    )
    set_seed(training.seed)
    with console.status(f"loading {settings.model.model_name_or_path} as {policy.storage} …"):
        model, peft_config = adapted_model(settings, policy)
    describe.show_model(console, model)
    train_split, test_split = settings.script.dataset_train_split, settings.script.dataset_test_split
    sample = _first_answer(settings, data, model, tokenizer, resume, console)
    masters = masters_of(model)
    trainer = governed(method.trainer_class())(
        model=model,
        args=training,
        train_dataset=data[train_split],
        eval_dataset=data[test_split] if training.eval_strategy != "no" else None,
        processing_class=tokenizer,
        peft_config=peft_config,
        **rewards,
    )
    enforce_trainer(trainer, policy, masters)
    return trainer, sample


def _rewards(settings: Settings) -> dict[str, Any]:
    """The trainer's argument for the rewards of grpo and rloo; nothing for the others."""
    if not hasattr(settings.script, "reward_funcs"):
        return {}
    from isotype.train.rewards import reward_functions

    script = settings.script
    return {"reward_funcs": reward_functions(script.reward_funcs, script.reward_model_name_or_path)}


def _first_answer(
    settings: Settings, data: Any, model: Any, tokenizer: Any, resume: Path | None, console: Console
) -> Sample | None:
    if settings.method.name == "reward":
        return None
    sample = describe.sample_question(settings, data)
    if sample is None or resume is not None:
        return sample
    from isotype.train.generate import answer

    with console.status("asking the model before training …"):
        text = answer(model, tokenizer, [{"role": "user", "content": sample.question}])
    return replace(sample, before=text)


def _train(
    settings: Settings,
    policy: PrecisionPolicy,
    profile: DeviceProfile,
    trainer: Any,
    sample: Sample | None,
    resume: Path | None,
    console: Console,
) -> Outcome:
    from transformers import PrinterCallback, ProgressCallback

    from isotype.train.callback import PrecisionCallback
    from isotype.train.progress import ProgressView
    from isotype.train.record import RunRecorder

    root = Path(settings.training.output_dir)
    started = datetime.now(UTC)
    _say_where(settings, resume, console)
    with ProgressView(console) as view:
        recorder = RunRecorder(trainer, view.update)
        for callback in (PrinterCallback, ProgressCallback):
            trainer.remove_callback(callback)
        trainer.add_callback(PrecisionCallback(policy))
        trainer.add_callback(recorder)
        record_of = partial(describe.record, settings, policy, profile, trainer, recorder)
        try:
            finished = _train_and_save(trainer, root, resume, console)
        except Exception as failure:
            error = (
                str(failure) if isinstance(failure, IsotypeError) else f"{type(failure).__name__}: {failure}"
            )
            _report_failure(record_of(sample, started, "failed", error), root, console)
            raise
    if not finished:
        record = record_of(sample, started, "interrupted", None)
        return Outcome(record, None, _write_report(record, root), trainer.last_checkpoint())
    try:
        sample = _second_answer(trainer, sample, console)
    except KeyboardInterrupt:
        console.print("interrupted: the model was not asked after training; it is saved")
    record = record_of(sample, started, "finished", None)
    return Outcome(record, root, _write_report(record, root), trainer.last_checkpoint())


def _train_and_save(trainer: Any, root: Path, resume: Path | None, console: Console) -> bool:
    """Train to the end and save the model into `root`; returns False where somebody stopped it."""
    with _graceful_stop(trainer, console) as stopped:
        try:
            trainer.train(resume_from_checkpoint=str(resume) if resume else None)
            if stopped and trainer.state.global_step < trainer.state.max_steps:
                return False
            trainer.save_final(root)
        except KeyboardInterrupt:
            if trainer.args.should_save:
                recover(root)
            return False
    return True


def _say_where(settings: Settings, resume: Path | None, console: Console) -> None:
    """Where the run starts, if it was asked to go on from a checkpoint, and which ones it could not take."""
    asked, root = settings.training.resume_from_checkpoint, settings.training.output_dir
    if asked in _NO_RESUME:
        return
    say = partial(console.print, highlight=False, markup=False, soft_wrap=True)
    for path in all_checkpoints(root):
        reason = damage(path)
        if reason is not None:
            say(f"note: {path} is not whole: {reason}")
    if resume is None:
        say(f"no whole checkpoint in {root}: starting at step 0")
    else:
        say(f"going on from {resume}")


def _second_answer(trainer: Any, sample: Sample | None, console: Console) -> Sample | None:
    if sample is None:
        return None
    from isotype.train.generate import answer

    with console.status("asking the model after training …"):
        text = answer(trainer.model, trainer.processing_class, [{"role": "user", "content": sample.question}])
    return replace(sample, after=text)


def _report_failure(record: RunRecord, root: Path, console: Console) -> None:
    """Write the report of a failed run, unless the failure, a full disk for one, keeps it from being written too."""
    try:
        _write_report(record, root)
    except SaveError as error:
        console.print(f"no run report: {error.headline}", highlight=False, markup=False)


def _write_report(record: RunRecord, root: Path) -> Path:
    html, _ = write_run_report(record, root)
    return html


@contextmanager
def _graceful_stop(trainer: Any, console: Console) -> Iterator[list[int]]:
    """The first Ctrl-C or SIGTERM lets the step end and saves a checkpoint; the second stops at once.

    Yields the signals so far. Outside the main thread, where Python takes no signals, it changes nothing.
    """
    from transformers import TrainerCallback

    stopped: list[int] = []
    owner = os.getpid()

    class Stop(TrainerCallback):  # type: ignore[misc]  # transformers ships no types
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if stopped:
                control.should_save = control.should_training_stop = True

        on_evaluate = on_step_end  # a signal during an evaluation need not wait for one more step

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if stopped:
                control.should_training_stop = True

    def ask_to_stop(signum: int, frame: FrameType | None) -> None:
        if os.getpid() != owner:
            return  # a data loader's worker: the terminal sends Ctrl-C to it as well, and it ends with its parent
        if stopped:
            raise KeyboardInterrupt
        stopped.append(signum)
        console.print("\nstopping after this step and saving a checkpoint; once more to stop at once")

    if threading.current_thread() is not threading.main_thread():
        yield stopped
        return
    trainer.add_callback(Stop)
    before = {s: signal.signal(s, ask_to_stop) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stopped
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def resume_command(settings: Settings, checkpoint: Path) -> str:
    """The command that goes on from `checkpoint`."""
    argv: list[str] = []
    flag = re.compile(r"--resume[_-]from[_-]checkpoint(=.*)?")
    tokens = iter(settings.argv)
    for token in tokens:
        found = flag.fullmatch(token)
        if found is None:
            argv.append(token)
        elif found[1] is None:
            next(tokens, None)
    if "output_dir" not in settings.explicit:
        argv += ["--output_dir", settings.training.output_dir]
    return describe.command_line([settings.method.name, *argv, "--resume_from_checkpoint", str(checkpoint)])

"""Runs a training command: from parsed arguments to a trained adapter (or model) and a run report."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError
from rich.console import Console
from transformers import PrinterCallback, ProgressCallback

from isotype.checkpoint.checkpoint import open_checkpoint
from isotype.checkpoint.formats.hub import local_snapshot
from isotype.compat.glibc import freed_memory_kept
from isotype.compat.hub import asking
from isotype.compat.interrupt import interrupts_kept, signal_of
from isotype.compat.templates import ERRORS, day_held
from isotype.compat.transformers import gpus_left, name_of, rename
from isotype.core.errors import IsotypeError, SaveError, TrainingError, UsageError, one_line
from isotype.core.files import recover
from isotype.data.pictures import picture_columns
from isotype.lora.fuse import FusionReport, fuse
from isotype.lora.kernels import float32_reductions
from isotype.model.recompute import CHECKPOINTING, checkpointing_arguments
from isotype.precision.by_ranges import with_ranges_of
from isotype.precision.damages import with_constants_of
from isotype.precision.devices.profile import DeviceProfile
from isotype.precision.policy import PrecisionPolicy
from isotype.report.run.record import RunRecord, Sample
from isotype.report.text import say
from isotype.train import describe, models
from isotype.train.chat import Prompt, answer, answers_after
from isotype.train.command.settings import Settings, fix_of_message
from isotype.train.compilation import compile_blocks
from isotype.train.initial_adapter import start_of
from isotype.train.launched import Sharding, leave_group_at_exit, lost_process_named, take_sharding
from isotype.train.libraries import require_fitting_libraries
from isotype.train.monitor.recorder import PeriodicReport, RunRecorder
from isotype.train.output import resume
from isotype.train.output.run_report import earlier_report, files_of_checkpoint, model_card, write_report
from isotype.train.output.saving import Hooks
from isotype.train.policy import (
    enforce_trainer,
    masters_of,
    policy_of_run,
    precision_arguments,
    sound_attention,
)
from isotype.train.preflight.plan_rows import choice_of_run
from isotype.train.rewards import check_rewards, rewards_of
from isotype.train.rows.assistant import labelled_rows
from isotype.train.rows.collators import exclude_pictures_from_loss, keep_rows
from isotype.train.rows.data import dropped_examples, fitting, pictures_named, training_data
from isotype.train.rows.lengths import adapter_notes, lengths_in
from isotype.train.run import Choice, Run
from isotype.train.signals import balancing_note, early_stopping, graceful_stop, last_model_note
from isotype.train.trainer import policy_trainer
from isotype.train.validate import check_policy, check_settings, check_tokenizer, plain_turns, training_device


@dataclass(frozen=True)
class Outcome:
    """The result of a run.

    Attributes:
        adapter: directory of the saved adapter (or model), or None if nothing was saved.
        checkpoint: the last complete checkpoint of this run, or else the resumed checkpoint; None without a checkpoint.
        stopped_by: number of the signal that stopped the run; None if no signal stopped the run.
    """

    record: RunRecord
    adapter: Path | None
    report: Path
    checkpoint: Path | None = None
    stopped_by: int | None = None
    pictures: bool = False


def run(settings: Settings, console: Console) -> Outcome:
    """Run one training command.

    Run a training. Errors in arguments, data, device and the checkpoint's headers are raised before any weights are
    read.

    Raises:
        IsotypeError: arguments, data, checkpoint or precision are invalid, or the disk is full when a file is saved.
    """
    require_fitting_libraries()
    with interrupts_kept():
        settings = start_of(settings)
        sharding = take_sharding(settings)
        profile = training_device(settings)
        settings = _for_machine(settings, sharding, profile)
        if (gpus := gpus_left(settings.training) + 1) > 1:
            launcher = f"torchrun --standalone --nproc_per_node {gpus} -m isotype {settings.method.name} …"
            say(console, f"note: training on the first of {gpus} GPUs; {launcher} trains on all of them")
        rewards = rewards_of(settings)
        check_settings(settings)
    with resume.output_directory(settings, console), sound_attention(profile):
        with interrupts_kept():
            decided = _decided(settings, profile, rewards)
        with day_held(date.fromisoformat(decided.identity[resume.TEMPLATE_DATE])):
            with interrupts_kept():
                built = _built(decided, console)
            return _train(built, console)


def _for_machine(settings: Settings, sharding: Sharding | None, profile: DeviceProfile) -> Settings:
    """Return the settings for this machine. They do not have `--fsdp`, because isotype itself shards the model."""
    values: dict[str, Any] = {}
    if not torch.cuda.is_available():
        values["dataloader_pin_memory"] = False  # torch warns about pinned memory without a GPU
    elif profile.kind in ("cuda", "rocm") and "accelerator_config" not in settings.command:
        values["accelerator_config"] = {"non_blocking": bool(settings.dataloader_pin_memory)}
    auto = settings.auto_checkpointing
    if sharding is not None:
        values["fsdp"] = None
        if sharding.checkpointing:
            values |= checkpointing_arguments(CHECKPOINTING)
            auto = False
    return replace(settings.but(**values), sharding=sharding, auto_checkpointing=auto)


def _decided(settings: Settings, profile: DeviceProfile, rewards: dict[str, Any]) -> Run:
    """Read the data and decide the policy. Raise CheckpointError if the resumed checkpoint belongs to another run."""
    resumed = resume.resume_point(settings)
    earlier = earlier_report(resumed)
    notes: list[str] = []
    data = training_data(settings, notes.append)
    check_rewards(settings, rewards, data)
    checkpoint = open_checkpoint(settings.model_name_or_path, settings.model_revision)
    models.require_token_ids(checkpoint.model_config, settings)
    saved = None if resumed is None else PrecisionPolicy.read(resumed)
    when = settings.ranges if saved is None else "known"
    policy, ranges = policy_of_run(checkpoint, settings.precision, settings.device, when=when)
    policy = with_constants_of(with_ranges_of(policy, saved), saved)
    check_policy(settings, policy)
    checkpoint.require_weights()
    rows = data[settings.dataset_train_split]
    identity = resume.identity_of(settings, checkpoint, policy, rows, resumed)
    return Run(
        settings=settings,
        checkpoint=checkpoint,
        policy=policy,
        profile=profile,
        data=data,
        rewards=rewards,
        resume=resumed,
        earlier=earlier,
        identity=identity,
        notes=tuple(notes),
        ranges=ranges,
    )


def _built(run: Run, console: Console) -> Run:
    """Build the model and the trainer under the policy. Before the training, answer the sample questions."""
    from transformers import set_seed

    settings, policy, data = run.settings, run.policy, run.data
    method = settings.method
    source = run.checkpoint.tokenizer_source()
    tokenizer = models.processing_class(source, revision=run.checkpoint.revision)
    if not settings.method.takes_pictures:  # TRL's trainer does not take the processor, either
        tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
    if method.loss == "policy":
        # TRL (1.16) pads prompts on the left, but the types of their tokens on the tokenizer's side.
        getattr(tokenizer, "tokenizer", tokenizer).padding_side = "left"
    day = run.identity[resume.TEMPLATE_DATE]
    resume.store_date(settings, day, tokenizer)
    check_tokenizer(settings, source, tokenizer, data)
    notes = list(run.notes)
    settings, data = fitting(settings, tokenizer, data, notes.append)
    run = replace(run, settings=settings, data=data)
    train_split, test_split = settings.dataset_train_split, settings.dataset_test_split
    counted = "max_length" in settings.command.specs
    lengths = lengths_in(settings, tokenizer, data[train_split]) if counted else None
    rows = labelled_rows(settings, tokenizer, data, notes.append)
    notes += plain_turns(settings, tokenizer, data)
    notes += adapter_notes(settings, tokenizer, data[train_split])
    choice = choice_of_run(run, tokenizer, lengths)
    loud = {"quiet": settings.quiet, "verbose": settings.verbose}
    describe.show_policy(console, policy, settings.optim, choice, **loud)
    if run.resume is None:
        resume.print_overwritten_run(settings, console)
    set_seed(settings.seed)
    with console.status(f"loading {run.checkpoint.name} as {policy.form} …"):
        adapt = models.parts_to_adapt(settings, next(iter(rows[train_split]), {}))
        model, peft_config = models.adapted_model(settings, run.checkpoint, policy, adapt=adapt)
    describe.show_model(console, model)
    questions = _first_answers(run, model, tokenizer, console)
    masters = masters_of(model)
    # The trainer reads the chat template, the reward model and the reference model.
    names = (settings.chat_template_path, settings.reward_model_name_or_path, source)
    on_hub = next((name for name in names if isinstance(name, str) and not Path(name).exists()), None)
    with (
        _arguments_of(settings),
        _refused_rows_named(settings, tokenizer, data),
        asking(on_hub),
        _named_by_path(model, source, run.checkpoint.revision),
        models.one_reference(settings, model),
    ):
        trainer = policy_trainer(method.trainer_class())(
            model=model,
            args=_trainer_arguments(run, choice, rows[train_split]),
            train_dataset=rows[train_split],
            eval_dataset=rows[test_split] if settings.eval_strategy != "no" else None,
            processing_class=tokenizer,
            peft_config=peft_config,
            **run.rewards,
        )
    if counts := Counter(change.what for change in enforce_trainer(trainer, policy, masters)):
        places = ", ".join(f"{what} ({count} places)" for what, count in counts.items())
        console.print(f"undone changes by TRL: {places}", style="dim", highlight=False, markup=False)
    fusion = _compiled_or_fused(trainer, settings, console)
    packing = keep_rows(trainer)
    exclude_pictures_from_loss(trainer, settings.training)
    dropped = dropped_examples(settings, rows[train_split], trainer.train_dataset)
    # A reward trainer leaves long rows out, and `dropped` names their number.
    cut = lengths and settings.method.loss != "reward" and lengths.cut(settings.max_length)
    twice = lengths and lengths.begun_twice()
    dated = resume.date_note(data[train_split], day, run.resume, trainer.processing_class)
    more = (dated, twice, cut, dropped, packing, balancing_note(trainer), last_model_note(settings))
    notes += [note for note in more if note]
    for note in notes:
        say(console, f"note: {note}")
    if run.resume is None:
        example = None if settings.quiet else describe.example_of(trainer)
        describe.show_data(console, describe.data_summary(trainer, lengths), example)
    return replace(
        run,
        identity={**run.identity, resume.RECOMPUTED: choice.arguments},
        notes=tuple(notes),
        trainer=trainer,
        questions=questions,
        choice=choice,
        fusion=fusion,
        lengths=lengths,
        pictures=method.takes_pictures and any(map(picture_columns, data.values())),
    )


def _compiled_or_fused(trainer: Any, settings: Settings, console: Console) -> FusionReport | None:
    """Compile the model's blocks or fuse its layers. Return the report on fused layers, or None if no layer is fused."""
    if trainer.compilation is not None:
        say(console, compile_blocks(trainer.model, trainer.compilation))
        return None
    if not settings.fuse:
        return None
    fusion = fuse(trainer.model)
    if getattr(trainer, "ref_model", None) is not None:
        fuse(trainer.ref_model)
    describe.show_fusion(console, fusion, settings.verbose)
    return fusion


def _trainer_arguments(run: Run, choice: Choice, rows: Any) -> Any:
    """Return the trainer's arguments with values for the policy, the gradient checkpointing, and the rows."""
    values = {**precision_arguments(run.policy), "model_init_kwargs": None}
    if run.settings.auto_checkpointing:
        values |= checkpointing_arguments(choice.arguments)
    pictures = picture_columns(rows)
    if pictures or "input_ids" in next(iter(rows), {}):
        # TRL refuses this argument for rows with labels, and for chat templates without markers.
        values["assistant_only_loss"] = False
    if pictures and run.settings.method.loss == "labels":
        values["remove_unused_columns"] = False  # TRL would remove the column `tools`, for example
    return run.settings.but(**values).training


@contextmanager
def _arguments_of(settings: Settings) -> Iterator[None]:
    """Turn errors of TRL and PEFT while a trainer is built into a UsageError about the user's arguments."""
    try:
        yield
    except (ValueError, ImportError, NotImplementedError) as error:
        trainer, message = settings.method.trainer, one_line(error)
        values = {**vars(settings.model), **vars(settings.training)}
        fix = fix_of_message(message, settings.command.values, values, f"isotype {settings.method.name}")
        headline = f"{trainer} does not accept these arguments"
        raise UsageError.of(headline, message, f"arguments that {trainer} accepts together", fix) from error


@contextmanager
def _refused_rows_named(settings: Settings, tokenizer: Any, data: Any) -> Iterator[None]:
    """If the chat template raises an error for a row, render all rows to find this row. Raise DataError with the row's number."""
    try:
        yield
    except (TemplateError, *ERRORS):
        for rows in data.values():
            lengths_in(settings, tokenizer, rows, every=True)
        raise


@contextmanager
def _named_by_path(model: Any, source: Path | str, revision: str | None) -> Iterator[None]:
    """While the trainer is built, use the path of the model's weights as the model's name.

    If every weight is trained, TRL loads the reference model by this name. With a hub id, TRL would load the newest
    revision instead of the requested one. With a GGUF file, TRL would fail.
    """
    config = model.get_base_model().config if hasattr(model, "get_base_model") else model.config
    name = name_of(config)
    snapshot = local_snapshot(source, revision) if isinstance(source, str) else None
    rename(config, str(snapshot or source))
    try:
        yield
    finally:
        rename(config, name)


def _first_answers(run: Run, model: Any, tokenizer: Any, console: Console) -> list[tuple[Sample, Prompt]]:
    """Return the sample questions with the answers before the training. A resumed run reads the answers from the report."""
    questions = describe.sample_questions(run.settings, run.data) if run.settings.method.answers else []
    if questions and run.resume is None:
        with console.status("answering sample questions before training …"):
            return [(replace(s, before=answer(model, tokenizer, prompt)), prompt) for s, prompt in questions]
    samples = () if run.earlier is None else run.earlier.samples
    before = {(sample.question, sample.pictures): sample.before for sample in samples}
    return [(replace(s, before=before.get((s.question, s.pictures))), prompt) for s, prompt in questions]


def _train(run: Run, console: Console) -> Outcome:
    from isotype.train.callback import PrecisionCallback
    from isotype.train.monitor.progress import ProgressView

    settings, root = run.settings, Path(run.settings.output_dir)
    trainer, samples = run.trainer, [sample for sample, _ in run.questions]
    started = datetime.now(UTC)
    resume_command = partial(resume.resume_command, settings.command, settings.output_dir)
    write = partial(write_report, root=root, writes=trainer.args.should_save)
    resume.print_resume_point(settings, run.identity, run.resume, console)
    with ProgressView(console, trainer.args.logging_steps) as view:
        recorder = RunRecorder(trainer, view, run.earlier)
        record_of = partial(describe.record, run, describe.model_summary(trainer.model), recorder, started)
        so_far = partial(record_of, samples, "running")
        hooks = Hooks(
            before=recorder.settle,
            in_checkpoint=partial(files_of_checkpoint, run.identity, so_far),
            card=lambda: model_card(record_of(samples, "finished")),
            resume_command=resume_command,
        )

        def ended(
            record: RunRecord, *notes: str, adapter: Path | None = None, by: int | None = None
        ) -> Outcome:
            record = replace(record, notes=(*record.notes, *filter(None, notes)))
            report = write(record, made_steps=recorder.made_steps)
            return Outcome(record, adapter, report, trainer.last_checkpoint(), by, run.pictures)

        stopping = early_stopping(settings)
        periodic = PeriodicReport(lambda: write(so_far(), made_steps=True))
        for printing in (PrinterCallback, ProgressCallback):
            trainer.remove_callback(printing)
        check = PrecisionCallback(run.policy, ranges=run.ranges)
        for callback in filter(None, (check, recorder, periodic, stopping)):
            trainer.add_callback(callback)
        try:
            with lost_process_named(trainer, resume_command), freed_memory_kept(), float32_reductions():
                stopped_by = _train_and_save(trainer, root, run.resume, hooks, console)
            leave_group_at_exit()
        except TrainingError as failure:
            return ended(record_of(samples, "failed", str(failure)))
        except Exception as failure:
            kind = "" if isinstance(failure, IsotypeError) else f"{type(failure).__name__}: "
            error = "; ".join(filter(None, (f"{kind}{failure}", recorder.record_unread())))
            failed = record_of(samples, "failed", error)
            try:
                write(failed, made_steps=recorder.made_steps)
            except SaveError as unsaved:  # the failure may be a full disk
                say(console, f"no run report: {unsaved.headline}")
            raise
    if stopped_by is not None:
        unread = recorder.record_unread()
        return ended(record_of(samples, "interrupted"), unread, by=stopped_by)
    try:
        samples = answers_after(trainer, run.questions, console)
    except KeyboardInterrupt:
        console.print("interrupted: the model is saved, but did not answer the sample questions again")
    if early := (stopping and stopping.description(trainer.state, trainer.args.metric_for_best_model)) or "":
        say(console, early)
    return ended(record_of(samples, "finished"), early, adapter=root)


def _train_and_save(
    trainer: Any, root: Path, resumed: Path | None, hooks: Hooks, console: Console
) -> int | None:
    """Train, and save the model into `root`. Return the signal that stopped the training, or None if no signal did."""
    with graceful_stop(trainer, console) as stopped, pictures_named(trainer):
        try:
            with interrupts_kept():  # a library may turn the exception of a second signal into an error
                trainer.train(str(resumed) if resumed else None, hooks=hooks, signals=stopped)
            if stopped and trainer.state.global_step < trainer.state.max_steps:
                return stopped[0]
            trainer.save_final(root)
            stopped.clear()  # everything is saved: Ctrl-C may interrupt what follows
        except KeyboardInterrupt as interrupt:
            if trainer.args.should_save:
                recover(root)
            return stopped[0] if stopped else signal_of(interrupt)
    return None

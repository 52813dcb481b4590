"""Plans the step of a training command from the command's arguments and the rows of the data set."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from isotype.checkpoint.checkpoint import open_checkpoint, open_model
from isotype.core.errors import Problem
from isotype.core.names import plural
from isotype.data.build import undecoded
from isotype.data.pictures import picture_columns, pictures_in, size_of
from isotype.model.recompute import CHECKPOINTING, checkpointing
from isotype.precision.devices.profile import device_profile
from isotype.ranges.pictures import NONE, Pictures, pictures_of
from isotype.records.memory import MemoryKind
from isotype.records.request import DEEPSPEED
from isotype.train.command.command import Command
from isotype.train.command.settings import Settings
from isotype.train.initial_adapter import is_its_own_reference
from isotype.train.launched import from_rank_0, processes, requested_sharding
from isotype.train.models import parts_to_adapt, processing_class, require_router, tokenizer_here
from isotype.train.output.resume import RECOMPUTED, saved_settings
from isotype.train.preflight.plan import Options, StepPlan
from isotype.train.preflight.step import PlannedStep
from isotype.train.rewards import check_rewards, rewards_here
from isotype.train.rows.assistant import labelled_rows
from isotype.train.rows.data import fitting, require_rows_left, training_data_here
from isotype.train.rows.lengths import (
    COUNTED_ROWS,
    UNBOUNDED,
    Lengths,
    adapter_notes,
    lengths_in,
    longest_possible,
    packed_rows,
    sampled,
)
from isotype.train.run import Choice, Run
from isotype.train.validate import check_policy, check_tokenizer, checked_settings, plain_turns


def plan_of_training(options: Options, command: Command) -> StepPlan:
    """Return the plan of a command's step. It has the lengths of rows if data set and tokenizer are on this machine."""
    settings = checked_settings(command, options.bare)
    if settings.router_aux_loss_coef:
        model = open_model(str(settings.model_name_or_path), settings.model_revision)
        require_router(model.model_config, settings)
    return _with_data(_of_arguments(options, settings), settings, options)


def choice_of_run(run: Run, tokenizer: Any, lengths: Lengths | None) -> Choice:
    """Choose the layers that a training recomputes in the backward. Rank 0 chooses for all processes."""
    settings, resume = run.settings, run.resume
    if not settings.auto_checkpointing:
        return Choice(checkpointing(settings.training), "as requested")
    earlier = saved_settings(resume)
    if resume is not None and RECOMPUTED in earlier:
        return Choice(earlier[RECOMPUTED], f"as in {resume.name}, which the run resumes")
    plan = training_plan(settings, tokenizer, run.data, lengths)
    return from_rank_0(PlannedStep(plan, run.checkpoint.model_config, run.policy, by_tokens=True).choice)


def training_plan(settings: Settings, tokenizer: Any, data: Any, lengths: Lengths | None = None) -> StepPlan:
    """Return the plan of the training's step, with the length of the longest possible row."""
    rows = data[settings.dataset_train_split]
    adapt = parts_to_adapt(settings, next(iter(rows), {}))
    plan = replace(_of_arguments(Options(), settings), adapt=adapt)
    lengths = lengths or lengths_in(settings, tokenizer, rows)
    return _bounded(_with_rows(plan, settings, tokenizer, data, lengths), settings, rows)


def _of_arguments(options: Options, settings: Settings) -> StepPlan:
    """Return the plan that follows from the arguments alone, without the data set."""
    from trl import get_peft_config

    method = settings.method
    default_rows = options.bare and "per_device_train_batch_size" not in settings.command
    rows = options.batch or (1 if default_rows else settings.per_device_train_batch_size)
    # The default of `max_length` is a row's length only if packing fills the rows.
    filled = "max_length" in settings.command or settings.packing
    length = options.length or (settings.max_length if filled else None)
    completion = settings.max_completion_length or 0
    bounded = options.length or settings.max_length or completion
    attention, notes = settings.attn_implementation, []
    sharding = settings.sharding or requested_sharding(settings.training)
    recomputes = sharding is not None and sharding.checkpointing
    packed = bool(settings.packing) and str(settings.packing_strategy).startswith("bfd")
    if attention is not None and "flash" in attention:
        notes.append(f"{attention} is traced as scaled_dot_product_attention, which accepts more dtypes")
        attention, packed = None, False
    if settings.torch_compile:
        same = "dtypes and findings are the same, but memory can differ"
        notes.append(f"torch.compile: the uncompiled step is checked ({same})")
    compares = method.compares(settings.training)
    precomputed = settings.precompute_ref_log_probs
    copied: MemoryKind | None = None
    if compares and settings.use_peft:
        copied = None if is_its_own_reference(settings) else "adapters"
    elif compares and not precomputed:
        copied = "weights"
    evaluation = None
    if settings.eval_strategy != "no" or settings.eval_split is not None:
        explicit = "per_device_eval_batch_size" in settings.command or method.loss == "policy"
        evaluation = int(settings.per_device_eval_batch_size) if explicit else 0
    start = settings.start
    lora = start.config if start is not None and settings.use_peft else get_peft_config(settings.model)
    if start is None and lora is not None:
        lora.bias = settings.lora_bias
    keywords = checkpointing(settings.training) or (CHECKPOINTING if recomputes else None)
    accumulation = settings.gradient_accumulation_steps
    return StepPlan(
        source=str(settings.model_name_or_path),
        method=method.name,
        precision=settings.precision,
        device=settings.device,
        rows=rows,
        length=length,
        completion=completion,
        generations=_generations(settings),
        reference=compares and not precomputed,
        copied=copied,
        lora=lora,
        adapt=None if settings.adapt is None else parts_to_adapt(settings, ()),
        learning_rate=settings.learning_rate,
        optimizer=settings.optim,
        checkpointing=keywords,
        auto=settings.auto_checkpointing and not recomputes,
        unforeseen=f"{DEEPSPEED} are not traced" if settings.deepspeed else "" if bounded else UNBOUNDED,
        fsdp=options.fsdp if options.fsdp is not None else sharding.version if sharding else 0,
        devices=options.devices or processes(),
        deepspeed=bool(settings.deepspeed),
        reshard=sharding is None or sharding.reshard,
        step_rows=0 if accumulation == 1 else rows * accumulation,
        evaluation=evaluation,
        revision=settings.model_revision,
        attention=attention,
        packed=packed,
        dropout=not settings.disable_dropout,
        notes=tuple(notes),
        ranges=settings.ranges,
        fuse=settings.fuse and not settings.torch_compile,
        check_policy=partial(check_policy, settings),
    )


def _generations(settings: Settings) -> int | None:
    if settings.method.loss != "policy" or settings.use_vllm:
        return None
    if "generation_batch_size" in settings.command:
        rows = int(settings.per_device_train_batch_size) * processes()
        return max(1, int(settings.generation_batch_size) // rows)
    return int(settings.steps_per_generation) if "steps_per_generation" in settings.command else 0


def _with_rows(
    plan: StepPlan, settings: Settings, tokenizer: Any, data: Any, lengths: Lengths | None
) -> StepPlan:
    """Return the plan with the images of the training rows, and the lengths of the training and evaluation rows."""
    pictures = pictures_in_rows(tokenizer, data[settings.dataset_train_split])
    plan, split = replace(plan, pictures=pictures, lengths=lengths), settings.dataset_test_split
    if plan.evaluation is None or split not in data:
        return plan
    held_back = lengths_in(settings, tokenizer, data[split])
    longest, _ = _longest(plan, settings, data[split], held_back)
    return replace(plan, evaluation_lengths=held_back, evaluation_length=longest)


def _bounded(plan: StepPlan, settings: Settings, rows: Any) -> StepPlan:
    """Return the plan with the number of rows in a batch, and the lengths of the shortest prompt and the longest row."""
    lengths = plan.lengths
    if lengths is not None and len(lengths.tokens) == lengths.rows:
        prompts_count = settings.completion_only_loss is False
        plan = replace(plan, prompt=0 if prompts_count else lengths.prompt)
    longest, why = _longest(plan, settings, rows, lengths)
    filled = packed_rows(lengths, settings.max_length) if settings.packing else None
    if filled is not None:
        longest = max(map(sum, filled))
        return replace(_at_most(plan, len(filled)), length=longest, longest=longest)
    # In GRPO and RLOO, a batch has several completions for each row of the data set.
    plan = plan if lengths is None or plan.completion else _at_most(plan, lengths.rows)
    unforeseen = why if plan.unforeseen == UNBOUNDED else plan.unforeseen or why
    unpads = settings.method.loss in ("labels", "preference", "unpaired") and not settings.packing
    return replace(plan, longest=longest, unforeseen=unforeseen, unpads=unpads)


def _at_most(plan: StepPlan, rows: int) -> StepPlan:
    """Return the plan for a data set of `rows` rows. An optimizer step never includes rows of two epochs."""
    return replace(plan, rows=min(plan.rows, rows), step_rows=min(plan.step_rows, rows))


def _longest(
    plan: StepPlan, settings: Settings, rows: Any, lengths: Lengths | None
) -> tuple[int | None, str]:
    return longest_possible(
        lengths,
        settings.max_length,
        packed=settings.packing,
        completion=plan.completion,
        pictured=bool(picture_columns(rows)),
    )


_TRIED = 8
"""Number of rows whose images are encoded. Half of these rows have the most pixels, and the other half has the most images."""


def pictures_in_rows(processor: Any, rows: Any) -> Pictures | None:
    """Return the images of the sampled row with the most pixel values; None for a stream or without a processor."""
    if not hasattr(rows, "__len__") or not len(rows):
        return None
    if not picture_columns(rows):
        return NONE
    if not hasattr(processor, "image_processor"):
        return None
    stored = undecoded(rows)
    encoded = (tuple(map(size_of, pictures_in(stored[at]))) for at in sampled(rows))
    sizes = {row for row in encoded if row and not any(isinstance(size, Problem) for size in row)}
    by_pixels = sorted(sizes, key=lambda row: -sum(width * height for width, height in row))  # type: ignore[misc]
    tried = {*by_pixels[: _TRIED // 2], *sorted(sizes, key=len)[-_TRIED // 2 :]}
    pictures = [pictures_of(None, processor, row) for row in tried]  # type: ignore[arg-type]
    return max(filter(None, pictures), key=lambda picture: (picture.values, picture.tokens), default=NONE)


def _with_data(plan: StepPlan, settings: Settings, options: Options) -> StepPlan:
    """Return the plan with the lengths of the training's rows, if the data set is on this machine."""
    rewards, unchecked = rewards_here(settings)
    plan = replace(plan, notes=(*plan.notes, *unchecked))
    notes: list[str] = []
    data = training_data_here(settings, notes.append)
    if data is None:
        return plan
    check_rewards(settings, rewards, data)
    rows = data[settings.dataset_train_split]
    plan = replace(
        plan,
        data_rows=len(rows) if hasattr(rows, "__len__") else None,
        adapt=parts_to_adapt(settings, next(iter(rows), {})),
        pictures=None if picture_columns(rows) else NONE,
    )
    source, tokenizer = tokenizer_here(plan.source, plan.revision)
    if tokenizer is None:
        whole = Path(source).is_dir() and open_checkpoint(source).files is not None
        if whole and device_profile(settings.device).present:
            processing_class(source)  # raises the CheckpointError of the training
        unknown = "the rows' lengths are unknown, because this machine has no tokenizer of the model"
        return replace(plan, notes=(*plan.notes, unknown))
    check_tokenizer(settings, source, tokenizer, data)
    settings, data = fitting(settings, tokenizer, data, notes.append)
    rows = data[settings.dataset_train_split]
    labelled_rows(settings, tokenizer, data, notes.append, COUNTED_ROWS)
    notes += plain_turns(settings, tokenizer, data)
    lengths = lengths_in(settings, tokenizer, rows)
    if options.length is None:
        require_rows_left(settings, lengths)
    notes += adapter_notes(settings, tokenizer, rows)
    notes += filter(None, [None if lengths is None else lengths.begun_twice()])
    plan = replace(_with_rows(plan, settings, tokenizer, data, lengths), data="; ".join(notes))
    if options.length is not None:
        return plan
    with_rows = _bounded(plan, settings, rows)
    plan = (
        with_rows if options.batch is None else replace(with_rows, rows=plan.rows, step_rows=plan.step_rows)
    )
    if lengths is None or settings.packing:
        return plan
    limit = settings.max_length
    longest = lengths.longest + plan.completion
    line = f"the longest of {plural(len(lengths.tokens), 'row')} has {plural(longest, 'token')}"
    line += f", including a completion of {plan.completion:,}" if plan.completion else ""
    inner = getattr(tokenizer, "tokenizer", tokenizer)
    counted = f"counted by the tokenizer of {plan.source} ({len(inner):,} tokens in its vocabulary)"
    cut = lengths.cut(limit, whole=settings.method.loss == "reward")
    return replace(plan, length=plan.longest or longest, data="; ".join((cut or line, counted, *notes)))

"""Describes a run: in the terminal at its start, and in the run report at its end."""

import math
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from itertools import groupby, islice
from typing import Any, Literal

import numpy
import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from isotype.checkpoint.facts import stored_parameters
from isotype.compat.peft import without_peft
from isotype.core.allocator import allocator_setting
from isotype.core.dtypes import dtype_name
from isotype.core.formats import FORMATS, why_kept
from isotype.core.names import epochs_text, format_bytes, plain_name, plural, stacked
from isotype.core.optimizers import state_of
from isotype.core.terminal import as_typed, lost_output, printed_command
from isotype.data.pictures import data_url, pictures_in
from isotype.lora.fuse import FusionReport
from isotype.model.parts import PARTS, Parts
from isotype.precision.policy import PrecisionPolicy
from isotype.precision.versions import installed
from isotype.report.run.record import DataSummary, PolicyRow, RunRecord, Sample, reward_warnings, summarize
from isotype.report.text import NARROW, fitting, format_share, pair_table, say, say_labelled, table_of
from isotype.train.chat import Prompt, with_pictures
from isotype.train.command.settings import Settings
from isotype.train.monitor.recorder import RunRecorder
from isotype.train.rows.collators import Pictured
from isotype.train.rows.lengths import Lengths, padding_share
from isotype.train.run import Choice, Run

_LONGEST_TEXT = 600  # number of printed characters of one part of an example


def data_summary(trainer: Any, lengths: Lengths | None = None) -> DataSummary | None:
    rows, evaluated = trainer.train_dataset, trainer.eval_dataset
    if not hasattr(rows, "__len__"):
        return None
    args, state = trainer.args, trainer.state
    batch = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
    tokens = lengths.tokens if lengths is not None else ()
    limit = getattr(args, "max_length", None)
    packed = getattr(args, "packing", False) or getattr(args, "padding_free", False)
    beyond = [] if limit is None or packed else [length - limit for length in tokens if length > limit]
    packs = len(rows) if getattr(args, "packing", False) and lengths is not None else None
    held_back = evaluated.values() if isinstance(evaluated, dict) else [evaluated or ()]
    padding = 0.0 if tokens else None
    if tokens and not packed:
        cut = [min(length, limit or length) for length in tokens]
        padding = padding_share(cut, args.per_device_train_batch_size)
    return DataSummary(
        rows=len(rows) if packs is None or lengths is None else lengths.rows,
        held_back=sum(map(len, held_back)),
        effective_batch=batch,
        epochs=float(state.epoch) if state.epoch else planned_epochs(args, len(rows), batch),
        lengths=percentiles(tokens) if tokens else None,
        cut_rows=round(len(beyond) * lengths.rows / len(tokens)) if lengths is not None and beyond else 0,
        cut_share=sum(beyond) / sum(tokens) if beyond else 0.0,
        padding_share=padding,
        packs=packs,
    )


def planned_epochs(args: Any, rows: int, batch: int) -> float:
    """Return the planned number of epochs. As in transformers, the last batch and the last step of an epoch may be smaller."""
    if args.max_steps <= 0 or not rows:
        return float(args.num_train_epochs)
    accumulated: int = args.gradient_accumulation_steps
    at_once = batch // accumulated
    batches = max(1, rows // at_once if args.dataloader_drop_last else math.ceil(rows / at_once))
    steps: int = args.max_steps
    whole, rest = divmod(steps, math.ceil(batches / accumulated))
    return whole + rest * accumulated / batches


def percentiles(tokens: Sequence[int]) -> tuple[int, int, int]:
    half, most, longest = numpy.percentile(tokens, (50, 90, 99))
    return round(half), round(most), round(longest)


def example_of(trainer: Any) -> list[tuple[bool, str]] | None:
    """Split the first row into consecutive parts (True if the part has loss, text). Return None if the rows have no labels."""
    if not len(trainer.train_dataset):
        return None
    if isinstance(trainer.data_collator, Pictured):
        return trainer.data_collator.stretches(trainer.train_dataset[0])
    if "input_ids" not in trainer.train_dataset.column_names:
        return None
    batch = trainer.data_collator([trainer.train_dataset[0]])
    if "labels" not in batch:
        return None
    ids, labels = batch["input_ids"][0].tolist(), batch["labels"][0].tolist()
    inner = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
    learned = [label != -100 for label in labels]
    stretches = groupby(zip(learned, ids, strict=True), key=lambda pair: pair[0])
    return [(mask, inner.decode([token for _, token in pairs])) for mask, pairs in stretches]


def show_data(console: Console, summary: DataSummary | None, example: list[tuple[bool, str]] | None) -> None:
    if summary is not None:
        say(console, "\n".join(_sentences(summary)))
    if example:
        half, rows = _LONGEST_TEXT // 2, list[tuple[str, Text]]()
        for learned, text in example:
            short = text if len(text) <= _LONGEST_TEXT else f"{text[:half]} […] {text[-half:]}"
            shown = Text(short.replace("\n", "↵\n").rstrip("\n"), style="" if learned else "dim")
            rows.append(("learned" if learned else "given", shown))
        title = {"title": "first example", "title_justify": "left", "title_style": "bold"}
        console.print(pair_table(rows, "dim", **title), highlight=False)


def _sentences(data: DataSummary) -> list[str]:
    lines = [f"data: {data.rows_words}; {data.step_words} a step, {epochs_text(data.epochs)}"]
    if data.lengths is not None:
        middle, long, longest = data.lengths
        share = data.padding_share
        padding = "" if share is None else f"; {format_share(share)} of a batch is padding"
        lines.append(f"tokens per row: median {middle:,}, 90 % <= {long:,}, 99 % <= {longest:,}{padding}")
    return lines


_SETTINGS = (
    "learning_rate", "lr_scheduler_type", "per_device_train_batch_size", "gradient_accumulation_steps",
    "num_train_epochs", "max_steps", "max_length", "optim", "weight_decay", "warmup_steps", "max_grad_norm",
    "seed",
)  # fmt: skip

_OF_ADAPTERS = (
    "lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "use_dora", "use_rslora", "lora_bias",
    "init_lora_weights",
)  # fmt: skip


def policy_rows(
    policy: PrecisionPolicy, optimizer: Any, choice: Choice | None = None
) -> tuple[tuple[str, str, str], ...]:
    """Return (role, dtype, reason) for each row of the policy, for the optimizer state, and for gradient checkpointing."""
    rows, state = {row[0]: row for row in policy.rows()}, state_of(str(optimizer))
    if state is not None:
        role = "optimizer state"
        rows[role] = (role, f"{state[0].format(dtype_name(policy.master))} ({optimizer})", state[1])
    return (*rows.values(), *(() if choice is None else (("checkpointing", choice.words, choice.reason),)))


_SHORT_ROLES = {
    "frozen base weights": "base", "residual stream": "residual", "trainable parameters": "masters",
    "optimizer state": "optimizer", "gradient reduction": "reduce", "pinned parameters": "pinned",
    "rotary and other buffers": "buffers", "softmax and loss": "loss",
}  # fmt: skip


def show_policy(
    console: Console,
    policy: PrecisionPolicy,
    optimizer: Any = None,
    choice: Choice | None = None,
    *,
    quiet: bool = False,
    verbose: bool = False,
) -> None:
    """Print the policy and its warnings. `--quiet` prints the policy in three lines, `--verbose` prints full reasons."""
    rows = policy_rows(policy, optimizer, choice)
    if quiet:
        third = -(-len(rows) // 3)
        words = [f"{_SHORT_ROLES.get(role, role)} {dtype}" for role, dtype, _ in rows]
        lines = [", ".join(words[at : at + third]) for at in range(0, len(words), third)]
        say(console, "precision  " + "\n           ".join(lines))
    else:
        title: dict[str, Any] = {"title": "precision policy", "title_justify": "left", "title_style": "bold"}
        table = Table(box=None, pad_edge=False, **title)
        table.add_column("role", style="bold", no_wrap=True)
        table.add_column("dtype", style="cyan", no_wrap=True)
        table.add_column("reason", overflow="fold")
        whole = verbose or console.width < NARROW
        room = console.width - sum(max(map(len, cells)) + 2 for cells in list(zip(*rows, strict=True))[:2])
        more = " ..." if console.options.ascii_only else " …"
        for role, dtype, reason in rows:
            shown = reason if whole else textwrap.shorten(reason, room, placeholder=more)
            table.add_row(*map(Text, (role, dtype, shown)))
        console.print(fitting(table, console))
    say_labelled(console, "stored otherwise", "cyan", policy.layer_lines())
    say_labelled(console, "exception", "cyan", policy.exception_lines())
    say_labelled(console, "warning", "yellow", policy.warnings)
    console.print()


def show_model(console: Console, model: Any) -> None:
    total, trainable, sizes, notes = model_summary(model)
    stored = ", ".join(f"{name} {format_bytes(size)}" for name, size in sizes)
    console.print(
        f"model: {total / 1e6:.1f} M parameters, {trainable / 1e6:.2f} M trainable ({format_share(trainable / total)}); "
        f"weights: {stored}",
        highlight=False,
    )
    if rows := part_rows(model):
        numbers = ("parameters", "trainable")
        table = table_of("part", *numbers, "stored as", numbers=numbers)
        for part, total, trainable, dtypes in rows:
            table.add_row(part, f"{total / 1e6:.2f} M", f"{trainable / 1e6:.2f} M", dtypes)
        console.print(fitting(table, console), highlight=False)
    say_labelled(console, "note", "yellow", notes)


def part_rows(model: Any) -> list[tuple[str, int, int, str]]:
    """Return (part, parameters, trainable parameters, storage dtypes) for each part of an image or audio model; [] for other models."""
    base = without_peft(model)
    parts = Parts(base)
    if not parts.towers:
        return []
    totals, learn, forms = Counter[str](), Counter[str](), dict[str, set[str]]()
    for parameter in stored_parameters(base, ("lora_",)):
        part = parts.of(plain_name(parameter.name))
        totals[part] += parameter.elements
        forms.setdefault(part, set()).add(_form(parameter.dtype))
    for name, weight in base.named_parameters():
        learn[parts.of(plain_name(name))] += weight.numel() * weight.requires_grad
    return [(p, totals[p], learn[p], ", ".join(sorted(forms[p]))) for p in PARTS if totals[p]]


def _form(dtype: Any) -> str:
    return dtype_name(dtype) if isinstance(dtype, torch.dtype) else str(dtype)


def show_fusion(console: Console, report: FusionReport, verbose: bool) -> None:
    if not report.fused and not report.left:
        return  # every weight is trained
    short = [report.summary, *report.fallbacks, *report.left_lines]
    for line in str(report).splitlines() if verbose else short:
        say(console, line)


def parameter_counts(model: Any) -> tuple[int, int]:
    """Return the numbers of all and of trainable parameters. For a packed weight, the unpacked values are counted."""
    total = sum(stored.elements for stored in stored_parameters(model))
    return total, sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def weight_bytes(model: Any) -> tuple[tuple[str, int], ...]:
    """Return (storage dtype, bytes) pairs for the weights and their quantization constants. The largest pair is first."""
    sizes: Counter[str] = Counter()
    for parameter in stored_parameters(model):
        sizes[_form(parameter.dtype)] += parameter.bytes
    return tuple(sizes.most_common())


def model_notes(model: Any) -> tuple[str, ...]:
    """Return the model's `adapter_notes`, and a note if the stacked experts of a quantized model are not quantized."""
    notes: tuple[str, ...] = tuple(getattr(model, "adapter_notes", ()))
    formats = [name for name, _ in weight_bytes(model) if name in FORMATS]
    matrices = ((n, p) for n, p in model.named_parameters() if p.ndim == 3 and p.is_floating_point())
    named = {name: p for name, p in matrices if not p.requires_grad}
    if not formats or not named:
        return notes
    size, kept = sum(p.nbytes for p in named.values()), next(iter(named.values())).dtype
    why = why_kept(((name, p.shape) for name, p in named.items()), formats[0])
    line = f"{plural(len(named), stacked(named))} ({format_bytes(size)}) stay in {dtype_name(kept)}: {why}"
    return (line, *notes)


def model_summary(model: Any) -> tuple[int, int, tuple[tuple[str, int], ...], tuple[str, ...]]:
    """Return the results of `parameter_counts`, `weight_bytes` and `model_notes`. The training does not change these values."""
    return *parameter_counts(model), weight_bytes(model), model_notes(model)


_PICTURED = 4


def sample_questions(settings: Settings, data: Any) -> list[tuple[Sample, Prompt]]:
    """Return (sample, prompt) of `--ask`. Without `--ask`, use the first row of the test split, or the first four rows with images."""
    if settings.ask:
        asked = as_typed(settings.ask)
        return [(Sample(asked, None, None, None), [{"role": "user", "content": asked}])]
    split = settings.dataset_test_split
    rows = list(islice(data[split], _PICTURED)) if split in data else []
    rows = rows[: _PICTURED if rows and pictures_in(rows[0]) else 1]
    return [question for row in rows if (question := _question(row)) is not None]


def _question(row: Mapping[str, Any]) -> tuple[Sample, Prompt] | None:
    prompt: Any = row.get("prompt")
    answer = row.get("completion") or row.get("chosen")
    messages = row.get("messages")
    if prompt is None and isinstance(messages, list):
        first = next((n for n, m in enumerate(messages) if m.get("role") == "assistant"), len(messages))
        prompt, answer = messages[:first], messages[first : first + 1]
    question, pictures = _text(prompt), pictures_in(row)
    if question and pictures:
        prompt = with_pictures(prompt, pictures)
    sample = Sample(question or "", None, None, _text(answer), tuple(map(data_url, pictures)))
    return (sample, prompt) if question else None


def _text(value: Any) -> str | None:
    if isinstance(value, list) and value and isinstance(value[-1], dict):
        value = value[-1].get("content")
        if isinstance(value, list):
            value = " ".join(part["text"] for part in value if part.get("type") == "text")
    return value if isinstance(value, str) else None


def record(
    run: Run,
    summary: tuple[int, int, tuple[tuple[str, int], ...], tuple[str, ...]],
    recorder: RunRecorder,
    started: datetime,
    samples: Sequence[Sample],
    status: Literal["running", "finished", "interrupted", "failed"],
    error: str | None = None,
) -> RunRecord:
    settings, policy, trainer = run.settings, run.policy, run.trainer
    total, trainable, stored, notes = summary
    allocator = allocator_setting() if run.profile.kind == "cuda" else None
    dataset = settings.dataset_name or ", ".join(d.path for d in settings.datasets)
    return RunRecord(
        method=settings.method.name,
        command=printed_command(settings.command.tokens()),
        started=started.isoformat(timespec="seconds"),
        finished=None if status == "running" else datetime.now(UTC).isoformat(timespec="seconds"),
        status=status,
        error=error,
        model=str(settings.model_name_or_path),
        dataset=dataset,
        output_dir=str(settings.output_dir),
        device=run.profile.title,
        policy=tuple(PolicyRow(*row) for row in policy_rows(policy, settings.optim, run.choice)),
        warnings=(*policy.warnings, *reward_warnings(recorder.steps)),
        versions=tuple((name, version or "not installed") for name, version in installed().items()),
        parameters_total=total,
        parameters_trainable=trainable,
        weight_bytes=stored,
        settings=(
            *_hyperparameters(settings),
            *([] if allocator is None else [("allocator", allocator)]),
            *_kernel_rows(run.fusion),
        ),
        steps=tuple(recorder.steps),
        evals=tuple(recorder.evals),
        samples=tuple(samples),
        notes=(*notes, *run.notes, *lost_output()),
        resumed_from=recorder.resumed_from,
        data=data_summary(trainer, run.lengths),
        headroom=recorder.headroom(),
        earlier_seconds=0.0 if run.earlier is None else summarize(run.earlier).seconds,
    )


def _hyperparameters(settings: Settings) -> tuple[tuple[str, str], ...]:
    unused = "num_train_epochs" if settings.max_steps > 0 else "max_steps"
    names = [name for name in _SETTINGS if name != unused and name in settings.command.specs]
    rows = [(name, str(settings.value(name))) for name in names]
    if settings.use_peft:
        rows += [(name, _words(settings.value(name))) for name in _OF_ADAPTERS]
    rows.append(("early_stopping_patience", _words(settings.early_stopping_patience)))
    return tuple((name, value) for name, value in rows if value)


def _words(value: Any) -> str:
    return ", ".join(value) if isinstance(value, list) else "" if value is None else str(value)


def _kernel_rows(fusion: FusionReport | None) -> list[tuple[str, str]]:
    if fusion is None or not (fusion.fused or fusion.left):
        return []
    rows = [("fused", fusion.summary.removeprefix("fused: ")), ("attention", str(fusion.attention))]
    return rows + [("kernels", line) for line in (*fusion.kernel_lines, *fusion.fallbacks)]

"""The arguments of `isotype check`: those of any training command and a few of its own, as one step to check."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isotype.core.arguments import Parser
from isotype.core.errors import Problem, UsageError
from isotype.core.formats import MIXED, QUANTIZATIONS
from isotype.data.methods import METHODS
from isotype.model.recompute import CHECKPOINTING, checkpointing
from isotype.precision.decide import PrecisionRequest
from isotype.train.launched import processes, requested_sharding
from isotype.train.options.arguments import count_problems, number_problems
from isotype.train.preflight.plan import Options, StepPlan

if TYPE_CHECKING:
    from isotype.checkpoint.adapter import Adapter
    from isotype.records.memory import MemoryKind
    from isotype.train.options.settings import Settings
    from isotype.train.rows.lengths import Lengths

DEFAULT_LENGTH = 1024
"""Tokens a row where nothing says another number; TRL's own default of `--max_length`."""

_DESCRIPTION = """\
Trace one training step on fake tensors and say what will crash, cost or lose precision, on any device, without
weights, a GPU or a data set.

  isotype check MODEL [flags]           a directory, config.json, GGUF file, embedded:NAME or hub id
  isotype check sft --model_name_or_path MODEL [flags]
                                        any training command, with `check` put before it
  isotype check package.module:function a function that returns (model, inputs), or a dict of isotype.check's
                                        arguments

Every flag of `isotype sft` (dpo, …) works; these are the ones of a check alone, and the ones used most:"""

_STATUS = "exit status: 0 nothing found, 1 something at or above --fail-on, 2 bad arguments"


def parse_options(argv: Sequence[str]) -> tuple[Options, list[str]]:
    """The check's own arguments, and the rest, which are a training command's.

    Raises:
        UsageError: a value that is not one of an argument's.
    """
    tokens = list(argv)
    parser = _own_parser()
    if "-h" in tokens or "--help" in tokens:
        help_parser().print_help()
        raise SystemExit(0)
    model = None
    if tokens and not tokens[0].startswith("-") and tokens[0] not in METHODS:
        model = tokens.pop(0)
    # `--fsdp full_shard` is TRL's own argument of that name.
    tokens, fsdp = _take_fsdp(tokens)
    known, rest = parser.parse_known_args(tokens)
    problems = list(parser.problems)
    problems += count_problems({name: getattr(known, name) for name in ("batch", "length", "devices")})
    if model is None and not rest:
        problems.append(
            Problem(
                "no model",
                "a model, a training command with its arguments, or package.module:function",
                "isotype check MODEL --device t4, or isotype check sft --model_name_or_path MODEL …",
            )
        )
    parser.refuse(problems)
    return Options(model=model, fsdp=fsdp, **vars(known)), rest


def _take_fsdp(tokens: list[str]) -> tuple[list[str], int | None]:
    rest, version = [], None
    pending = iter(range(len(tokens)))
    for at in pending:
        name, _, value = tokens[at].partition("=")
        following = tokens[at + 1] if at + 1 < len(tokens) else ""
        if name == "--fsdp" and (value or following) in ("0", "1", "2"):
            version = int(value or following)
            if not value:
                next(pending)
        else:
            rest.append(tokens[at])
    return rest, version


def _own_parser() -> Parser:
    parser = Parser(prog="isotype check", add_help=False)
    _add_own(parser)
    return parser


def _add_own(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--batch", type=int, default=None, help="rows a step; the training's own, or 1 for a bare MODEL")
    add("--length", type=int, default=None, help=f"tokens a row; --max_length, or {DEFAULT_LENGTH}")
    add(
        "--devices",
        type=int,
        default=None,
        help="devices that train together: each with all weights (DDP), or with --fsdp 2 (--fsdp full_shard) each with a share",
    )
    add("--generate", action="store_true", help="trace generation too")
    add("-v", "--verbose", action="store_true", help="print how memory and time come about, too")
    add("--json", action="store_true", help="print JSON")
    add("--sarif", metavar="PATH", default=None, help="write SARIF, for code scanning; - prints it")
    add("--html", type=Path, metavar="PATH", default=None, help="write the report as one HTML file")
    add("--fix", action="store_true", help="show the repaired command, or what repairs the function's model")
    levels = ("error", "warning")
    add("--fail-on", choices=levels, default="error", help="severity that fails (default: error)")


def light_parser() -> Parser:
    """The training arguments used most; their defaults are those of `isotype sft`, as the tests hold them to."""
    parser = Parser(prog="isotype check", add_help=False)
    add = parser.add_argument
    add("--dtype", default="auto", help="compute dtype; auto: the checkpoint's, where the device runs it")
    add("--quantization", choices=(*QUANTIZATIONS, MIXED), default=None, help="storage of the frozen weights")
    add(
        "--device",
        default="auto",
        help="a device here (cpu, cuda) or any profile (t4, a100, h100, mi300x, …)",
    )
    add(
        "--ranges",
        choices=("measure", "known"),
        default="measure",
        help="for float16: measure the checkpoint's value ranges, or decide by what is known already",
    )
    add("--lora_r", type=int, default=16, help="rank of the adapters (default: 16)")
    add("--lora_alpha", type=int, default=32, help="scale of the adapters, over their rank (default: 32)")
    add("--lora_dropout", type=float, default=0.05, help="in front of the adapters (default: 0.05)")
    add("--learning_rate", type=float, default=2e-5, help="of the optimizer (default: 2e-5)")
    add(
        "--optim", default="adamw_torch_fused", help="optimizer, by transformers' name (default: %(default)s)"
    )
    return parser


def help_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="isotype check",
        usage="isotype check MODEL [flags]",
        description=_DESCRIPTION,
        epilog=_STATUS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[light_parser()],
        allow_abbrev=False,
    )
    parser.add_argument("--fsdp", choices=("0", "1", "2"), help="version of FSDP that shards the run")
    _add_own(parser)
    return parser


def plan_of(options: Options, rest: Sequence[str]) -> tuple[StepPlan, tuple[str, ...]]:
    """The step that the arguments describe, and the training command it belongs to.

    Only arguments beyond the few of `light_parser` need the trainers' own parser, whose import takes seconds.

    Raises:
        UsageError: no model, or an argument that no one knows.
    """
    if options.model is not None:
        parser = light_parser()
        light, unknown = parser.parse_known_args(list(rest))
        if not unknown:
            parser.refuse([*parser.problems, *number_problems(lambda name: getattr(light, name, None))])
            command = ("isotype", "sft", "--model_name_or_path", options.model, *rest)
            return _light_plan(options, light), command
    method, arguments = "sft", list(rest)
    if arguments and arguments[0] in METHODS:
        method, arguments = arguments[0], arguments[1:]
    if options.model is not None:
        _refuse_second_model(options.model, arguments)
        arguments = ["--model_name_or_path", options.model, *arguments]
    from isotype.train.initial_adapter import start_of
    from isotype.train.options.settings import parse_settings
    from isotype.train.preflight.plan_rows import with_data
    from isotype.train.validate import argument_problems

    settings, start = start_of(parse_settings(METHODS[method], arguments))
    problems = argument_problems(settings)
    if problems:
        raise UsageError("arguments that cannot work", problems)
    plan = _full_plan(options, settings, start)
    return with_data(plan, settings, options), ("isotype", method, *arguments)


def _refuse_second_model(first: str, arguments: Sequence[str]) -> None:
    named = [each for each in arguments if each.replace("-", "_").startswith("__model_name_or_path")]
    if not named:
        return
    near = difflib.get_close_matches(first.lower(), METHODS, n=1)
    fix = f"did you mean isotype check {near[0]}?" if near else "leave one of the two out"
    raise UsageError.of("two models", f"{first} and --model_name_or_path", "one model", fix)


def _light_plan(options: Options, light: argparse.Namespace) -> StepPlan:
    assert options.model is not None
    lora = {"r": light.lora_r, "lora_alpha": light.lora_alpha, "lora_dropout": light.lora_dropout}
    return StepPlan(
        source=options.model,
        method="sft",
        precision=PrecisionRequest(light.dtype, light.quantization),
        device=light.device,
        rows=options.batch or 1,
        length=options.length,
        lora=lora,
        learning_rate=light.learning_rate,
        ranges=light.ranges,
        optimizer=light.optim,
        checkpointing=CHECKPOINTING,
        auto=True,
        fsdp=options.fsdp or 0,
        devices=options.devices or processes(),
    )


def _full_plan(options: Options, settings: Settings, start: Adapter | None) -> StepPlan:
    training, model = settings.training, settings.model
    method = settings.method.name
    asked = "per_device_train_batch_size" in settings.explicit or options.model is None
    rows = options.batch or (training.per_device_train_batch_size if asked else 1)
    length = options.length or getattr(training, "max_length", None)
    completion = getattr(training, "max_completion_length", 0) or 0
    attention, notes = model.attn_implementation, []
    sharding = _sharding(settings)
    by_mask = attention is None or "flash" not in attention
    if attention is not None and "flash" in attention:
        notes.append(f"{attention} is traced as scaled_dot_product_attention, whose dtypes are wider")
        attention = None
    packed = getattr(training, "packing", False) and str(training.packing_strategy).startswith("bfd")
    if training.torch_compile:
        notes.append(
            "torch.compile: judged is the step as it runs uncompiled; dtypes and findings are the same"
        )
    if training.deepspeed:
        notes.append("DeepSpeed's own casts and sharding are not traced")
    return StepPlan(
        source=str(model.model_name_or_path),
        method=method,
        precision=settings.precision,
        device=settings.extra.device,
        rows=rows,
        length=length,
        completion=completion,
        reference=settings.method.compares(training)
        and not getattr(training, "precompute_ref_log_probs", False),
        copied=_copied(settings, start),
        lora=_lora_config(settings, start) if model.use_peft else None,
        learning_rate=training.learning_rate,
        optimizer=str(getattr(training.optim, "value", training.optim)),
        checkpointing=CHECKPOINTING
        if sharding.get("activation_checkpointing") and not training.gradient_checkpointing
        else checkpointing(training),
        auto=settings.auto_checkpointing and not sharding.get("activation_checkpointing"),
        unforeseen=_unforeseen(training, length or completion),
        fsdp=sharding.get("version", 0) if options.fsdp is None else options.fsdp,
        devices=options.devices or processes(),
        reshard=sharding.get("reshard", True),
        step_rows=0
        if training.gradient_accumulation_steps == 1
        else rows * training.gradient_accumulation_steps,
        evaluation=_evaluation(settings),
        revision=model.model_revision,
        attention=attention,
        packed=packed and by_mask,
        dropout=not getattr(training, "disable_dropout", False),
        notes=tuple(notes),
        ranges=settings.extra.ranges,
        # The training leaves layers that torch.compile takes to PEFT; on a check nothing else hangs by it.
        fuse=settings.extra.fuse and not (settings.auto_checkpointing and training.torch_compile),
    )


def _copied(settings: Settings, start: Adapter | None) -> MemoryKind | None:
    from isotype.train.initial_adapter import is_its_own_reference

    if not settings.method.compares(settings.training):
        return None
    if not settings.model.use_peft:
        return None if getattr(settings.training, "precompute_ref_log_probs", False) else "weights"
    return None if is_its_own_reference(settings, start) else "adapters"


def _evaluation(settings: Settings) -> int | None:
    if settings.training.eval_strategy == "no" and settings.extra.eval_split is None:
        return None
    explicit = "per_device_eval_batch_size" in settings.explicit or settings.method.loss == "policy"
    return int(settings.training.per_device_eval_batch_size) if explicit else 0


def _unforeseen(training: Any, length: int) -> str:
    if training.deepspeed:
        return "DeepSpeed's own casts and sharding are not traced"
    from isotype.train.rows.lengths import UNBOUNDED

    return "" if length else UNBOUNDED


def _sharding(settings: Settings) -> dict[str, Any]:
    """What is known of FSDP: as it was asked for, or as the training has taken it out of its arguments."""
    taken = settings.sharding
    if taken is None:
        return requested_sharding(settings.training) or {}
    return {"version": 2, "reshard": taken.reshard, "activation_checkpointing": taken.checkpointing}


def training_plan(
    settings: Settings, start: Adapter | None, tokenizer: Any, data: Any, lengths: Lengths | None = None
) -> StepPlan:
    """The step of a training that is about to begin, with the longest rows that can occur in it.

    Args:
        settings: of the training.
        start: the adapter that is trained further.
        tokenizer: the model's tokenizer or processor.
        data: splits of rows.
        lengths: of the training rows, where they are known already.
    """
    from isotype.train.preflight.plan_rows import bounded, with_held_back
    from isotype.train.rows.lengths import lengths_in

    plain = Options(None, None, None, False, None, None, False, None, None, False, "error")
    plan = _full_plan(plain, settings, start)
    rows = data[settings.script.dataset_train_split]
    plan = with_held_back(plan, settings, tokenizer, data)
    return bounded(plan, settings, rows, lengths or lengths_in(settings, tokenizer, rows))


def _lora_config(settings: Settings, start: Adapter | None) -> Any:
    from trl import get_peft_config

    if start is not None:
        return start.config
    config = get_peft_config(settings.model)
    config.bias = settings.extra.lora_bias
    return config

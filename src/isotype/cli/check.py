"""`isotype check`: one training step traced on fake tensors, judged, and reported."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from isotype.cli.output import quiet_libraries
from isotype.core.arguments import Parser
from isotype.core.errors import Problem, UsageError
from isotype.preflight.from_function import function_arguments
from isotype.train.fit import fitting, set_flag
from isotype.train.plan import DEFAULT_LENGTH, Options, Plan, parse_options, plan_of

if TYPE_CHECKING:
    from isotype.precision.policy import PrecisionPolicy
    from isotype.report.check.report import Report
    from isotype.rules.finding import Action, Finding, Fix


def run(argv: Sequence[str], console: Console) -> int:
    """Run `isotype check` and return its exit status.

    Raises:
        UsageError: arguments that cannot be understood.
        PrecisionError: a policy that the device or the model refuses.
        CheckpointError: no model, or a damaged one.
    """
    quiet_libraries()
    options, rest = parse_options(argv)
    if options.model is not None and _names_function(options.model):
        report, repaired = _check_function(options, rest)
    else:
        plan, command = plan_of(options, rest)
        report, repaired = _check_plan(plan, options, command)
    _show(report, options, console, repaired)
    if repaired is not None and not options.json and options.sarif != "-":
        console.print(repaired.text, highlight=False, markup=False, soft_wrap=True)
    return exit_status(report, options.fail_on)


def exit_status(report: Report, fail_on: str) -> int:
    """0, or 1 where something was found at or above `fail_on`, does not fit, or could not be traced."""
    found = report.errors or not report.complete or report.fits is False
    return 1 if found or (fail_on == "warning" and report.warnings) else 0


@dataclass(frozen=True)
class Repaired:
    """What `--fix` answers.

    Attributes:
        text: in words.
        fixes: what together resolves the findings.
        left: findings that nothing resolves, each with the reason.
        command: the repaired training command; of a function's model None.
    """

    text: str
    fixes: Sequence[Fix]
    left: Sequence[tuple[Finding, str]]
    command: Sequence[str] | None = None

    def content(self) -> dict[str, Any]:
        """As JSON; a fix that changes nothing but the model has the scope `model`, for the others see `SCOPES`."""
        fixes = [{**asdict(fix), "scope": fix.scope} for fix in self.fixes]
        left = [{"code": each.code, "cause": each.cause, "reason": reason} for each, reason in self.left]
        command = None if self.command is None else shlex.join(self.command)
        return {"fixes": fixes, "left": left, "command": command}


def _check_plan(plan: Plan, options: Options, command: Sequence[str]) -> tuple[Report, Repaired | None]:
    """The report on a plan, and the repaired command where it is asked for."""
    from isotype.core.compiler import defer_compiler
    from isotype.preflight.request import StepRequest
    from isotype.preflight.run import run as checked

    defer_compiler()
    _import_bitsandbytes()
    policy, model, length = build(plan)

    def request(rows: int, tokens: int) -> StepRequest:
        return StepRequest(
            model,
            _inputs(replace(plan, rows=rows), model, tokens),
            policy,
            plan.device,
            autocast=policy.autocast or False,
            scaler=policy.loss_scaling,
            optimizer=plan.optimizer,
            learning_rate=plan.learning_rate,
            phases=_phases(options),
            fsdp=plan.fsdp,
        )

    def peak(rows: int, tokens: int) -> int:
        return checked(request(rows, tokens), verify=False).memory.peak

    report = fitting(checked(request(plan.rows, length)), plan, length, command, peak)
    notes = (*plan.notes, *_notes(plan, model, length))
    setup = replace(report.trace.setup, data=plan.data)
    trace = replace(report.trace, setup=setup, model=plan.source, notes=(*report.trace.notes, *notes))
    report = replace(report, trace=trace)
    if not options.fix:
        return report, None
    from isotype.preflight.repair import plan as planned

    return report, repaired_command(command, *planned(report, command=True))


def _import_bitsandbytes() -> None:
    """Import it without torch's compiler, which takes two seconds: nothing is compiled where there are no weights.

    bitsandbytes 0.50.2 hands two operators to `torch.compile` when it is imported (backends/default/ops.py).
    """
    if "bitsandbytes" in sys.modules or importlib.util.find_spec("bitsandbytes") is None:
        return
    import torch

    before = torch.compile
    torch.compile = _as_written  # type: ignore[assignment]
    try:
        importlib.import_module("bitsandbytes")
    finally:
        torch.compile = before


def _as_written(function: Any = None, **_: Any) -> Any:
    """`torch.compile` that compiles nothing."""
    return _as_written if function is None else function


def build(plan: Plan) -> tuple[PrecisionPolicy, Any, int]:
    """The policy, the weightless model under it (folded, in training mode) and the length of a row.

    Raises:
        PrecisionError: a policy that the device or the model refuses.
        CheckpointError, UsageError: as `isotype.train.weightless.weightless_model`.
    """
    from isotype.checkpoint.resolve import resolve_request
    from isotype.checkpoint.weightless import model_config
    from isotype.train.methods import METHODS as TRAINERS
    from isotype.train.weightless import weightless_model

    trainer = TRAINERS[plan.method]
    source = _source(plan)
    policy = resolve_request(source, plan.precision, plan.device, plan.revision)
    config = model_config(source, revision=plan.revision)
    model_class = None
    if trainer.auto_class:
        import transformers

        model_class = getattr(transformers, trainer.auto_class)
    model = weightless_model(
        config,
        policy,
        model_class=model_class,
        lora=plan.lora,
        fold=True,
        attn_implementation=plan.attention,
        **dict(trainer.model_kwargs),
    )
    model.config.use_cache = False
    if plan.checkpointing is not None:
        _checkpoint_gradients(model, plan)
    model.train()
    return policy, model, row_length(plan, config)


def _source(plan: Plan) -> Any:
    """What the facts are read from: a config.json is read as a config, everything else as it was given."""
    from isotype.checkpoint.weightless import model_config

    path = Path(plan.source)
    return model_config(plan.source) if path.name == "config.json" and path.is_file() else plan.source


def _checkpoint_gradients(model: Any, plan: Plan) -> None:
    if not getattr(model, "supports_gradient_checkpointing", True):
        return
    if plan.lora is not None:
        model.enable_input_require_grads()  # as TRL's trainers do for PEFT models
    arguments = dict(plan.checkpointing or {}) or None
    if hasattr(model, "activation_checkpointing_enable"):  # transformers' name for it, as in its Trainer
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=arguments)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=arguments)


def row_length(plan: Plan, config: Any) -> int:
    """Tokens of a row: as asked, else the default, within the positions that the model has."""
    from isotype.train.synthetic import PROMPT_TOKENS

    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(positions, int) or positions < 1:
        positions = None
    default = PROMPT_TOKENS + plan.completion if plan.completion else DEFAULT_LENGTH
    wanted = plan.length or default
    return wanted if positions is None else min(wanted, positions)


def _inputs(plan: Plan, model: Any, length: int) -> Any:
    from isotype.train.synthetic import step_inputs

    return step_inputs(
        plan.method,
        model,
        plan.rows,
        length,
        completion=min(plan.completion, length - 1),
        reference=plan.reference,
    )


def _notes(plan: Plan, model: Any, length: int) -> tuple[str, ...]:
    from isotype.train.synthetic import batch_notes

    notes = [*batch_notes(model.config), *getattr(model, "adapter_notes", ())]
    if plan.length is not None and plan.length > length:
        notes.append(f"rows of {length} tokens, not {plan.length}: the model has no more positions")
    if plan.reference and plan.lora is None and plan.method in ("dpo", "kto"):
        notes.append("the reference model is not counted in the memory: it is a second copy of the weights")
    if plan.checkpointing is not None and not getattr(model, "supports_gradient_checkpointing", True):
        notes.append(f"{type(model).__name__} has no gradient checkpointing: its activations are all kept")
    if plan.method != "reward":
        notes.append("TRL computes the loss in tiles and keeps no logits; the memory here includes them")
    return tuple(notes)


def _phases(options: Options) -> tuple[str, ...]:
    return ("forward", "backward", "unscale", "optimizer", *(("generate",) if options.generate else ()))


# A function of the user's


def _names_function(text: str) -> bool:
    return bool(re.fullmatch(r"\w+(\.\w+)*:\w+", text)) and not text.startswith("embedded:")


def _check_function(options: Options, rest: Sequence[str]) -> tuple[Report, Repaired | None]:
    from isotype.precision.devices.profile import device_profile
    from isotype.preflight.check import check
    from isotype.trace.fake.device import written_for

    assert options.model is not None
    parser = Parser(prog="isotype check", add_help=False, allow_abbrev=False)
    parser.add_argument("--device", default=None)
    known, unknown = parser.parse_known_args(list(rest))
    parser.refuse(parser.problems)
    if unknown or options.batch or options.length:
        given = " ".join(
            [*unknown, *(("--batch",) if options.batch else ()), *(("--length",) if options.length else ())]
        )
        problem = Problem(given, "--device, --fsdp, --generate and the outputs", "let the function decide it")
        raise UsageError(f"arguments that do not go with {options.model}", [problem])
    profile = device_profile(known.device if known.device is not None else "cpu")
    if profile.kind != "cpu":
        _import_bitsandbytes()  # where a GPU is found, it would look for kernels that are not there
    with written_for(profile):
        arguments = function_arguments(options.model)
    if known.device is not None:
        arguments["device"] = known.device
    if options.fsdp is not None:
        arguments["fsdp"] = options.fsdp
    if options.generate:
        arguments["phases"] = _phases(options)
    model, inputs = arguments.pop("model"), arguments.pop("inputs")
    report = check(model, inputs, **arguments)
    if not options.fix:
        return report, None
    from isotype.preflight.repair import repair

    repairs = repair(model, report)
    return report, Repaired(str(repairs), repairs.fixes, repairs.left)


# Fixes

_FLAGS = {
    "autocast": "--dtype",
    "optimizer": "--optim",
    "learning_rate": "--learning_rate",
    "compute": "--dtype",
}


def repaired_command(
    command: Sequence[str], fixes: Sequence[Fix], left: Sequence[tuple[Finding, str]] = ()
) -> Repaired:
    """The training command with the arguments that the fixes change, what no argument can change, and what is left."""
    tokens, by_hand = list(command), []
    for fix in fixes:
        flags = [flag for action in fix.actions if (flag := _flag(action)) is not None]
        if not flags:
            by_hand.append(fix.description)
        for name, value in flags:
            tokens = set_flag(tokens, name, value)
    lines = [f"repaired:  {shlex.join(tokens)}"] if tokens != list(command) else []
    lines += [f"by hand:   {text}" for text in by_hand]
    lines += [f"left:      {finding.code}: {finding.message}: {reason}" for finding, reason in left]
    return Repaired("\n".join(lines) or "nothing to repair", fixes, left, tokens)


def _flag(action: Action) -> tuple[str, str] | None:
    name = _FLAGS.get(action.target if action.kind == "setting" else action.kind)
    return None if name is None or action.value in ("", "None") else (name, action.value)


# Output


def _show(report: Report, options: Options, console: Console, repaired: Repaired | None) -> None:
    if options.html is not None:
        report.to_html(options.html)
    if options.sarif not in (None, "-"):
        from isotype.report.check.report import write_report

        write_report(Path(str(options.sarif)), report.to_sarif())
    if options.json:
        content = json.loads(report.to_json())
        if repaired is not None:
            content["repair"] = repaired.content()
        print(json.dumps(content, indent=1, allow_nan=False))
    elif options.sarif == "-":
        print(report.to_sarif())
    else:
        from isotype.report.check.text import render

        render(report, console)

"""`isotype sft`, `dpo`, `reward`, `kto`, `grpo`, `rloo` and `isotype demo`."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from isotype.cli.output import console_of_failure, print_error, quiet_libraries, show_log
from isotype.compat.interrupt import exit_status, interrupts_kept
from isotype.core.allocator import let_segments_expand
from isotype.core.files import unused
from isotype.core.terminal import printed_command
from isotype.report.text import chat_commands, pair_table, say, show_commands, wrapped

if TYPE_CHECKING:
    from isotype.train.command.command import Command
    from isotype.train.command.settings import Settings
    from isotype.train.training import Outcome


DEMO = shlex.split(
    "--model_name_or_path embedded:smollm2 --dataset_name embedded:precision_qa --quantization nf4 "
    "--output_dir runs/demo --max_steps 32 --per_device_train_batch_size 8 --learning_rate 2e-3 "
    "--lr_scheduler_type cosine --warmup_steps 3 --lora_r 16 --lora_alpha 32 --lora_dropout 0 "
    "--gradient_checkpointing False --eval_strategy steps --eval_steps 32 --eval_on_start True "
    "--save_strategy no --seed 0"
)

SHAPES_MODEL = "runs/shapes-model"
PICTURES = shlex.split(
    f"--model_name_or_path {SHAPES_MODEL} --dataset_name embedded:shapes --output_dir runs/demo-pictures "
    "--max_steps 24 --per_device_train_batch_size 8 --learning_rate 1e-3 --lr_scheduler_type cosine --warmup_steps 3 "
    "--lora_r 16 --lora_alpha 32 --lora_dropout 0 --gradient_checkpointing False --eval_strategy steps --eval_steps 24 "
    "--eval_on_start True --save_strategy no --seed 0"
)


def train(command: str, argv: Sequence[str], console: Console) -> int:
    rest = list(argv)
    if {"-h", "--help"} & set(rest):
        from isotype.train.command.arguments import short_help

        text = wrapped(short_help(command), console)
        console.print(text, highlight=False, markup=False, soft_wrap=True, end="")
        return 0
    if "--print-config" in rest:
        from isotype.train.command.parse import parse_command

        quiet_libraries()
        rest.remove("--print-config")
        print(parse_command(command, rest)[0].to_yaml(), end="")
        return 0
    if "--help-all" in rest:
        from isotype.train.command.parse import training_parser

        training_parser(command).print_help()
        return 0
    let_segments_expand(rest)
    show_log() if {"-v", "--verbose"} & set(rest) else quiet_libraries()
    with interrupts_kept():  # a library that is being imported may suppress the exception of Ctrl-C
        from isotype.train.command.parse import parse_command

        parsed = parse_command(command, rest)[0]
        from isotype.train.command.settings import settings_of
        from isotype.train.training import run

        parsed = _planned(parsed, console)
        settings = settings_of(parsed)
    try:
        outcome = run(settings, console)
    except (MemoryError, RuntimeError) as error:
        from isotype.planning.nearest import advice, ran_out

        if ran_out(error):
            say(console_of_failure(), advice(parsed))
        raise
    if not console.quiet:  # of several processes, only the first one prints, when its adapter is written
        show_outcome(console, outcome, settings)
    if outcome.record.status == "failed":
        print_error(console_of_failure(), outcome.record.error or "")
    if outcome.stopped_by is not None:
        return exit_status(outcome.stopped_by)
    return 1 if outcome.record.status == "failed" else 0


def _planned(command: Command, console: Console) -> Command:
    if not command.planned:
        return command
    from isotype.planning.from_request import resolve_auto, words_of

    with console.status("searching for settings that fit …"):
        planned, row = resolve_auto(command)
    say(console, words_of(row))
    return planned


def demo(argv: Sequence[str], console: Console) -> int:
    """Run `isotype demo` and return its exit status. `--pictures` first builds a small vision-language model."""
    rest = [argument for argument in argv if argument != "--pictures"]
    pictures = len(rest) < len(argv)
    arguments = [*(PICTURES if pictures else DEMO), *rest]
    command = printed_command(["isotype", "sft", *arguments], indent=4)
    console.print(wrapped(f"isotype demo is:\n{command}\n", console), highlight=False, soft_wrap=True)
    if pictures and not {"-h", "--help"} & {*rest}:
        quiet_libraries()
        with interrupts_kept():
            from isotype.data.drawn import shapes_folder
            from isotype.train.shapes_model import make_shapes_model

            shapes_folder()  # raises without pillow, before a model is built
            make_shapes_model(Path(SHAPES_MODEL), partial(console.print, highlight=False, markup=False))
    return train("sft", arguments, console)


def show_outcome(console: Console, outcome: Outcome, settings: Settings) -> None:
    from isotype.checkpoint.adapter import read_adapter
    from isotype.checkpoint.consumers import changes_nothing
    from isotype.report.run.record import loss_sentences, reward_warnings

    record = outcome.record
    put = partial(console.print, highlight=False, markup=False, soft_wrap=True)
    put()
    for pieces in loss_sentences(record):
        if pieces:
            say(console, "".join(pieces))
    for warning in reward_warnings(record.steps):
        say(console, f"warning: {warning}", style="yellow")
    for sample in record.samples:
        labels = ("asked", "before", "after", "reference")
        texts = (sample.question, sample.before, sample.after, sample.reference)
        rows = ((label, text) for label, text in zip(labels, texts, strict=True) if text is not None)
        put()
        console.print(pair_table(rows), highlight=False)
    put()
    if outcome.adapter is not None:
        put(f"{'adapter' if settings.use_peft else 'model':<8} {outcome.adapter}")
    put(f"report   {outcome.report}")
    if record.status == "interrupted":
        from isotype.train.output.resume import resume_command

        checkpoint = outcome.checkpoint
        if checkpoint is not None:
            command = resume_command(settings.command, record.output_dir, checkpoint)
            say(console, f"\nstopped; the checkpoint {checkpoint} is complete. Resume with:\n    {command}")
        else:
            put("\nstopped before the first checkpoint, so there is no training to resume")
    elif outcome.adapter is not None:
        trained = outcome.adapter
        commands = chat_commands(trained, pictures=outcome.pictures) if settings.method.answers else {}
        if settings.use_peft and changes_nothing(read_adapter(trained)):
            say(
                console,
                "The adapter changes no weight of its base model, so the training had no effect.",
                style="yellow",
            )
        elif settings.use_peft:
            merge = ("isotype", "merge", str(trained), "-o", str(unused(trained / "merged")))
            commands["merge the adapter into its base model"] = merge
        show_commands(console, commands)

"""How a command ended, for the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from isotype.train.recipes import Outcome
    from isotype.train.settings import Settings


def show_outcome(console: Console, outcome: Outcome, settings: Settings) -> None:
    """Losses, the sample answers, where things lie and how to go on."""
    record = outcome.record
    console.print()
    if record.steps:
        first, last = record.steps[0], record.steps[-1]
        console.print(
            f"training loss   {first.loss:.4f} -> {last.loss:.4f} in {len(record.steps)} steps",
            highlight=False,
        )
    if record.evals:
        console.print(
            f"held-back loss  {record.evals[0].loss:.4f} -> {record.evals[-1].loss:.4f}"
            if len(record.evals) > 1
            else f"held-back loss  {record.evals[0].loss:.4f}",
            highlight=False,
        )
    for sample in record.samples:
        table = Table(box=None, show_header=False, pad_edge=False)
        table.add_column(style="bold", no_wrap=True)
        table.add_column()
        for name, text in (
            ("asked", sample.question),
            ("before", sample.before),
            ("after", sample.after),
            ("reference", sample.reference),
        ):
            if text is not None:
                table.add_row(name, text)
        console.print()
        console.print(table, highlight=False, markup=False)
    console.print()
    if outcome.adapter is not None:
        kind = "adapter" if settings.model.use_peft else "model"
        console.print(f"{kind:<8} {outcome.adapter}", highlight=False)
    console.print(f"report   {outcome.report}", highlight=False)
    if record.status == "interrupted":
        from isotype.train.recipes import resume_command

        whole = outcome.checkpoint
        if whole is not None:
            console.print(
                f"\nstopped; {whole} is whole. Go on with:", highlight=False, soft_wrap=True, markup=False
            )
            console.print(
                f"  {resume_command(settings, whole)}", highlight=False, soft_wrap=True, markup=False
            )
        else:
            console.print("\nstopped before the first checkpoint; nothing to go on from", highlight=False)
    elif outcome.adapter is not None and settings.method.name != "reward":
        console.print(f"\ntry it:  isotype chat {outcome.adapter}", highlight=False)

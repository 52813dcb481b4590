"""How a command ended, for the terminal."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from isotype.report.narrow import wrapped
from isotype.report.run.record import loss_sentences

if TYPE_CHECKING:
    from isotype.train.options.settings import Settings
    from isotype.train.training import Outcome


def show_outcome(console: Console, outcome: Outcome, settings: Settings) -> None:
    """Losses, the sample answers, where things lie and how to go on."""
    record = outcome.record
    say = partial(console.print, highlight=False, markup=False, soft_wrap=True)
    say()
    for pieces in loss_sentences(record):
        if pieces:
            say(wrapped("".join(pieces), console))
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
                table.add_row(name, Text(text))
        say()
        console.print(table, highlight=False)
    say()
    if outcome.adapter is not None:
        say(f"{'adapter' if settings.model.use_peft else 'model':<8} {outcome.adapter}")
    say(f"report   {outcome.report}")
    if record.status == "interrupted":
        from isotype.train.output.resume import resume_command

        whole = outcome.checkpoint
        if whole is not None:
            say(f"\nstopped; {whole} is whole. Go on with:\n  {resume_command(settings, whole)}")
        else:
            say("\nstopped before the first checkpoint; nothing to go on from")
    elif outcome.adapter is not None and settings.method.answers:
        say(f"\ntry it:  isotype chat {outcome.adapter}")

"""The progress of a run in the terminal: a live bar, or plain lines where there is no terminal."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from isotype.report.run import StepRecord

_LINES = 20  # how many lines a run without a terminal prints


class ProgressView:
    """A context in which `update` shows a step: loss, tokens a second, time left."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._bar = Progress(
            TextColumn("[bold]step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TextColumn("loss {task.fields[loss]}"),
            TextColumn("{task.fields[rate]} tokens/s"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            transient=False,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("train", total=None, loss="  …  ", rate="…")

    def __enter__(self) -> ProgressView:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def update(self, record: StepRecord, total: int) -> None:
        """Show one finished step of `total`."""
        rate = record.tokens / record.seconds if record.seconds else 0.0
        skipped = " (skipped: overflow)" if record.skipped else ""
        if self.console.is_terminal:
            self._bar.update(
                self._task,
                completed=record.step,
                total=total,
                loss=f"{record.loss:.4f}{skipped}",
                rate=f"{rate:.0f}",
            )
        elif record.step == total or record.step % max(1, total // _LINES) == 0:
            self.console.print(
                f"step {record.step}/{total}  loss {record.loss:.4f}{skipped}  {rate:.0f} tokens/s",
                highlight=False,
            )

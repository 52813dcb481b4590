"""One process of an `isotype run`: it waits for torch, then for a training step, and has the last word."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Console

from isotype.compat.imports import when_imported
from isotype.core.console import TerminalConsole
from isotype.preflight.script.family import Family, family
from isotype.preflight.script.options import Options
from isotype.preflight.script.processes import Processes
from isotype.preflight.script.traceback import cleaned
from isotype.report.narrow import wrapped

if TYPE_CHECKING:
    from isotype.preflight.script.diagnosis import Diagnosis

T = TypeVar("T")

NOTHING_SEEN = "no training step was seen"


class Session:
    """The watch over one process.

    Nothing in it may end the script, or change how it ends: what goes wrong here is one line.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self._family: Family = family()
        self._processes = Processes(self, join)
        self._diagnosis: Diagnosis | None = None
        self._waits: Callable[[], None] | None = None
        self._failed = False

    def watch(self) -> None:
        """Wait for torch in this process, and follow the script into those that it starts."""
        self._processes.watch()
        self._waits = when_imported("torch", lambda: self.safely(self._begin))

    def leave(self) -> None:
        """Take everything away from the process."""
        self._processes.leave()
        if self._waits is not None:
            self._waits()
        self._family.leave()

    def _begin(self) -> None:
        from isotype.preflight.script.diagnosis import Diagnosis

        self._diagnosis = Diagnosis(self.options, _errors(self._family), self._family)
        self._diagnosis.begin()

    def stop(self) -> None:
        """The script has ended: nothing of it is watched any longer."""
        if self._diagnosis is not None:
            self.safely(self._diagnosis.stop)

    def failed(self, error: BaseException) -> BaseException:
        """The script raised `error`: the same exception, with the traceback that it has without us."""
        self.stop()
        return cleaned(error)

    def crashed(self, error: BaseException) -> None:
        """Explain what ended the script, under its traceback; `failed` has been called."""
        self.safely(lambda: self._explain(error))

    def _explain(self, error: BaseException) -> None:
        diagnosis = self._diagnosis
        explained = diagnosis is not None and diagnosis.crashed(error)
        if not explained:
            self._say_if_nothing_was_seen()

    def left(self, code: Any, leaving: SystemExit | None = None) -> None:
        """The script has ended by itself, with `code` as `sys.exit` takes it."""
        self.stop()
        self.safely(lambda: self._end(code, leaving))

    def _end(self, code: Any, leaving: SystemExit | None) -> None:
        diagnosis, explained = self._diagnosis, False
        if diagnosis is not None:
            reason = None if leaving is None or code in (None, 0) else leaving.__context__
            explained = diagnosis.left(code, reason)
        if not explained:
            self._say_if_nothing_was_seen()

    def _say_if_nothing_was_seen(self) -> None:
        if self._family.is_top and not self._failed and not self._family.knows("seen"):
            self._say(f"{NOTHING_SEEN}: {self._why_nothing()}")

    def _why_nothing(self) -> str:
        """Why the script was not watched, and how it could be."""
        processes = self._processes
        if processes.unwatched:
            programs = ", ".join(processes.unwatched)
            return (
                f"the script started {programs}, which isotype cannot look into; if the training runs there, "
                "write `isotype run` in place of `python` in its command"
            )
        started = (
            f", nor in the processes that were started ({processes.watched})" if processes.watched else ""
        )
        if self._diagnosis is None:
            return f"the script never imported torch{', nor trained' + started[5:] if started else ''}"
        return f"no module was called with parameters that require a gradient{started}"

    def safely(self, act: Callable[[], T]) -> T | None:
        """What `act` returns; a failure of it is a line, and None."""
        try:
            return act()
        except Exception as error:  # noqa: BLE001 - whatever is wrong with us, the script ends as it would have
            text = next(iter(str(error).splitlines()), "")
            self._failed = True
            self._say(f"the watch failed, the script did not: {type(error).__name__}: {text}")
            return None

    def _say(self, text: str) -> None:
        console = _errors(self._family)
        console.print(wrapped(f"isotype: {text}", console), highlight=False, markup=False, soft_wrap=True)


def _errors(family: Family) -> Console:
    # Under a launcher of the user's every rank is a run of its own; one of them speaks.
    console = TerminalConsole(stderr=True, quiet=family.is_top and os.environ.get("RANK", "0") != "0")
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 110
    return console


def show(error: BaseException) -> None:
    """What python would print, by the hook it would call."""
    if isinstance(error, ImportError) and error.__traceback__ is None:
        sys.stderr.write(f"{sys.executable}: {error}\n")
        return
    sys.excepthook(type(error), error, error.__traceback__)


def join(options: Options) -> None:
    """Watch this process like the one that it was spawned from."""
    Session(options).watch()

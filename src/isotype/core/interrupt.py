"""What ends a command from outside: Ctrl-C and SIGTERM, and the exit status of each."""

from __future__ import annotations

import signal
from types import FrameType
from typing import NoReturn


class Terminated(KeyboardInterrupt):
    """SIGTERM ends a command as Ctrl-C does, but cannot be taken for a key that somebody pressed."""


def terminate(signum: int, frame: FrameType | None) -> NoReturn:
    """The handler of SIGTERM in a command of ours.

    Raises:
        Terminated: always.
    """
    raise Terminated


def exit_status(number: int) -> int:
    """The status of a process that a signal ended, as shells give it: 130 for Ctrl-C, 143 for SIGTERM."""
    return 128 + number


def signal_of(interrupt: KeyboardInterrupt) -> int:
    """The signal behind an interrupt."""
    return signal.SIGTERM if isinstance(interrupt, Terminated) else signal.SIGINT

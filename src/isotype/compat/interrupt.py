"""Signals that end a command: Ctrl-C, SIGTERM and a terminal that hangs up, and the exit status of each."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final, NoReturn

HANGUP: Final[int | None] = getattr(signal, "SIGHUP", None)
"""The signal of a terminal that has gone (ssh lost its connection); None on Windows."""


class Terminated(KeyboardInterrupt):
    """SIGTERM and SIGHUP end a command as Ctrl-C does, but cannot be taken for a key that somebody pressed."""


def terminate(signum: int, frame: FrameType | None) -> NoReturn:
    """The handler of SIGTERM and SIGHUP in a command of ours.

    Raises:
        Terminated: always.
    """
    raise Terminated(signum)


def stop_signals() -> tuple[int, ...]:
    """The signals that ask a command to end: SIGHUP is none where it is ignored, as `nohup` has it."""
    hangs_up = HANGUP is not None and signal.getsignal(HANGUP) is not signal.SIG_IGN
    return (signal.SIGINT, signal.SIGTERM, *((HANGUP,) if HANGUP is not None and hangs_up else ()))


@contextmanager
def interrupts_kept() -> Iterator[None]:
    """Ctrl-C, SIGTERM and SIGHUP end what runs inside, whatever a library makes of them.

    Their exception is raised wherever the program happens to be, and some code there catches everything: datasets 5.2.0
    takes it for a function that has no hash (a bare `except:` in `update_fingerprint`, fingerprint.py), torch for a
    value without a shape. An interrupt that was lost is raised at the end, or in place of the error that it became.
    Outside the main thread, where Python takes no signals, and for signals that are ignored or end the process, nothing
    changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[KeyboardInterrupt] = []

    def keeping(handler: Callable[[int, FrameType | None], Any]) -> Callable[[int, FrameType | None], None]:
        def handle(signum: int, frame: FrameType | None) -> None:
            try:
                handler(signum, frame)
            except KeyboardInterrupt as interrupt:
                received.append(interrupt)
                raise

        return handle

    handlers = {number: signal.getsignal(number) for number in stop_signals()}
    before = {number: handler for number, handler in handlers.items() if callable(handler)}
    for number, handler in before.items():
        signal.signal(number, keeping(handler))
    try:
        yield
    except Exception as error:
        if received:
            raise received[0] from error
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if received:
        raise received[0]


def exit_status(number: int) -> int:
    """The status of a process that a signal ended, as shells give it: 130 for Ctrl-C, 143 for SIGTERM, 129 for SIGHUP."""
    return 128 + number


def signal_of(interrupt: KeyboardInterrupt) -> int:
    """The signal behind an interrupt."""
    return int(interrupt.args[0]) if isinstance(interrupt, Terminated) else signal.SIGINT

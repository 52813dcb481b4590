"""Signals that end a command (Ctrl-C, SIGTERM, SIGHUP), and exit statuses for them."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final, NoReturn

HANGUP: Final[int | None] = getattr(signal, "SIGHUP", None)
"""The signal of a closed terminal, for example after a lost ssh connection; None on Windows."""


class Terminated(KeyboardInterrupt):
    """The exception that ends a command after SIGTERM or SIGHUP, like KeyboardInterrupt after Ctrl-C."""


def terminate(signum: int, frame: FrameType | None) -> NoReturn:
    """Handle SIGTERM and SIGHUP in isotype's commands: raise Terminated."""
    raise Terminated(signum)


def stop_signals() -> tuple[int, ...]:
    """Return the signals that end a command. SIGHUP is left out if it is ignored (`nohup`)."""
    hangs_up = HANGUP is not None and signal.getsignal(HANGUP) is not signal.SIG_IGN
    return (signal.SIGINT, signal.SIGTERM, *((HANGUP,) if HANGUP is not None and hangs_up else ()))


@contextmanager
def interrupts_kept() -> Iterator[None]:
    """Let Ctrl-C, SIGTERM and SIGHUP end the `with` block, even if a library catches their exception.

    Some code catches every exception: for example a bare `except:` in `update_fingerprint` of datasets 5.2.0
    (fingerprint.py). If a library has caught an interrupt, the interrupt is raised at the end of the block, or in place
    of a later error. There is no effect in other threads, or on signals that are ignored or have the default action.
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
    """Return the shell's exit status of a signal: 130 for Ctrl-C, 143 for SIGTERM, 129 for SIGHUP."""
    return 128 + number


def signal_of(interrupt: KeyboardInterrupt) -> int:
    return int(interrupt.args[0]) if isinstance(interrupt, Terminated) else signal.SIGINT

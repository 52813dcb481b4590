"""Interrupts that code between the signal and the command has lost: real signals to this process."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest

from isotype.compat.interrupt import Terminated, interrupts_kept, terminate


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Those of a command, whatever the shell that runs the tests has set."""
    ours = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: terminate}
    before = {number: signal.signal(number, handler) for number, handler in ours.items()}
    yield
    assert {number: signal.getsignal(number) for number in ours} == ours
    for number, handler in before.items():
        signal.signal(number, handler)


@interrupts_kept()
def caught(number: int, went_on: list[bool]) -> None:
    with suppress(BaseException):
        signal.raise_signal(number)
    went_on.append(True)


@interrupts_kept()
def converted(number: int) -> None:
    try:
        signal.raise_signal(number)
    except KeyboardInterrupt:
        raise ValueError("could not determine the shape") from None


@interrupts_kept()
def not_caught(number: int, went_on: list[bool]) -> None:
    signal.raise_signal(number)
    went_on.append(True)


BOTH = pytest.mark.parametrize(
    ("number", "kind"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Terminated)]
)


@BOTH
def test_an_interrupt_that_is_caught_is_raised_at_the_end(number: int, kind: type[KeyboardInterrupt]) -> None:
    went_on: list[bool] = []
    with pytest.raises(KeyboardInterrupt) as raised:
        caught(number, went_on)
    assert raised.type is kind
    assert went_on


@BOTH
def test_an_error_that_was_an_interrupt_is_one(number: int, kind: type[KeyboardInterrupt]) -> None:
    with pytest.raises(KeyboardInterrupt) as raised:
        converted(number)
    assert raised.type is kind
    assert isinstance(raised.value.__cause__, ValueError)


@BOTH
def test_an_interrupt_that_nobody_catches_comes_at_once(number: int, kind: type[KeyboardInterrupt]) -> None:
    went_on: list[bool] = []
    with pytest.raises(KeyboardInterrupt) as raised:
        not_caught(number, went_on)
    assert raised.type is kind
    assert not went_on


def test_errors_and_ends_without_an_interrupt_stay() -> None:
    with interrupts_kept():
        pass
    with pytest.raises(ValueError, match="bad"), interrupts_kept():
        raise ValueError("bad")


def test_a_signal_that_is_ignored_stays_so() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interrupts_kept():
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_change_nothing() -> None:
    seen = []

    def elsewhere() -> None:
        with interrupts_kept():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert seen == [terminate]

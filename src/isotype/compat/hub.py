"""Whether the Hugging Face hub answers, found out in seconds: its own library tries for half a minute."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import Thread
from typing import Any

_SECONDS = 3.0
_REMEMBERED = 60.0
"""Seconds for which a hub that did not answer is not asked again: one command reads from it in many places."""

_silences: dict[str, tuple[float, str]] = {}
"""By endpoint: when it did not answer, and what the request ended with."""


def asking(source: object) -> AbstractContextManager[str]:
    """`offline_if_unreachable` where `source` is a hub id, a text."""
    return offline_if_unreachable() if isinstance(source, str) else nullcontext("")


@contextmanager
def offline_if_unreachable() -> Iterator[str]:
    """Within it, a hub that does not answer is not asked again: what the local cache has is used, all else fails at once.

    As if HF_HUB_OFFLINE were set. Yields why the hub does not answer, "" where it does or was not to be asked. One that did not
    answer within the last minute is taken not to answer.
    """
    from huggingface_hub import constants

    when, why = _silences.get(constants.ENDPOINT, (0.0, ""))
    if constants.is_offline_mode():
        if not why or time.monotonic() - when > _REMEMBERED:
            why = ""
        yield why  # within another one, its reason
        return
    if not why or time.monotonic() - when > _REMEMBERED:
        why = _why_unreachable()
        _silences[constants.ENDPOINT] = (time.monotonic(), why)
    if not why:
        yield ""
        return
    holders: list[Any] = [constants]
    try:
        import datasets

        holders.append(datasets.config)  # it keeps a copy
    except ImportError:
        pass  # an installation without the training libraries
    try:
        for holder in holders:
            holder.HF_HUB_OFFLINE = True
        yield why
    finally:
        for holder in holders:
            holder.HF_HUB_OFFLINE = False


def _why_unreachable() -> str:
    """What a request to the hub ends with, "" where it answers anything."""
    from huggingface_hub import constants
    from huggingface_hub.errors import HTTPError
    from huggingface_hub.utils import get_session

    ends: list[str] = []

    def ask() -> None:
        try:
            get_session().head(constants.ENDPOINT, timeout=_SECONDS)
        except (OSError, HTTPError) as error:
            ends.append((str(error).strip() or type(error).__name__).splitlines()[0])
        else:
            ends.append("")

    # The request's timeout is one of each step of it, and a name server that is silent has none.
    thread = Thread(target=ask, daemon=True)
    thread.start()
    thread.join(2 * _SECONDS)
    end = ends[0] if ends else f"nothing in {2 * _SECONDS:g} seconds"
    return f"{constants.ENDPOINT} does not answer: {end}" if end else ""

"""Reachability of the Hugging Face hub, decided in seconds: its own library tries for half a minute."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import Thread
from typing import Any

_SECONDS = 3.0
_REMEMBERED = 60.0
"""Seconds for which an unreachable hub is not tried again: one command reads from it in many places."""

_silences: dict[str, tuple[float, str]] = {}
"""Endpoint -> (time of the failure, reason)."""


def asking(source: object) -> AbstractContextManager[str]:
    """Return `offline_if_unreachable` if `source` is a string (a hub id)."""
    return offline_if_unreachable() if isinstance(source, str) else nullcontext("")


@contextmanager
def offline_if_unreachable() -> Iterator[str]:
    """Use only the local cache inside if the hub is unreachable, as with HF_HUB_OFFLINE.

    Yields the reason; "" if the hub answers or the user has set offline mode. A failure is remembered for a
    minute.
    """
    from huggingface_hub import constants

    when, why = _silences.get(constants.ENDPOINT, (0.0, ""))
    if constants.is_offline_mode():
        if not why or time.monotonic() - when > _REMEMBERED:
            why = ""
        yield why  # nested: the outer reason
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

        holders.append(datasets.config)  # it has a copy of the flag
    except ImportError:
        pass  # installed without the training libraries
    try:
        for holder in holders:
            holder.HF_HUB_OFFLINE = True
        yield why
    finally:
        for holder in holders:
            holder.HF_HUB_OFFLINE = False


def _why_unreachable() -> str:
    """Return why a request to the hub fails; "" if it is answered."""
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

    # The timeout applies to each step of the request, and not to a silent name server.
    thread = Thread(target=ask, daemon=True)
    thread.start()
    thread.join(2 * _SECONDS)
    end = ends[0] if ends else f"nothing in {2 * _SECONDS:g} seconds"
    return f"{constants.ENDPOINT} does not answer: {end}" if end else ""

"""Whether the Hugging Face hub answers, found out in seconds: its own library tries for half a minute."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_SECONDS = 3.0


@contextmanager
def offline_if_unreachable() -> Iterator[str]:
    """Within it, a hub that does not answer is not asked again: what the local cache has is used, all else fails at once.

    As if HF_HUB_OFFLINE were set. Yields why the hub does not answer, "" where it does or was not to be asked.
    """
    from huggingface_hub import constants

    why = "" if constants.is_offline_mode() else _why_unreachable()
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

    try:
        get_session().head(constants.ENDPOINT, timeout=_SECONDS)
    except (OSError, HTTPError) as error:
        text = (str(error).strip() or type(error).__name__).splitlines()[0]
        return f"{constants.ENDPOINT} does not answer: {text}"
    return ""

"""huggingface_hub: finds out in seconds if the hub is reachable. The library itself tries for half a minute."""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from threading import Thread

from isotype.compat.replaced import replaced

_SECONDS = 3.0
_REMEMBERED = 60.0
"""Seconds after a failed connection in which isotype does not connect to the hub again."""
_silences: dict[str, tuple[float, str]] = {}
"""URL of the hub -> (time of the last try, reason of its failure or "")."""


def asking(source: object) -> AbstractContextManager[str]:
    """Return `offline_if_unreachable()` if `source` is a string (a hub id); else a context manager that yields ""."""
    return offline_if_unreachable() if isinstance(source, str) else nullcontext("")


@contextmanager
def offline_if_unreachable() -> Iterator[str]:
    """If the hub is unreachable, switch to offline mode: the `with` block reads only the local cache.

    Yields the reason why the hub is unreachable; "" if it is reachable or the user has set offline mode. For a minute
    after a failure, the hub is not tried again.
    """
    from huggingface_hub import constants

    when, why = _silences.get(constants.ENDPOINT, (0.0, ""))
    if time.monotonic() - when > _REMEMBERED:
        why = ""
    if constants.is_offline_mode():
        yield why  # set by the user, or by a `with` block around this one
        return
    if not why:
        why = _why_unreachable()
        _silences[constants.ENDPOINT] = (time.monotonic(), why)
    with ExitStack() as stack:
        if why:
            stack.enter_context(replaced(constants, "HF_HUB_OFFLINE", True))
            try:
                import datasets
            except ImportError:
                pass  # isotype is installed without the training libraries
            else:  # datasets.config has a copy of the flag
                stack.enter_context(replaced(datasets.config, "HF_HUB_OFFLINE", True))
        yield why


def _why_unreachable() -> str:
    from huggingface_hub import constants
    from huggingface_hub.errors import HTTPError
    from huggingface_hub.utils import get_session

    results: list[str] = []

    def request() -> None:
        try:
            get_session().head(constants.ENDPOINT, timeout=_SECONDS)
        except (OSError, HTTPError) as error:
            results.append((str(error).strip() or type(error).__name__).splitlines()[0])
        else:
            results.append("")

    # The timeout is for each step of the request. It does not include a name server that does not answer.
    thread = Thread(target=request, daemon=True)
    thread.start()
    thread.join(2 * _SECONDS)
    result = results[0] if results else f"nothing received in {2 * _SECONDS:g} seconds"
    return f"{constants.ENDPOINT} does not answer: {result}" if result else ""

"""One of several processes that a launcher has started."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any


def first_to_fail() -> bool:
    """Whether this process is the first of its run to ask: one speaks of a failure, which soon ends the others too.

    torchrun and accelerate keep a store that outlives their processes; of a process without one, yes.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return True
    from torch import distributed

    connect: Any = distributed.TCPStore  # type: ignore[attr-defined]
    environment = os.environ
    try:
        store = connect(
            environment["MASTER_ADDR"],
            int(environment["MASTER_PORT"]),
            is_master=False,
            timeout=timedelta(seconds=5),
            wait_for_workers=False,
        )
        key = f"isotype/failed/{environment.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        return bool(store.add(key, 1) == 1)
    except (KeyError, ValueError, RuntimeError):  # the launcher has gone: better twice than not at all
        return True

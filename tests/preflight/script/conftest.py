"""Fixtures of the tests of `isotype run`."""

from __future__ import annotations

import math

import pytest

from isotype.core.arguments import COMMANDS
from isotype.preflight.script import crash, diagnosis
from isotype.trace.live import watch


@pytest.fixture(autouse=True)
def _time_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """No trace, trial or recording takes too long, however busy this machine is."""
    monkeypatch.setitem(COMMANDS["run"]["arguments"]["--preflight-seconds"], "default", math.inf)
    monkeypatch.setattr(watch, "WATCH_SECONDS", math.inf)
    for module, limit in (
        (diagnosis, "TRIED_BEFORE"),
        (diagnosis, "MENTIONED_FROM"),
        (crash, "TRIED_AFTER"),
        (crash, "AGAIN_SECONDS"),
    ):
        monkeypatch.setattr(module, limit, math.inf)

"""Part 7: the core of the test suite with this machine's libraries, CUDA hidden, and what runs on a GPU with it in sight."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator

from .commands import CommandError, Options, call
from .runner import Row

_CORE = (
    "core",
    "precision",
    "contracts",
    "model",
    "checkpoint",
    "trace",
    "rules",
    "lora",
    "preflight",
    "train",
    "test_public.py",
)
_ON_GPU = ("lora", "model", "contracts", "train/test_recorder.py", "train/test_trl_head.py")
_MARKS = "not exhaustive and not slow and not newest"


def limits(options: Options) -> dict[str, float]:
    """Job -> seconds."""
    return {"CUDA hidden": 300.0, "CUDA in sight": 200.0}


def command(options: Options, name: str) -> list[str]:
    """pytest's command."""
    hidden = name == "CUDA hidden"
    paths: tuple[str, ...] = _CORE if hidden else _ON_GPU
    jobs = "12" if hidden else "4"
    if options.small:
        paths, jobs = (
            (("core/test_renamed.py",) if hidden else ("lora/test_norms.py",)),
            "0",
        )
    # Not warnings as errors: libraries of other versions give other ones.
    more = ["-p", "no:cacheprovider", "-n", jobs, "-rfE", "-W", "default", "-m", _MARKS]
    return [sys.executable, "-m", "pytest", *more, *(f"tests/{path}" for path in paths)]


def run(options: Options, name: str) -> Iterator[Row]:
    """The results of a job: a line for each test that fails, then the counts."""
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if name == "CUDA hidden" else {}
    printed = call(command(options, name), {**hidden, "OMP_NUM_THREADS": "1"}, judges=True)
    failing = re.findall(r"^(?:FAILED|ERROR) (\S+)(?: - (.*))?$", printed, re.MULTILINE)
    for test, reason in failing:
        yield {"failed": test, "reason": reason[:300], "text": f"{test}: {reason[:100]}"}
    counts = counts_of(printed)
    yield {**counts, "text": ", ".join(f"{count} {kind}" for kind, count in counts.items())}
    if failing:
        raise CommandError(f"{len(failing)} tests fail")


def counts_of(printed: str) -> dict[str, int]:
    """What pytest's last line counts: passed, failed, skipped, …

    Raises:
        CommandError: it counts nothing, as where pytest itself has failed.
    """
    counts = re.findall(
        r"(\d+) (passed|failed|skipped|errors?|deselected|xfailed)", printed.strip().rpartition("\n")[2]
    )
    if not counts:
        raise CommandError(f"pytest counted nothing: {printed[-1000:]}")
    return {kind: int(count) for count, kind in counts}

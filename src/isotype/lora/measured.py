"""Times that are measured on this machine, and kept for its next processes in the cache folder."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, fields
from functools import cache
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from isotype.core.cache import default_cache_dir
from isotype.core.files import write_whole
from isotype.precision.devices.cpu import this_cpu

Name = TypeVar("Name")
Result = TypeVar("Result")


def file_of(folder: str, *what: Any) -> Path:
    """The file of what was measured under certain conditions on this CPU with this torch; it need not exist."""
    key = json.dumps([*what, *_machine()])
    return default_cache_dir() / folder / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"


def file_of_card(folder: str, card: str, *what: Any) -> Path:
    """Return the file of what was measured on a GPU of this name with this torch; it need not exist."""
    key = json.dumps([*what, card, torch.__version__])
    return default_cache_dir() / folder / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"


@cache
def _machine() -> list[str]:
    cpu = this_cpu()
    return [
        cpu.title,
        cpu.machine,
        *sorted(cpu.flags or ()),
        torch.__version__,
        torch.backends.cpu.get_cpu_capability(),
    ]


def read(file: Path) -> dict[str, dict[str, Any]]:
    """What a file holds, by name; nothing where it is damaged or not there."""
    if not file.is_file():
        return {}
    try:
        held = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    whole = isinstance(held, dict) and all(isinstance(each, dict) for each in held.values())
    return held if whole else {}


class Kept(Generic[Result]):
    """Results of one kind of measurement, frozen dataclasses: each is measured once, and kept for the next processes.

    Attributes:
        known: (file, name) -> what this process has read or measured.

    Args:
        kind: the dataclass.
    """

    def __init__(self, kind: Callable[..., Result]) -> None:
        self.known: dict[tuple[Path, str], Result] = {}
        self._kind = kind
        self._lock = threading.Lock()

    def get(self, file: Path, name: str) -> Result | None:
        """What was measured under this name, by this process or by another one; None if it was not."""
        if (file, name) not in self.known and (result := self.all(file).get(name)) is not None:
            self.known[file, name] = result
        return self.known.get((file, name))

    def all(self, file: Path) -> dict[str, Result]:
        """What a file holds, by name; nothing of what is damaged."""
        results = {}
        for name, entry in read(file).items():
            with suppress(TypeError):
                result: Any = self._kind(**entry)
                numbers = [getattr(result, each.name) for each in fields(result) if each.type == "float"]
                if all(isinstance(number, (int, float)) for number in numbers):
                    results[name] = result
        return results

    def of(self, file: Path, name: str, measure: Callable[[], Result]) -> tuple[Result, str | None]:
        """What was measured, or is now; and why that could not be kept for the next process, None if it was."""
        with self._lock:
            if (known := self.get(file, name)) is not None:
                return known, None
            result: Any = measure()
            self.known[file, name] = result
            try:
                file.parent.mkdir(parents=True, exist_ok=True)
                write_whole(file, json.dumps({**read(file), name: asdict(result)}, indent=1) + "\n")
            except OSError as error:
                return result, str(error)
            return result, None


def in_turns(
    prepare: Callable[[], Mapping[Name, Callable[[], object]]], turns: int, threads: int
) -> dict[Name, list[float]]:
    """Milliseconds that each of several ways takes, one after another in turns, after a turn that warms up.

    `prepare` and what it returns are called in a thread of their own, which knows nothing of the caller's autocast, saved-tensor
    hooks (gradient checkpointing) or dispatch modes; what they raise is raised here.
    """
    times: dict[Name, list[float]] = {}

    def run() -> None:
        torch.set_num_threads(threads)  # OpenMP's number belongs to a thread
        ways = prepare()
        times.update((name, []) for name in ways)
        for turn in range(turns + 1):
            for name, way in ways.items():
                began = time.perf_counter()
                way()
                if turn:
                    times[name].append((time.perf_counter() - began) * 1e3)

    with ThreadPoolExecutor(1, "isotype measures") as pool:
        pool.submit(run).result()
    return times

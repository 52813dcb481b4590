"""Times measured on this machine, kept in the cache folder for later processes."""

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
    """Return the file of measurements under given conditions on this CPU with this torch; it need not exist."""
    return _file(folder, [*what, *_machine()])


def file_of_card(folder: str, card: str, *what: Any) -> Path:
    """Return the file of measurements on a GPU of this name with this torch; it need not exist."""
    return _file(folder, [*what, card, torch.__version__])


def _file(folder: str, conditions: list[Any]) -> Path:
    key = json.dumps(conditions)
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
    """Return a file's content by name; empty if it is damaged or missing."""
    if not file.is_file():
        return {}
    try:
        held = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    whole = isinstance(held, dict) and all(isinstance(each, dict) for each in held.values())
    return held if whole else {}


class Kept(Generic[Result]):
    """Cached results of one kind of measurement (frozen dataclass `kind`), measured once.

    Attributes:
        known: (file, name) -> results of this process.
    """

    def __init__(self, kind: Callable[..., Result]) -> None:
        self.known: dict[tuple[Path, str], Result] = {}
        self._kind = kind
        self._lock = threading.Lock()

    def get(self, file: Path, name: str) -> Result | None:
        if (file, name) not in self.known and (result := self.all(file).get(name)) is not None:
            self.known[file, name] = result
        return self.known.get((file, name))

    def all(self, file: Path) -> dict[str, Result]:
        results = {}
        for name, entry in read(file).items():
            with suppress(TypeError):
                result: Any = self._kind(**entry)
                numbers = [getattr(result, each.name) for each in fields(result) if each.type == "float"]
                if all(isinstance(number, (int, float)) for number in numbers):
                    results[name] = result
        return results

    def of(self, file: Path, name: str, measure: Callable[[], Result]) -> tuple[Result, str | None]:
        """Return the cached or newly measured result, and why it could not be cached (None if it was)."""
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
    """Return the milliseconds of several ways, run in turns after a warm-up turn.

    `prepare` and its calls run in a separate thread, without the caller's autocast, saved-tensor hooks
    (gradient checkpointing) or dispatch modes; their errors are raised here.
    """
    times: dict[Name, list[float]] = {}

    def run() -> None:
        torch.set_num_threads(threads)  # OpenMP's thread count is per thread
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

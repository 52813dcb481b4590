"""Stores times that were measured on this machine in the cache folder, so that later processes can read them."""

from __future__ import annotations

import hashlib
import json
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from operator import truediv
from pathlib import Path
from typing import Any

import torch

from isotype.core.cache import default_cache_dir
from isotype.core.files import write_whole
from isotype.precision.devices.cpu import this_cpu


@dataclass(frozen=True)
class Times:
    """Times of one call, first by another library's kernel, then by isotype's kernel.

    Attributes:
        milliseconds: each kernel's median.
        faster: speed-up of isotype's kernel over the other library's.
    """

    milliseconds: dict[str, float]
    faster: float

    @classmethod
    def of(cls, turns: Mapping[str, Sequence[float]]) -> Times:
        """Return the times from each kernel's milliseconds per turn. The speed-up is the median over the turns."""
        medians = {name: round(statistics.median(times), 4) for name, times in turns.items()}
        return cls(medians, round(statistics.median(map(truediv, *turns.values())), 3))


def file_of(folder: str, *conditions: Any, card: str = "") -> Path:
    """Return the file for times measured under `conditions` with this torch version, on a GPU named `card` or else on this CPU."""
    machine = [card, torch.__version__] if card else _machine()
    key = json.dumps([*conditions, *machine])
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
    """Return the entries of a file by name. If the file is damaged or missing, return an empty dict."""
    try:
        entries = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    whole = isinstance(entries, dict) and all(isinstance(entry, dict) for entry in entries.values())
    return entries if whole else {}


class Kept:
    """Stores the times of one kind of measurement in files.

    Attributes:
        known: times that this process has measured or read, by (file, name).
    """

    def __init__(self) -> None:
        self.known: dict[tuple[Path, str], Times] = {}
        self._lock = threading.Lock()

    def get(self, file: Path, name: str) -> Times | None:
        if (file, name) not in self.known and (result := self.all(file).get(name)) is not None:
            self.known[file, name] = result
        return self.known.get((file, name))

    def all(self, file: Path) -> dict[str, Times]:
        results = {}
        for name, entry in read(file).items():
            with suppress(TypeError, AttributeError):
                result = Times(**entry)
                numbers = (result.faster, *result.milliseconds.values())
                if all(isinstance(number, (int, float)) for number in numbers):
                    results[name] = result
        return results

    def of(self, file: Path, name: str, measure: Callable[[], Times]) -> tuple[Times, str | None]:
        """Return (the stored or newly measured times, why new times could not be stored or None)."""
        with self._lock:
            if (stored := self.get(file, name)) is not None:
                return stored, None
            result = measure()
            self.known[file, name] = result
            try:
                file.parent.mkdir(parents=True, exist_ok=True)
                write_whole(file, json.dumps({**read(file), name: asdict(result)}, indent=1) + "\n")
            except OSError as error:
                return result, str(error)
            return result, None


def in_turns(
    prepare: Callable[[], Mapping[str, Callable[[], object]]], turns: int, threads: int
) -> dict[str, list[float]]:
    """Time the calls that `prepare` returns, one after another in each turn. Return each call's milliseconds per turn.

    A first turn is not timed. The calls run in another thread, where the caller's autocast, saved-tensor hooks (gradient
    checkpointing) and dispatch modes do not apply.
    """
    times: dict[str, list[float]] = {}

    def run() -> None:
        torch.set_num_threads(threads)  # OpenMP's thread count is per thread
        calls = prepare()
        times.update((name, []) for name in calls)
        for turn in range(turns + 1):
            for name, call in calls.items():
                began = time.perf_counter()
                call()
                if turn:
                    times[name].append((time.perf_counter() - began) * 1e3)

    with ThreadPoolExecutor(1, "isotype measures") as pool:
        pool.submit(run).result()
    return times

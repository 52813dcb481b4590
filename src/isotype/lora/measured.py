"""Times that were measured on this machine, kept for its next processes in the cache folder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import torch

from isotype.core.cache import default_cache_dir
from isotype.core.files import write_whole
from isotype.precision.devices.cpu import this_cpu


def file_of(folder: str, *what: Any) -> Path:
    """The file of what was measured under certain conditions on this CPU with this torch; it need not exist."""
    key = json.dumps([*what, *_machine()])
    return default_cache_dir() / folder / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"


def file_of_card(folder: str, card: str, *what: Any) -> Path:
    """The file of what was measured on a GPU of this name with this torch; it need not exist."""
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
    except (OSError, ValueError):
        return {}
    whole = isinstance(held, dict) and all(isinstance(each, dict) for each in held.values())
    return held if whole else {}


def keep(file: Path, name: str, entry: dict[str, Any]) -> str | None:
    """Add what was measured to a file; returns why it could not be kept, None where it was."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, json.dumps({**read(file), name: entry}, indent=1) + "\n")
    except OSError as error:
        return str(error)
    return None


def apart(run: Callable[[], None], threads: int) -> None:
    """Call `run` in a thread of its own and wait for it; what it raises is raised here.

    That thread knows nothing of the caller's autocast, saved-tensor hooks (gradient checkpointing) or dispatch modes.
    """

    def called() -> None:
        torch.set_num_threads(threads)  # OpenMP's number belongs to a thread
        run()

    with ThreadPoolExecutor(1, "isotype measures") as pool:
        pool.submit(called).result()

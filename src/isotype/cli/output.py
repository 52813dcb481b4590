"""The consoles of the commands, and the warnings of libraries."""

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from isotype.core.console import TerminalConsole
from isotype.core.errors import Problem, UsageError
from isotype.report.text import wrapped


def console_of_failure() -> Console:
    """Return a console on standard error for fatal errors. If several processes fail, only the console of the first one prints."""
    return TerminalConsole(stderr=True, quiet=not first_to_fail())


def print_error(console: Console, text: str) -> None:
    lines = wrapped(f"error: {text}", console).removeprefix("error:")
    console.print(Text.assemble(("error:", "bold red"), lines), highlight=False, soft_wrap=True)


def show_log() -> None:
    """Print isotype's log messages of the level INFO."""
    logging.basicConfig(format="%(name)s: %(message)s")
    logging.getLogger("isotype").setLevel(logging.INFO)


def quiet_libraries() -> None:
    """Hide log messages of libraries and, unless PYTHONWARNINGS is set, their warnings."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # each of several processes would warn in C++
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
        warnings.filterwarnings("default", category=UserWarning, module=r"isotype\b")
        # bitsandbytes logs "MatMul8bitLt: inputs will be cast …" in each layer and forward.
        logging.getLogger("bitsandbytes").setLevel(logging.ERROR)


def show_warnings_of_libraries() -> None:
    """With PYTHONWARNINGS=error, print warnings. Show warnings of libraries, because Python would otherwise raise them as errors."""
    if any(option.split(":")[0].startswith("e") for option in sys.warnoptions):
        warnings.simplefilter("default")


_NUMBERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT")


def check_surroundings() -> None:
    """Raise UsageError if the working directory no longer exists, or a launcher's environment variables are invalid."""
    if problems := list(_problems()):
        raise UsageError("isotype cannot run in this environment", problems)


def _problems() -> Iterator[Problem]:
    try:
        Path.cwd()
    except OSError as error:
        what = f"the working directory: {error.strerror or error}"
        fix = "cd to a directory that exists, and run the command again"
        yield Problem(what, "a directory that exists", fix)
    values = {}
    for name in _NUMBERS:
        text = os.environ.get(name, "").strip() or "0"
        if text.isascii() and text.isdigit() and int(text) < 1 << 16:
            values[name] = int(text)
        else:
            what = f"the environment variable {name}={os.environ[name]!r}"
            yield Problem(what, "a whole number, as torchrun and accelerate launch set it", f"unset {name}")
    for rank, size in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        if values.get(size) and values.get(rank, 0) >= values[size]:
            what = f"the environment variables {rank}={values[rank]} and {size}={values[size]}"
            fix = "unset both variables, or start the processes with torchrun"
            yield Problem(what, f"a {rank} below {size}", fix)


@cache
def first_to_fail() -> bool:
    """Return True in the first process that reports a failure, and in a process without torchrun. The other processes
    print no message.

    Each failing process increments a counter in torchrun's `TCPStore`. The store lives longer than the processes. The
    result is cached, because a second call in the first failing process must also return True.
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
    except (KeyError, ValueError, RuntimeError):
        return True  # the launcher has ended: two error messages are better than none

"""Processes of their own for tests, forked from one that has imported the libraries and done nothing else.

Importing them takes longer than what most of these processes do. They come from the fork server of `multiprocessing`, which has
no threads and nothing of what tests did before. What a process does while it imports is tested in a new interpreter instead.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import runpy
import sys
import tempfile
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
_IMPORTED = (
    "tests.imported",
    "pytest",
    "tests.train.forked",
    "tests.distributed.ranks",
    "tests.distributed.one_rank",
    "torch.distributed.launcher.api",
)


@dataclass(frozen=True)
class Ended:
    """A process that has ended.

    Attributes:
        returncode: exit status, or minus the signal that ended it.
        stdout: what it and its children wrote.
        stderr: likewise.
    """

    returncode: int
    stdout: str
    stderr: str


def run_module(
    module: str, *arguments: object, environment: Mapping[str, str] | None = None, timeout: float = 300
) -> Ended:
    """`python -m MODULE ARGUMENTS` in the repository's root; `environment` is that of this process if it is None."""
    return run(_as_main, module, list(map(str, arguments)), environment=environment, timeout=timeout)


def run(
    function: Callable[..., object],
    *arguments: Any,
    environment: Mapping[str, str] | None = None,
    timeout: float = 300,
) -> Ended:
    """Call a module's function; the process fails where it raises, and has the status that it exits with."""
    with tempfile.TemporaryDirectory() as folder:
        stdout, stderr = Path(folder) / "stdout", Path(folder) / "stderr"
        process = start(function, *arguments, stdout=stdout, stderr=stderr, environment=environment)
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            raise TimeoutError(f"{timeout} s: {stdout.read_text()}\n{stderr.read_text()}")
        return Ended(
            process.exitcode, stdout.read_text("utf-8", "replace"), stderr.read_text("utf-8", "replace")
        )


def start(
    function: Callable[..., object],
    *arguments: Any,
    stdout: Path,
    stderr: Path,
    environment: Mapping[str, str] | None = None,
) -> BaseProcess:
    """As `run`, without waiting; what it writes goes to these files."""
    surroundings = dict(os.environ if environment is None else environment)
    method = multiprocessing.get_start_method()
    process = _server().Process(
        target=_forked, args=(surroundings, method, stdout, stderr, function, arguments)
    )
    process.start()
    return process


@functools.cache
def _server() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_IMPORTED))
    with contextlib.chdir(ROOT):  # what is imported is found there
        forkserver.ensure_running()
    return context


def _forked(
    environment: dict[str, str],
    method: str,
    stdout: Path,
    stderr: Path,
    function: Callable[..., object],
    arguments: tuple[Any, ...],
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(ROOT)
    multiprocessing.set_start_method(
        method, force=True
    )  # processes that it starts come as those of any other
    for number, path in ((1, stdout), (2, stderr)):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, number)
    function(*arguments)
    sys.stdout.flush()


def _as_main(module: str, arguments: list[str]) -> None:
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def launched(count: int, function: Callable[..., object], *arguments: Any) -> None:
    """Call a function in `count` processes as `torchrun --standalone` starts them, by its own agent."""
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        run_id=str(uuid.uuid4()),
        max_restarts=0,
        start_method="fork",
    )
    elastic_launch(config, function)(*arguments)

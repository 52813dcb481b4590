"""Processes of their own for tests, forked from one that has imported what they need and done nothing else.

Importing takes longer than what most of these processes do. There are two such servers (`tests.forks`): one has imported torch, and has
forked the other, which has imported all libraries. The workers of pytest-xdist share them.
"""

from __future__ import annotations

import atexit
import fcntl
import functools
import os
import runpy
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tests.forks import ROOT, Forked, serve

Imports = Literal["torch", "libraries"]
_MODULES: dict[Imports, tuple[str, ...]] = {
    "torch": ("torch",),
    "libraries": (
        "tests.imported",
        "pytest",
        "tests.train.forked",
        "tests.distributed.ranks",
        "tests.distributed.one_rank",
        "torch.distributed.launcher.api",
    ),
}
_ENVIRONMENT = dict(os.environ)  # before any test has changed it
_SESSION = os.environ.get("PYTEST_XDIST_TESTRUNUID", uuid.uuid4().hex)
_SERVERS: list[Forked | subprocess.Popen[bytes]] = []  # they end with this process


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


def run_code(code: str, *arguments: object) -> Ended:
    """`python -c CODE ARGUMENTS` in the repository's root, where torch has been imported, and no other library."""
    return run(_as_code, code, list(map(str, arguments)), imports="torch")


def printed(code: str, *arguments: object) -> str:
    """What `run_code` prints if it does not fail."""
    ended = run_code(code, *arguments)
    if ended.returncode:
        raise ChildProcessError(ended.stderr)
    return ended.stdout


def run(
    function: Callable[..., object],
    *arguments: Any,
    environment: Mapping[str, str] | None = None,
    timeout: float = 300,
    imports: Imports = "libraries",
) -> Ended:
    """Call a module's function; the process fails where it raises, and has the status that it exits with."""
    with tempfile.TemporaryDirectory() as folder:
        stdout, stderr = Path(folder) / "stdout", Path(folder) / "stderr"
        process = start(
            function, *arguments, stdout=stdout, stderr=stderr, environment=environment, imports=imports
        )
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
    imports: Imports = "libraries",
) -> Forked:
    """As `run`, without waiting; what it writes goes to these files."""
    surroundings = dict(os.environ if environment is None else environment)
    return Forked(_server(imports), (surroundings, stdout, stderr, function, arguments))


@functools.cache
def _server(imports: Imports) -> Path:
    """Where the process listens that has imported these: who asks first starts it, and it lives as long as that process."""
    torch = _server("torch") if imports == "libraries" else None
    folder = Path(tempfile.gettempdir()) / f"isotype-forks-{_SESSION}"
    folder.mkdir(mode=0o700, exist_ok=True)
    address, log = folder / imports, folder / f"{imports}.log"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not address.exists():
            server = _first_server(address, log) if torch is None else _second_server(torch, address, log)
            _SERVERS.append(server)
            while not address.exists():
                time.sleep(0.02)
                if server.poll() is not None:
                    raise ChildProcessError(log.read_text())
    return address


def _first_server(address: Path, log: Path) -> subprocess.Popen[bytes]:
    """Of a new interpreter; it ends with its standard input."""
    command = [sys.executable, "-m", "tests.forks", str(address), *_MODULES["torch"]]
    with log.open("w") as text:
        server = subprocess.Popen(
            command, cwd=ROOT, env=_ENVIRONMENT, stdin=subprocess.PIPE, stdout=text, stderr=text, start_new_session=True
        )  # fmt: skip
    atexit.register(server.communicate)
    return server


def _second_server(torch: Path, address: Path, log: Path) -> Forked:
    server = Forked(torch, (_ENVIRONMENT, log, log, serve, (address, _MODULES["libraries"])))
    atexit.register(server.close)
    return server


def _as_code(code: str, arguments: list[str]) -> None:
    sys.argv = ["-c", *arguments]
    exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})


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

"""A server that has imported some modules and forks a process for whoever asks; `tests.processes` starts it.

`python -m tests.forks ADDRESS MODULE…` serves until its standard input ends, at a socket of that name.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import pickle
import select
import shutil
import signal
import socket
import struct
import sys
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from tests import cpus

_NUMBER = struct.Struct("q")
ROOT = Path(__file__).parents[1]


def serve(address: Path, modules: Sequence[str], line: int | None = None) -> None:
    """Import modules and fork a process for every request, until the other end of `line` is closed; None: until killed."""
    cpus.install()
    gc.disable()
    for module in modules:
        importlib.import_module(module)
    gc.enable()
    gc.collect()
    gc.freeze()
    # What answers requests has nothing to say to this process when it ends.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{address}.new")
    listener.listen()
    Path(f"{address}.new").rename(address)  # where there is an address somebody listens
    sources: list[socket.socket | int] = [listener] if line is None else [listener, line]
    while line not in select.select(sources, [], [])[0]:
        request, _ = listener.accept()
        if not os.fork():
            listener.close()
            _answer(request)
        request.close()
    shutil.rmtree(address.parent)


def _answer(request: socket.socket) -> NoReturn:
    """Fork the process and tell its id, then its status; it ends with whoever asked for it."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with request.makefile("rb") as text:
        (size,) = _NUMBER.unpack(text.read(_NUMBER.size))
        call = text.read(size)
    pid = os.fork()
    if not pid:
        request.close()
        os._exit(_status(call))
    request.sendall(_NUMBER.pack(pid))
    # Linux wakes this process when the other one ends; elsewhere it looks.
    pidfd: list[socket.socket | int] = [os.pidfd_open(pid)] if sys.platform == "linux" else []
    while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
        # Nothing more is sent: where the request can be read its other end is closed.
        if request in select.select([request, *pidfd], [], [], None if pidfd else 0.005)[0]:
            os.kill(pid, signal.SIGKILL)
            os._exit(0)
    request.sendall(_NUMBER.pack(os.waitstatus_to_exitcode(ended[1])))
    os._exit(0)


def _status(call: bytes) -> int:
    """Exit status of a call, with what an interpreter does at its end but to take itself apart, which takes a second."""
    try:
        environment, stdout, stderr, function, arguments = pickle.loads(call)
        os.environ.clear()
        os.environ.update(environment)
        cpus.see_as_asked()
        os.chdir(ROOT)
        for number, path in ((0, os.devnull), (1, stdout), (2, stderr)):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
            os.dup2(descriptor, number)
        function(*arguments)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:  # noqa: BLE001 - whatever ends it is printed, as by an interpreter
        traceback.print_exc()
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return status


class Forked:
    """A process that a server has forked; it is killed when this object goes.

    Attributes:
        pid: its id.
        exitcode: its status, or minus the signal that ended it; None while it runs.
    """

    def __init__(self, address: Path, call: tuple[Any, ...]) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(str(address))
        text = pickle.dumps(call)
        self._socket.sendall(_NUMBER.pack(len(text)) + text)
        self.pid = self._number()
        self.exitcode: int | None = None

    def _number(self) -> int:
        text = self._socket.recv(_NUMBER.size, socket.MSG_WAITALL)
        if not text:
            raise ChildProcessError("the server of forked processes has ended")
        return int(_NUMBER.unpack(text)[0])

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end, at most `timeout` seconds."""
        if self.exitcode is None and select.select([self._socket], [], [], timeout)[0]:
            self.exitcode = self._number()
            self._socket.close()

    def poll(self) -> int | None:
        """Its status, as far as it has ended."""
        self.join(0)
        return self.exitcode

    def close(self) -> None:
        """End it, if it has not ended."""
        self._socket.close()

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


if __name__ == "__main__":
    serve(Path(sys.argv[1]), sys.argv[2:], line=0)

"""The command line in forked processes, for programs that send signals to it; without the check before the first step.

Forking is only safe from a process in which no thread pool runs yet, so these are programs of their own and not
tests; importing the libraries once instead of once a run is what makes many runs affordable.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}

import isotype.checkpoint.resolve
import isotype.cli.main
import isotype.cli.training
import isotype.data.load
import isotype.train.callback
import isotype.train.models
import isotype.train.monitor.progress
import isotype.train.monitor.recorder
import isotype.train.training
from isotype.data.methods import METHODS

METHODS["sft"].dataclass_types()
METHODS["sft"].trainer_class()


def start(argv: Sequence[str], log: Path) -> int:
    """Start `isotype ARGV` in a new process group, append its output to `log`, and return its process id."""
    pid = os.fork()
    if pid:
        return pid
    os.setsid()
    isotype.train.callback.before_first_step = lambda *_: None  # type: ignore[attr-defined]
    # A shell that runs the tests in the background has Ctrl-C ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    code = 70
    try:
        code = isotype.cli.main.main(argv)
        sys.stdout.flush()
    finally:
        os._exit(code)


def wait_for(pid: int, condition: Callable[[], bool], ended: list[int]) -> bool:
    """Wait until `condition()` is true; if the process ends before, return False with its status in `ended`."""
    while not condition():
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            ended.append(os.waitstatus_to_exitcode(status))
            return False
        time.sleep(0.0002)
    return True

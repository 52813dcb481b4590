"""Private parts of Python's standard library and of NumPy: frames, argparse, imports, processes, bit generators."""

import argparse
import os
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Any

from isotype.compat.replaced import Replacements

frame_above = sys._getframe
"""Return a frame of the call stack (CPython 3.11 to 3.15). In a function, `frame_above(1)` is the frame of its caller."""


def actions_of(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Return the arguments of a parser in order. argparse has no public list of them."""
    return parser._actions


class ValueParser(argparse.ArgumentParser):
    """A parser that continues after an invalid value, with the result of `wrong_value(action, value)` in its place."""

    wrong_value: Callable[[argparse.Action, Any], Any]

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        try:
            return super()._get_value(action, arg_string)
        except argparse.ArgumentError:
            return self.wrong_value(action, arg_string)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError:
            self.wrong_value(action, value)


def is_being_imported(module: Any) -> bool:
    return bool(getattr(module.__spec__, "_initializing", False))


def source_of(generator: Any) -> Any:
    """Return the bit generator of a `numpy.random.RandomState`, which has no public attribute for it."""
    return generator._bit_generator


def around_programs(replaced: Replacements, popen: Callable[..., Any], system: Callable[..., Any]) -> None:
    """Let `popen(original, …)` replace `Popen.__init__(…)`, and `system(original, command)` replace `os.system(command)`."""
    replaced.wrap(subprocess.Popen, "__init__", popen)
    replaced.wrap(os, "system", system)


def around_processes(
    replaced: Replacements, start: Callable[..., Any], bootstrap: Callable[..., Any]
) -> None:
    """Wrap multiprocessing's `Process.start` (in this process) and `_bootstrap` (in the new process)."""
    replaced.wrap(BaseProcess, "start", start)
    replaced.wrap(BaseProcess, "_bootstrap", bootstrap)

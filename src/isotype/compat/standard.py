"""Python's standard library and numpy: frames, the parts of a command line's parser, a module that is being imported."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Any

from isotype.compat.replaced import Replacements

frame_above = sys._getframe
"""`frame_above(1)`: the frame of who called the function that asks. CPython's; 3.11 to 3.14."""


def actions_of(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Every argument of a parser, in order; argparse has no public list of them."""
    return parser._actions


class ValueParser(argparse.ArgumentParser):
    """argparse's two private steps that judge one value, under names that a subclass may override and call."""

    def value_of(self, action: argparse.Action, text: str) -> Any:
        """The value that an argument makes of a text."""
        return super()._get_value(action, text)

    def require_choice(self, action: argparse.Action, value: Any) -> None:
        """Raise ArgumentError for a value that is none of the argument's choices."""
        super()._check_value(action, value)

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        return self.value_of(action, arg_string)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        self.require_choice(action, value)


def is_being_imported(module: Any) -> bool:
    """Whether a module's own code has not ended yet."""
    return bool(getattr(module.__spec__, "_initializing", False))


def source_of(generator: Any) -> Any:
    """The source of random bits in a `numpy.random.RandomState`; a `numpy.random.Generator` calls it `bit_generator`."""
    return generator._bit_generator


def around_programs(replaced: Replacements, popen: Callable[..., Any], system: Callable[..., Any]) -> None:
    """Let `popen(start, process, args, …)` and `system(start, command)` run where a program is started.

    Every function of `subprocess` comes to `Popen.__init__`; `os.system` does not.
    """
    replaced.wrap(subprocess.Popen, "__init__", popen)
    replaced.wrap(os, "system", system)


def around_processes(
    replaced: Replacements, start: Callable[..., Any], bootstrap: Callable[..., Any]
) -> None:
    """Let `start(start, process)` run where a process of multiprocessing is started, `bootstrap(bootstrap, process, …)` in it."""
    replaced.wrap(BaseProcess, "start", start)
    replaced.wrap(BaseProcess, "_bootstrap", bootstrap)

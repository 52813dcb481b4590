"""`isotype run`: a script as it is, with its first training steps watched.

The script runs in this process as `python SCRIPT` would run it. Torch is not imported before the script imports it,
so that what a script sets first (threads, visible devices) counts. Standard output is the script's own.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import runpy
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from isotype.arguments import Parser
from isotype.commands.traceback import cleaned
from isotype.errors import IsotypeError, Problem, UsageError

if TYPE_CHECKING:
    from isotype.commands.diagnosis import Diagnosis

CRASHED = 1
INTERRUPTED = 130

_DESCRIPTION = """\
Run a training script unchanged and watch its first step: what will fail or cost is said before the step, a crash is
explained under its traceback. Output and exit status stay the script's own; isotype writes to standard error."""

_WITH_VALUE = ("--steps", "--device", "-m")


@dataclass(frozen=True)
class Options:
    """What `isotype run` was asked.

    Attributes:
        target: path of the script, or name of the module.
        module: whether `target` is a module (`-m`).
        arguments: the script's own.
        steps: optimizer steps to watch.
        device: profile to judge for; None for the device the model is on.
        preflight: whether the first step is followed on fake tensors before it runs.
    """

    target: str
    module: bool
    arguments: tuple[str, ...]
    steps: int = 1
    device: str | None = None
    preflight: bool = True


def run(argv: Sequence[str], console: Console) -> int:
    """Run `isotype run` and return the script's exit status.

    Raises:
        UsageError: no script, or one that does not exist.
        SystemExit: the script's own.
    """
    options = parse(argv)
    if signal.getsignal(signal.SIGTERM) is signal.default_int_handler:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the script is to die of it as it would without us
    session = _Session(options)
    _when_imported("torch", session.begin)
    try:
        _execute(options)
    except SystemExit as leaving:
        session.left(leaving.code)
        raise
    except KeyboardInterrupt as interrupt:
        session.stop()
        _show(interrupt)
        return INTERRUPTED
    except BaseException as error:  # noqa: BLE001 - the last frame of the script: what python itself would print
        session.stop()
        _show(error)
        session.crashed(error)
        return CRASHED
    session.left(0)
    return 0


def parse(argv: Sequence[str]) -> Options:
    """Our options up to the script or `-m MODULE`; everything after it is the script's.

    Raises:
        UsageError: no script, one that does not exist, or less than one step.
    """
    own, rest = _split(list(argv))
    parser = Parser(
        prog="isotype run",
        usage="isotype run [--steps N] [--device PROFILE] [--no-preflight] (SCRIPT | -m MODULE) [ARGUMENT …]",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=1, metavar="N", help="optimizer steps to watch (1)")
    parser.add_argument("--device", help="a profile (t4, h100) to judge for; by default the device in use")
    parser.add_argument(
        "--no-preflight", action="store_true", help="do not follow the first step before it runs"
    )
    parser.add_argument("-m", dest="module", metavar="MODULE", help="run a module as `python -m` does")
    given = parser.parse_args(own)
    target = given.module or (rest.pop(0) if rest else None)
    problems = []
    if target is None:
        problems.append(
            Problem("no script", "the path of a script, or -m MODULE", "isotype run train.py --epochs 1")
        )
    elif given.module is None and not Path(target).exists():
        problems.append(Problem(target, "a script that exists", "check the path"))
    if given.steps < 1:
        problems.append(Problem(f"--steps {given.steps}", "1 or more", "leave it out to watch one step"))
    if problems or target is None:
        raise UsageError("nothing to run", problems)
    return Options(
        target, given.module is not None, tuple(rest), given.steps, given.device, not given.no_preflight
    )


def _split(argv: list[str]) -> tuple[list[str], list[str]]:
    position = 0
    while position < len(argv) and argv[position].startswith("-") and argv[position] != "-":
        if argv[position] == "--":
            return argv[:position], argv[position + 1 :]
        module = argv[position] == "-m"
        position += 2 if argv[position] in _WITH_VALUE else 1
        if module:
            break
    return argv[:position], argv[position:]


def _execute(options: Options) -> None:
    # What python itself puts there; the directory of the isotype command has no business in it.
    directory = "" if options.module else str(Path(options.target).resolve().parent)
    arguments, first = sys.argv, sys.path[0]
    sys.argv, sys.path[0] = [options.target, *options.arguments], directory or str(Path.cwd())
    try:
        if options.module:
            runpy.run_module(options.target, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(str(Path(options.target).absolute()), run_name="__main__")
    finally:
        sys.argv, sys.path[0] = arguments, first


def _show(error: BaseException) -> None:
    """What python would print, by the hook it would call."""
    error = cleaned(error)
    if isinstance(error, ImportError) and error.__traceback__ is None:
        sys.stderr.write(f"{sys.executable}: {error}\n")
        return
    sys.excepthook(type(error), error, error.__traceback__)


class _Session:
    """The diagnosis, once torch is there; a script that never imports it runs without one."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._diagnosis: Diagnosis | None = None

    def begin(self) -> None:
        from isotype.commands.diagnosis import Diagnosis

        options = self._options
        self._diagnosis = Diagnosis(options.steps, options.device, options.preflight, _errors())
        self._diagnosis.begin()

    def stop(self) -> None:
        if self._diagnosis is not None:
            self._diagnosis.stop()

    def crashed(self, error: BaseException) -> None:
        if self._diagnosis is not None:
            self._diagnosis.crashed(error)

    def left(self, code: Any) -> None:
        if self._diagnosis is not None:
            self._diagnosis.left(code)


def _errors() -> Console:
    # Under a launcher every rank runs this; one of them speaks.
    console = Console(stderr=True, quiet=os.environ.get("RANK", "0") != "0")
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 110
    return console


def _when_imported(name: str, act: Callable[[], None]) -> None:
    """Call `act` as soon as the module `name` has been imported; at once where it has been."""
    if name in sys.modules:
        act()
    else:
        sys.meta_path.insert(0, _Finder(name, act))


class _Finder:
    """Finds the one module as it would be found without us, and hears of its end."""

    def __init__(self, name: str, act: Callable[[], None]) -> None:
        self._name, self._act = name, act

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def exec_module(module: Any) -> None:
                del loader.exec_module
                execute(module)
                self._act()

            loader.exec_module = exec_module
        return spec


def main() -> int:
    """`python -m isotype.commands.run` is `isotype run`."""
    try:
        return run(sys.argv[1:], Console())
    except IsotypeError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())

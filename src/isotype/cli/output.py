"""Where the commands print, and what libraries may say meanwhile."""

from __future__ import annotations

import logging
import os
import sys
import warnings

from rich.console import Console
from rich.text import Text

from isotype.core.console import TerminalConsole
from isotype.core.processes import first_to_fail
from isotype.report.narrow import wrapped


def console_on(stderr: bool) -> Console:
    """The console of standard output or standard error."""
    # Under a launcher every rank runs this; one of them speaks.
    console = TerminalConsole(stderr=stderr, quiet=not stderr and os.environ.get("RANK", "0") != "0")
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 110  # a log file has no width of its own, and 80 wraps every table
    return console


def console_of_failure() -> Console:
    """The console of standard error for what ends the command: of several processes, the first that fails speaks."""
    console = console_on(stderr=True)
    console.quiet = not first_to_fail()
    return console


def print_error(console: Console, text: str) -> None:
    """An error, wrapped at words."""
    lines = wrapped(f"error: {text}", console).removeprefix("error:")
    console.print(Text.assemble(("error:", "bold red"), lines), highlight=False, soft_wrap=True)


def speak_up() -> None:
    """With `-v`: what isotype restored and where, and the libraries' own warnings."""
    logging.basicConfig(format="%(name)s: %(message)s")
    logging.getLogger("isotype").setLevel(logging.INFO)


def quiet_libraries() -> None:
    """Libraries' own chatter is not ours to show; their warnings come back with PYTHONWARNINGS."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # of several processes each warns in C++
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
        warnings.filterwarnings("default", category=UserWarning, module=r"isotype\b")
        # A line for each layer and forward: "MatMul8bitLt: inputs will be cast …".
        logging.getLogger("bitsandbytes").setLevel(logging.ERROR)


def show_warnings_of_libraries() -> None:
    """Under PYTHONWARNINGS=error too: as exceptions they would end a command in the midst of somebody else's code."""
    if any(option.split(":")[0].startswith("e") for option in sys.warnoptions):
        warnings.simplefilter("default")

"""The consoles of the commands, and the warnings of libraries."""

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
    """Return the console of standard output or standard error."""
    # Under a launcher every rank runs this; one of them speaks.
    console = TerminalConsole(stderr=stderr, quiet=not stderr and os.environ.get("RANK", "0") != "0")
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 110  # a log file has no width of its own, and 80 wraps every table
    return console


def console_of_failure() -> Console:
    """Return standard error's console for a fatal error: only the first failing process prints."""
    console = console_on(stderr=True)
    console.quiet = not first_to_fail()
    return console


def print_error(console: Console, text: str) -> None:
    """Print an error, wrapped at words."""
    lines = wrapped(f"error: {text}", console).removeprefix("error:")
    console.print(Text.assemble(("error:", "bold red"), lines), highlight=False, soft_wrap=True)


def speak_up() -> None:
    """Show what isotype restored and where, and the libraries' warnings (`-v`)."""
    logging.basicConfig(format="%(name)s: %(message)s")
    logging.getLogger("isotype").setLevel(logging.INFO)


def quiet_libraries() -> None:
    """Hide the logs of libraries; PYTHONWARNINGS shows their warnings."""
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
    """Show warnings of libraries; PYTHONWARNINGS=error is weakened, since exceptions would break the libraries."""
    if any(option.split(":")[0].startswith("e") for option in sys.warnoptions):
        warnings.simplefilter("default")

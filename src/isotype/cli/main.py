"""The command line: parse, call, render. What a command does lives elsewhere."""

from __future__ import annotations

import atexit
import gc
import json
import logging
import os
import shlex
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from isotype.core.arguments import Parser
from isotype.core.errors import IsotypeError
from isotype.core.interrupt import exit_status, signal_of, terminate
from isotype.core.terminal import print_the_nearest
from isotype.report.narrow import wrapped

TRAINING = ("sft", "dpo", "reward", "kto", "grpo", "rloo")
CRASHED = 1

# `isotype demo` is this command.
DEMO = shlex.split(
    "--model_name_or_path embedded:smollm2 --dataset_name embedded:precision_qa --quantization nf4 "
    "--output_dir runs/demo --max_steps 45 --per_device_train_batch_size 4 --learning_rate 1e-3 "
    "--lr_scheduler_type cosine --warmup_steps 5 --lora_r 16 --lora_alpha 32 --lora_dropout 0 "
    "--gradient_checkpointing False --eval_strategy steps --eval_steps 45 --eval_on_start True "
    "--save_strategy no --seed 0"
)

_USAGE = """\
usage: isotype COMMAND [ARGUMENT …]

train a model under one precision policy (each takes the arguments of `trl COMMAND`):
  sft      supervised fine-tuning on text, prompt/completion or chat data
  dpo      direct preference optimization
  reward   a reward model
  kto      Kahneman-Tversky optimization
  grpo     group relative policy optimization
  rloo     REINFORCE leave-one-out
  demo     sft of SmolLM2-135M-Instruct on an embedded data set

use what came out:
  chat     talk to a model or an adapter
  merge    merge an adapter into its base model, and say what the rounding costs

know before it runs:
  check    whether a training step will crash, fit, crawl or lose precision, on any device, without weights
  run      a training script of your own, unchanged, with its first step watched and its crash explained
  inspect  the dtypes, bytes and quantization that a checkpoint holds
  explain  what a finding means
  doctor   what this machine and these library versions can do, and what each dtype costs here

isotype COMMAND --help lists the arguments of a command. --debug shows tracebacks.
isotype completion bash|zsh|tcsh prints what your shell completes commands by.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0 done, 1 failed, 2 bad input, 130 Ctrl-C, 143 SIGTERM."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    # What follows `run` is another script's: its --debug is its own.
    arguments, debug = (arguments, False) if arguments[:1] == ["run"] else take_debug_flag(arguments)
    if arguments[:1] != ["run"]:  # another script's output, and its warnings, are its own
        print_the_nearest()
        _show_warnings_of_libraries()
    console, errors = _console(stderr=False), _console(stderr=True)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        console.print(wrapped(_USAGE, console), highlight=False, markup=False, soft_wrap=True, end="")
        return 0 if arguments else 2
    if arguments[0] == "--version":
        from isotype.core.package import VERSION

        console.print(f"isotype {VERSION}", highlight=False)
        return 0
    command, rest = arguments[0], arguments[1:]
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, terminate)
    if argv is None and command == "check":
        # This process ends with the report: looking for garbage among what it has loaded takes a tenth of its time,
        # and as much again when it ends.
        gc.disable()
        atexit.register(gc.freeze)
    try:
        handler = _handler(command)
        return handler(rest, console)
    except IsotypeError as error:
        if debug:
            traceback.print_exc()
        _print_error(errors, str(error))
        return error.exit_code
    except KeyboardInterrupt as interrupt:
        if debug:
            traceback.print_exc()
        errors.print("interrupted")
        return exit_status(signal_of(interrupt))
    except BrokenPipeError:
        # The reader of our output has gone (`isotype … | head`); there is nobody to tell.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CRASHED
    except Exception as error:  # noqa: BLE001 - the last frame: any crash ends in one message and a status
        if debug:
            traceback.print_exc()
        _print_error(
            errors,
            f"{type(error).__name__}: {error}\n  = this was not expected; --debug shows where it happened",
        )
        return CRASHED


def _console(stderr: bool) -> Console:
    # Under a launcher every rank runs this; one of them speaks.
    console = Console(stderr=stderr, quiet=not stderr and os.environ.get("RANK", "0") != "0")
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 110  # a log file has no width of its own, and 80 wraps every table
    return console


def _print_error(console: Console, text: str) -> None:
    lines = wrapped(f"error: {text}", console).removeprefix("error:")
    console.print(Text.assemble(("error:", "bold red"), lines), highlight=False, soft_wrap=True)


def take_debug_flag(arguments: Sequence[str]) -> tuple[list[str], bool]:
    """Take our bare `--debug` out; `--debug underflow_overflow` is transformers' own argument and stays."""
    rest, debug = [], False
    for position, token in enumerate(arguments):
        following = arguments[position + 1] if position + 1 < len(arguments) else "--"
        if token == "--debug" and following not in ("underflow_overflow", "tpu_metrics_debug"):
            debug = True
        else:
            rest.append(token)
    return rest, debug


def _handler(command: str) -> Callable[[list[str], Console], int]:
    if command in TRAINING:
        return lambda rest, console: _train(command, rest, console)
    handlers = {
        "demo": _demo,
        "check": _check,
        "run": _run,
        "inspect": _inspect,
        "explain": _explain,
        "completion": _completion,
        "doctor": _doctor,
        "merge": _merge,
        "chat": _chat,
    }
    if command not in handlers:
        import difflib

        from isotype.core.errors import Problem, UsageError

        known = (*TRAINING, *handlers)
        close = difflib.get_close_matches(command, known, n=1)
        raise UsageError(
            "unknown command",
            [
                Problem(
                    f"isotype {command}",
                    "one of " + ", ".join(known),
                    f"did you mean isotype {close[0]}?" if close else "isotype --help describes them",
                )
            ],
        )
    return handlers[command]


def _train(command: str, rest: list[str], console: Console) -> int:
    if any(each in ("-h", "--help") for each in rest):
        from isotype.train.usage import short_help

        text = wrapped(short_help(command), console)
        console.print(text, highlight=False, markup=False, soft_wrap=True, end="")
        return 0
    rest = ["--help" if each == "--help-all" else each for each in rest]
    _speak_up() if {"-v", "--verbose"} & set(rest) else _quiet_libraries()
    from isotype.cli.outcome import show_outcome
    from isotype.train.methods import METHODS
    from isotype.train.recipes import run
    from isotype.train.settings import parse_settings

    settings = parse_settings(METHODS[command], rest)
    outcome = run(settings, console)
    show_outcome(console, outcome, settings)
    if outcome.record.status == "failed":
        _print_error(_console(stderr=True), outcome.record.error or "")
    if outcome.stopped_by is not None:
        return exit_status(outcome.stopped_by)
    return CRASHED if outcome.record.status == "failed" else 0


def _run(rest: list[str], console: Console) -> int:
    from isotype.cli.run import run

    return run(rest, console)


def _demo(rest: list[str], console: Console) -> int:
    arguments = [*DEMO, *rest]
    console.print(
        f"[dim]isotype demo is:[/dim] isotype sft {_escape(shlex.join(arguments))}\n", highlight=False
    )
    return _train("sft", arguments, console)


def _check(rest: list[str], console: Console) -> int:
    _quiet_libraries()
    from isotype.cli.check import run

    return run(rest, console)


def _inspect(rest: list[str], console: Console) -> int:
    from isotype.cli.inspect import run

    return run(rest, console)


def _explain(rest: list[str], console: Console) -> int:
    from isotype.cli.explain import run

    return run(rest, console)


def _completion(rest: list[str], console: Console) -> int:
    from isotype.cli.completion import run

    return run(rest, console, {"chat": chat_parser, "merge": merge_parser, "doctor": doctor_parser})


def doctor_parser() -> Parser:
    """The arguments of `isotype doctor`."""
    parser = Parser(
        prog="isotype doctor",
        description="What this machine and these library versions can do: dtypes, what each costs here (measured), "
        "and versions that do not fit each other.",
    )
    parser.add_argument(
        "--device", default="auto", help="a device that is here (cpu, cuda:1) or a profile (t4, h100)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _doctor(rest: list[str], console: Console) -> int:
    options = doctor_parser().parse_args(rest)
    from isotype.report.doctor import doctor_json, gather_doctor_report, render_doctor

    report = gather_doctor_report(options.device)
    if options.json:
        print(json.dumps(doctor_json(report), indent=2))
    else:
        render_doctor(report, console)
    return 0 if report.ok else 1


def merge_parser() -> Parser:
    """The arguments of `isotype merge`."""
    parser = Parser(prog="isotype merge", description="Merge an adapter into its base model.")
    parser.add_argument("adapter", type=Path, help="directory of the adapter")
    parser.add_argument("-o", "--output", type=Path, required=True, help="directory for the merged model")
    parser.add_argument(
        "--base", default=None, help="merge into this 16-bit original instead of the dequantized base"
    )
    parser.add_argument(
        "--dtype", default="auto", help="dtype of the merged weights; auto: the one it was trained in"
    )
    return parser


def _merge(rest: list[str], console: Console) -> int:
    options = merge_parser().parse_args(rest)
    _quiet_libraries()
    from isotype.checkpoint.merge import merge_adapter
    from isotype.report.merge import show_merge

    with console.status(f"merging {_escape(str(options.adapter))} …"):
        report = merge_adapter(options.adapter, options.output, base=options.base, dtype=options.dtype)
    show_merge(console, report)
    return 0


def chat_parser() -> Parser:
    """The arguments of `isotype chat`."""
    from isotype.core.dtypes import QUANTIZATIONS

    parser = Parser(prog="isotype chat", description="Talk to a model or an adapter.")
    parser.add_argument("model", help="directory of a model or an adapter, a hub id, or embedded:smollm2")
    parser.add_argument("--ask", action="append", default=None, metavar="QUESTION", help="ask this and leave")
    parser.add_argument(
        "--system", default=None, metavar="TEXT", help="a system message before the conversation"
    )
    parser.add_argument("--dtype", default="auto", help="compute dtype")
    parser.add_argument("--quantization", choices=QUANTIZATIONS, default=None)
    parser.add_argument("--device", default="auto", help="device to run on")
    parser.add_argument("--max_new_tokens", type=int, default=200)
    parser.add_argument("--temperature", type=float, default=0.0, help="0: greedy")
    return parser


def _chat(rest: list[str], console: Console) -> int:
    options = chat_parser().parse_args(rest)
    _quiet_libraries()
    from isotype.train.chat import chat

    return chat(options, console)


def _speak_up() -> None:
    """With `-v`: what isotype restored and where, and the libraries' own warnings."""
    logging.basicConfig(format="%(name)s: %(message)s")
    logging.getLogger("isotype").setLevel(logging.INFO)


def _quiet_libraries() -> None:
    """Libraries' own chatter is not ours to show; their warnings come back with PYTHONWARNINGS."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
        warnings.filterwarnings("default", category=UserWarning, module=r"isotype\b")
        # A line for each layer and forward: "MatMul8bitLt: inputs will be cast …".
        logging.getLogger("bitsandbytes").setLevel(logging.ERROR)


def _show_warnings_of_libraries() -> None:
    """Under PYTHONWARNINGS=error too: as exceptions they would end a command in the midst of somebody else's code."""
    if any(option.split(":")[0].startswith("e") for option in sys.warnoptions):
        warnings.simplefilter("default")


def _escape(text: str) -> str:
    from rich.markup import escape

    return escape(text)

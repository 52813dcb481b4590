"""`isotype completion`: what a shell needs to complete commands, arguments and the values of some of them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib import import_module

from rich.console import Console

from isotype.compat.standard import actions_of, add_action
from isotype.core.arguments import Parser

SHELLS = ("bash", "zsh", "tcsh")

_DESCRIPTION = """\
Print a completion script.

  bash   isotype completion bash > ~/.local/share/bash-completion/completions/isotype
  zsh    isotype completion zsh > ~/.zfunc/_isotype   (with ~/.zfunc in fpath)
  tcsh   isotype completion tcsh > ~/.isotype.tcsh    (and source it)"""


def run(argv: Sequence[str], console: Console) -> int:
    """Run `isotype completion SHELL`; the script goes to standard output."""
    import shtab

    parser = Parser(
        prog="isotype completion",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shell", choices=SHELLS)
    options = parser.parse_args(argv)
    console.file.write(shtab.complete(_tree(), shell=options.shell) + "\n")
    return 0


def command_parsers() -> dict[str, argparse.ArgumentParser]:
    """The parser of every command that has flags."""
    from isotype.data.methods import METHODS
    from isotype.planning.request import parser as plan_parser
    from isotype.train.command.parse import training_parser
    from isotype.train.preflight.step_plan import help_parser

    training = {name: training_parser(name) for name in METHODS}
    others = {"demo": training["sft"], "plan": plan_parser(), "check": help_parser()}
    for name in ("inspect", "quality", "explain", "chat", "merge", "doctor"):
        others[name] = getattr(import_module(f"isotype.cli.{name}"), f"{name}_parser")()
    return {**training, **others}


def _tree() -> argparse.ArgumentParser:
    """One parser of all commands, made of theirs."""
    import shtab

    root = argparse.ArgumentParser(prog="isotype")
    commands = root.add_subparsers(dest="command")
    for name, parser in command_parsers().items():
        commands.add_parser(
            name, parents=[_bare(parser)], add_help=False, help=name
        )  # shtab skips those without
    commands.add_parser("run", help="run").add_argument("script").complete = shtab.FILE  # type: ignore[attr-defined]
    commands.add_parser("completion", help="completion").add_argument("shell", choices=SHELLS)
    return root


def _bare(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """A plain parser with the same arguments: files are completed for what names a path."""
    import shtab

    bare = argparse.ArgumentParser(add_help=False)
    for action in actions_of(parser):
        add_action(bare, action)
        if any(word in action.dest for word in ("path", "dir", "dataset_name", "adapter", "config", "model")):
            action.complete = shtab.FILE  # type: ignore[attr-defined]  # what shtab reads
    return bare

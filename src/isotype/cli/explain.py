"""`isotype explain`: what a finding means. The pages are the rules' docstrings; docs/rules holds copies of them.

`python -m isotype.cli.explain --write docs/rules` writes the copies.
"""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.markdown import Markdown
from rich.table import Table
from rich.text import Text

from isotype.core.arguments import Parser
from isotype.core.errors import Problem, SaveError, UsageError
from isotype.rules import Rule, all_rules

FAMILIES: Mapping[str, str] = {
    "IST1": "operands that crash",
    "IST2": "silent promotion and its cost",
    "IST3": "trainable parameters, optimizer, loss scaling",
    "IST4": "quantization state",
    "IST5": "checkpoint, merge, export, resume",
    "IST6": "hardware and versions",
    "IST7": "distributed",
    "IST8": "range",
}
"""How a code begins -> what its rules are about."""

INDEX = "README.md"


def explain_parser() -> Parser:
    """The arguments of `isotype explain`."""
    parser = Parser(
        prog="isotype explain", description="What a finding of `isotype check` means, and what repairs it."
    )
    parser.add_argument(
        "code", nargs="?", default=None, help="a code such as IST101; without one, all of them"
    )
    return parser


def run(argv: Sequence[str], console: Console) -> int:
    """Run `isotype explain` and return its exit status.

    Raises:
        UsageError: an unknown code, with the nearest ones.
    """
    options = explain_parser().parse_args(list(argv))
    if options.code is None:
        console.print(_table(all_rules()))
    else:
        console.print(Markdown(page(find_rule(options.code))))
    return 0


def find_rule(code: str) -> Rule:
    """The rule of a code, however it is written: `IST101`, `ist101`, `101`.

    Raises:
        UsageError: there is none.
    """
    rules = {rule.code: rule for rule in all_rules()}
    wanted = code.upper()
    wanted = f"IST{wanted}" if wanted.isdigit() else wanted
    if wanted in rules:
        return rules[wanted]
    near = difflib.get_close_matches(wanted, rules, n=3, cutoff=0.5)
    fix = f"did you mean {' or '.join(near)}?" if near else "isotype explain lists them"
    raise UsageError("unknown code", [Problem(code, "the code of a rule", fix)])


def page(rule: Rule) -> str:
    """A rule's page as Markdown."""
    return f"# {rule.code}: {rule.title}\n\n{rule.page.strip()}\n"


def index(rules: Sequence[Rule]) -> str:
    """The table of contents as Markdown."""
    lines = [
        "# Rules",
        "",
        "What `isotype check` finds. `isotype explain CODE` prints a page in the terminal. These pages are written by",
        "`python -m isotype.cli.explain --write docs/rules` from the docstrings of `isotype.rules`.",
    ]
    for family, about in FAMILIES.items():
        some = [rule for rule in rules if rule.code.startswith(family)]
        if some:
            lines += ["", f"## {family}xx: {about}", ""]
            lines += [f"- [{rule.code}]({rule.code}.md) {rule.title}" for rule in some]
    return "\n".join(lines) + "\n"


def pages(rules: Sequence[Rule]) -> dict[str, str]:
    """File name -> content of every page under docs/rules."""
    return {INDEX: index(rules)} | {f"{rule.code}.md": page(rule) for rule in rules}


def write_pages(directory: Path) -> tuple[Path, ...]:
    """Write every page into `directory`, and delete the pages of rules that are no more.

    Raises:
        SaveError: the directory cannot be written.
    """
    wanted = pages(all_rules())
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in wanted.items():
            temporary = directory / f".{name}.{os.getpid()}"
            temporary.write_text(text, encoding="utf-8", newline="\n")
            temporary.replace(directory / name)
        for stale in directory.glob("IST*.md"):
            if stale.name not in wanted:
                stale.unlink()
    except OSError as error:
        problem = Problem(f"{directory}: {error}", "a directory that can be written", "give another one")
        raise SaveError("the pages cannot be written", [problem]) from error
    return tuple(directory / name for name in wanted)


def _table(rules: Sequence[Rule]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("code", no_wrap=True, style="bold")
    table.add_column("what it finds", overflow="fold")
    for family, about in FAMILIES.items():
        some = [rule for rule in rules if rule.code.startswith(family)]
        if some:
            table.add_row("", Text(about, style="dim italic"))
            for rule in some:
                table.add_row(rule.code, Text(rule.title))
    return table


def main(argv: Sequence[str]) -> int:
    """Write the pages; for `python -m`."""
    parser = argparse.ArgumentParser(prog="python -m isotype.cli.explain")
    parser.add_argument("--write", type=Path, required=True, metavar="DIRECTORY")
    for path in write_pages(parser.parse_args(list(argv)).write):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""`isotype explain`: what a finding means. The pages are the rules' docstrings; tools/rule_pages.py writes docs/rules."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from rich.console import Console
from rich.markdown import Markdown
from rich.table import Table
from rich.text import Text

from isotype.core.arguments import Parser
from isotype.core.errors import UsageError
from isotype.rules import Rule, all_rules, by_family, page


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
    raise UsageError.of("unknown code", code, "the code of a rule", fix)


def _table(rules: Sequence[Rule]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("code", no_wrap=True, style="bold")
    table.add_column("what it finds", overflow="fold")
    for _, about, some in by_family(rules):
        table.add_row("", Text(about, style="dim italic"))
        for rule in some:
            table.add_row(rule.code, Text(rule.title))
    return table

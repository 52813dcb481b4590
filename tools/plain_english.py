"""Count idioms that a reader has to read twice, in docstrings, messages, pages and names.

python -m tools.plain_english            # prints the table
python -m tools.plain_english --where    # prints only kinds that are above their ceiling, with file and line

A docstring is a string that stands alone as a statement, a message any other string of three words or more.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from tools.sources import ROOT, Module, Sources, read_sources

OPENERS = re.compile(r"(What|Whether|One|How)\b")
PHRASES = {
    "None where": re.compile(r"\bNone where\b"),
    "nobody": re.compile(r"\bnobody\b", re.IGNORECASE),
    "lie for be": re.compile(r"\b(lie|lies|lay|lying)\b", re.IGNORECASE),
    "of which": re.compile(r"\bof which\b", re.IGNORECASE),
}
TABLES = ("commands.json", "arguments.json", "added.json", "nonfinite.json", "methods.json", "usage.txt")
"""Files with texts for users."""
NAMES = ("each", "own", "found", "given", "made", "told")

CEILINGS = {
    ("names", "each"): 1,
    ("names", "found"): 0,
    ("names", "given"): 8,
    ("names", "made"): 0,
    ("names", "own"): 4,
    ("names", "told"): 0,
}
"""Most idioms of a kind that a place may have; lowered whenever some have gone, never raised."""


@dataclass(frozen=True)
class Idiom:
    """An idiom: its place (docstrings, messages, pages or names), its kind, its path and line."""

    place: str
    kind: str
    where: str


def idioms(sources: Sources) -> list[Idiom]:
    """Return all idioms of the sources, the texts in `TABLES`, README and docs."""
    result = [idiom for module in sources.modules.values() for idiom in _in_module(module)]
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        result += _phrases("pages", str(page.relative_to(ROOT)), 1, page.read_text(encoding="utf-8"))
    for table in (path for path in sorted((ROOT / "src").rglob("*.*")) if path.name in TABLES):
        result += _phrases("messages", str(table.relative_to(ROOT)), 1, table.read_text(encoding="utf-8"))
    return result


def _in_module(module: Module) -> Iterator[Idiom]:
    path = str(module.path)
    alone = {id(node.value) for node in module.nodes if isinstance(node, ast.Expr)}
    for node in module.nodes:
        match node:
            case ast.Constant(value=str(text)) if id(node) in alone:
                if OPENERS.match(text.strip()):
                    yield Idiom("docstrings", "What, Whether, One, How first", f"{path}:{node.lineno}")
                yield from _phrases("docstrings", path, node.lineno, text)
            case ast.Constant(value=str(text)) if text.count(" ") >= 2:
                yield from _phrases("messages", path, node.lineno, text)
            case (
                ast.Name(id=name, ctx=ast.Store())
                | ast.arg(arg=name)
                | ast.FunctionDef(name=name)
                | ast.AnnAssign(target=ast.Attribute(attr=name))
            ) if name.strip("_") in NAMES:
                yield Idiom("names", name.strip("_"), f"{path}:{node.lineno}")


def _phrases(place: str, path: str, line: int, text: str) -> Iterator[Idiom]:
    for kind, pattern in PHRASES.items():
        for match in pattern.finditer(text):
            yield Idiom(place, kind, f"{path}:{line + text.count(chr(10), 0, match.start())}")


def counts(items: list[Idiom]) -> Counter[tuple[str, str]]:
    """Count idioms by place and kind."""
    return Counter((idiom.place, idiom.kind) for idiom in items)


def excess(items: list[Idiom], where: bool = False) -> list[str]:
    """Return a line for every count above its ceiling; with `where`, a line for each of its places below it."""
    lines = []
    for (place, kind), number in sorted(counts(items).items()):
        if number > (most := CEILINGS.get((place, kind), 0)):
            lines.append(f"{kind} in {place}: {number}, at most {most} allowed")
            lines += [
                f"  {idiom.where}" for idiom in items if where and (idiom.place, idiom.kind) == (place, kind)
            ]
    return lines


def main() -> int:
    """Print the table or, with `--where`, places above a ceiling; return 1 if a count is above its ceiling."""
    items, where = idioms(read_sources()), "--where" in sys.argv[1:]
    numbers = {**dict.fromkeys(CEILINGS, 0), **counts(items)}
    for (place, kind), number in () if where else sorted(numbers.items()):
        print(f"{place:12}{kind:32}{number:5}  of {CEILINGS.get((place, kind), 0)}")
    lines = excess(items, where)
    print("\n".join(lines), end="\n" if lines else "", file=sys.stderr)
    return bool(lines)


if __name__ == "__main__":
    sys.exit(main())

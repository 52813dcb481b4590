"""How the house stands, in figures from the sources: what one change makes a person read.

python -m tools.structure            # prints the table
python -m tools.structure --files    # and the files that each walk meets, the names on the border, the private names by file

Nothing is imported or run, so the figures are the same on every machine. How a value is followed is written in `tools/walk.py`, what
counts as a private name in `tools/private_names.py`. A name at a door is one that a module of one wing imports from a module of
another (`isotype.preflight.run:run`), counted once however many import it.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tools.patches import Patched, patched
from tools.private_names import PrivateName, private_names
from tools.sources import PACKAGE, ROOT, Module, Sources, read_sources
from tools.walk import walk

WALKS = {
    "check's model": ("isotype.preflight.check:check", "model"),
    "a training command's settings": ("isotype.train.training:run", "settings"),
    "a policy": ("isotype.train.models:adapted_model", "policy"),
}
"""What is followed: a function and its parameter."""

WINGS = {
    "judge": ("contracts", "trace", "rules", "preflight", "report.check"),
    "loader": ("data", "checkpoint", "report.inspect", "report.inspect_plan", "report.merge"),
    "arithmetic": ("lora",),
    "trainer": ("planning", "train", "report.run"),
    "cellar": ("core", "compat", "precision", "records", "model", "ranges", "report"),
    "door": ("cli", "report.doctor", "__init__", "__main__", "testing"),
}
"""Rooms by wing; the longest name that fits decides."""

BORDERS = (("trainer", "judge"), ("trainer", "loader"), ("trainer", "arithmetic"))
"""Which wing may import from which, at a door; no other pair of wings has one. All may import from the cellar."""
_UPPER = ("judge", "loader", "arithmetic", "trainer")

WORDS = ("found", "given", "made", "told")
"""What is counted as a name: variables, arguments, attributes, functions."""


@dataclass(frozen=True)
class Structure:
    """All figures of one state of the sources.

    Attributes:
        files: modules that each walk meets, by the name of the walk.
        stops: how many functions and parameters each walk meets.
        climbs: how many functions hand it back up into another module.
        borders: by pair of wings, what the first imports from the second, and the modules that do.
        private: uses of other libraries' private names outside of `compat/`.
        patched: what is changed in other libraries, and whether a test tells when it is no longer needed or no longer fits.
        lines: of Python by room.
        words: how often each of `WORDS` is a name.
    """

    files: Mapping[str, tuple[str, ...]]
    stops: Mapping[str, int]
    climbs: Mapping[str, int]
    borders: Mapping[tuple[str, str], Mapping[str, tuple[str, ...]]]
    private: tuple[PrivateName, ...]
    patched: tuple[Patched, ...]
    lines: Mapping[str, int]
    words: Mapping[str, int]

    @property
    def lines_by_wing(self) -> dict[str, int]:
        """Lines of Python by wing."""
        sums: Counter[str] = Counter()
        for room, lines in self.lines.items():
            sums[wing_of(f"{PACKAGE}.{room}")] += lines
        return dict(sums)


def wing_of(module: str) -> str:
    """The wing of a module, by the longest room of `WINGS` that holds it."""
    inside = module.removeprefix(PACKAGE).lstrip(".") or "__init__"
    matches = [
        (len(room), wing)
        for wing, rooms in WINGS.items()
        for room in rooms
        if inside == room or inside.startswith(f"{room}.")
    ]
    if not matches:
        raise ValueError(f"{module} is in no wing: tools/structure.py:WINGS")
    return max(matches)[1]


def structure(sources: Sources) -> Structure:
    """Measure parsed sources."""
    walks = {what: walk(sources, *start) for what, start in WALKS.items()}
    return Structure(
        files={what: tuple(each.files) for what, each in walks.items()},
        stops={what: len(each.stops) for what, each in walks.items()},
        climbs={what: len(each.climbs) for what, each in walks.items()},
        borders=borders(sources),
        private=tuple(private_names(sources)),
        patched=patched(ROOT / "tests"),
        lines=_lines(sources),
        words=_words(sources),
    )


def borders(sources: Sources) -> dict[tuple[str, str], dict[str, tuple[str, ...]]]:
    """By pair of wings: what crosses, and the modules that import it; of pairs that may have a door, and of others where something does."""
    crossing: dict[tuple[str, str], dict[str, set[str]]] = {pair: defaultdict(set) for pair in BORDERS}
    for module in sources.modules.values():
        here = wing_of(module.name)
        for target, name in _imports(module, sources):
            pair = here, wing_of(target)
            if here != pair[1] and {*pair} <= {*_UPPER}:
                crossing.setdefault(pair, defaultdict(set))[f"{target}:{name}"].add(module.name)
    return {
        pair: {name: tuple(sorted(importers)) for name, importers in sorted(names.items())}
        for pair, names in crossing.items()
    }


def _imports(module: Module, sources: Sources) -> Iterator[tuple[str, str]]:
    """Modules of ours that a module imports from, and what."""
    for node in module.nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == PACKAGE:
            assert node.module is not None
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield (inner, "*") if inner in sources.modules else (node.module, alias.name)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "*") for alias in node.names if alias.name in sources.modules)


def _lines(sources: Sources) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for module in sources.modules.values():
        parts = module.name.split(".")[1:] or ["__init__"]
        room = ".".join(parts[:2]) if parts[0] == "report" and len(parts) > 1 else parts[0]
        counts[room] += module.text.count("\n")
    return dict(sorted(counts.items()))


def _words(sources: Sources) -> dict[str, int]:
    pattern = re.compile(rf"(?:\b|_)({'|'.join(WORDS)})(?:\b|_)")
    counts: Counter[str] = Counter(dict.fromkeys(WORDS, 0))
    for module in sources.modules.values():
        for node in module.nodes:
            match node:
                case (
                    ast.Name(id=name)
                    | ast.arg(arg=name)
                    | ast.Attribute(attr=name)
                    | ast.keyword(arg=str(name))
                ):
                    counts.update(pattern.findall(name))
                case ast.FunctionDef(name=name):
                    counts.update(pattern.findall(name))
    return dict(counts)


def table(figures: Structure) -> str:
    """The figures, a line each."""
    tested = sum(bool(each.test) for each in figures.patched)
    rows = [
        *(
            (
                f"files met from {what}",
                f"{len(files)} ({figures.stops[what]} stops, {figures.climbs[what]} climbs)",
            )
            for what, files in figures.files.items()
        ),
        *(
            (f"names that the {here} takes from the {there}", str(len(names)))
            for (here, there), names in figures.borders.items()
        ),
        (
            "private names of other libraries outside compat/",
            f"{len({p.name for p in figures.private})} names, {len(figures.private)} uses",
        ),
        ("patched places with an expiry test", str(tested)),
        ("patched places without", str(len(figures.patched) - tested)),
        *((word, str(count)) for word, count in figures.words.items()),
        ("found + given + made + told", str(sum(figures.words.values()))),
        ("lines of Python in src", f"{sum(figures.lines.values()):,}"),
        *((f"  {wing}", f"{lines:,}") for wing, lines in sorted(figures.lines_by_wing.items())),
        *((f"    {room}", f"{lines:,}") for room, lines in figures.lines.items()),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:{width}}  {value}" for name, value in rows)


def details(figures: Structure) -> str:
    """What the figures count."""
    parts = [f"\nfiles met from {what}\n  " + "\n  ".join(files) for what, files in figures.files.items()]
    for (here, there), names in figures.borders.items():
        crossing = [f"{name}  <- {', '.join(importers)}" for name, importers in names.items()]
        parts.append(f"\nwhat the {here} takes from the {there}\n  " + "\n  ".join(crossing))
    private = Counter(f"{use.module}: {use.name}" for use in figures.private)
    parts.append("\nprivate names\n  " + "\n  ".join(f"{use} ({count})" for use, count in private.items()))
    parts.append(
        "\npatched places\n  "
        + "\n  ".join(f"{each.name}: {each.test or 'no test'}" for each in figures.patched)
    )
    return "\n".join(parts)


if __name__ == "__main__":
    figures = structure(read_sources())
    print(table(figures))
    if "--files" in sys.argv[1:]:
        print(details(figures))

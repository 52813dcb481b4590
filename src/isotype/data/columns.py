"""Columns that each trainer accepts, and checks of rows (dicts) against these columns.

The columns are the same as in `_prepare_dataset` of TRL's trainers. The checks are needed because TRL's errors about
wrong columns name no line.
"""

import difflib
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from isotype.core.errors import Problem
from isotype.core.names import listed
from isotype.data.cells import (
    CHATS,
    COLUMNS,
    OTHER_NAMES,
    REFILL,
    TEXT,
    TURN_COLUMNS,
    Row,
    chat_problems,
    count_keys,
    describe,
    message_problems,
    mixed_turns,
)
from isotype.data.methods import METHODS, Format, Method
from isotype.data.pictures import PICTURE_COLUMNS
from isotype.data.shapes import DEEP, DEEPEST, HUGE, MIXED, NULL, PICTURE, STRING, Shape, merge, shape_of

Record = tuple[str, int, Any]
"""(name of a file or split, number of a line or row, the row or its problem)."""

NEAR_NAMES = OTHER_NAMES["columns"]


def formats_of(method: str, text_field: str) -> tuple[Format, ...]:
    """Return the sets of columns that `method` accepts, with `text_field` as the name of the plain text column."""
    formats = METHODS[method].formats
    return tuple(replace(f, required=(text_field,)) if f.required == ("text",) else f for f in formats)


def matching(columns: Iterable[str], formats: Sequence[Format]) -> Format | None:
    """Return the first of `formats` that matches `columns`; None if no format matches."""
    present = set(columns)
    fit = (item for item in formats if present.issuperset(item.required))
    return next((item for item in fit if present.isdisjoint(item.excludes)), None)


def near(wanted: str, columns: Sequence[str]) -> str | None:
    """Return the column that means `wanted`: it has other capital letters, or is a synonym or a misspelling. Return None without one."""
    by_lower = {name.lower(): name for name in columns}
    for candidate in (wanted, *NEAR_NAMES.get(wanted, ())):
        if candidate in by_lower:
            return by_lower[candidate]
    close = difflib.get_close_matches(wanted, list(by_lower), n=1, cutoff=0.8)
    return by_lower[close[0]] if close else None


def _renames(columns: Sequence[str], formats: Sequence[Format]) -> dict[str, str]:
    """Return {old name: new name} that renames `columns` to one of `formats`, or {} if no renaming fits."""
    renames: list[dict[str, str]] = []
    for item in formats:
        if not set(columns).isdisjoint(item.excludes):
            continue
        free = [name for name in columns if name not in item.required]
        pairs = {want: near(want, free) for want in item.required if want not in columns}
        sources = [source for source in pairs.values() if source is not None]
        if len(set(sources)) == len(pairs):
            renames.append({source: want for want, source in pairs.items() if source is not None})
    # The format with the most columns loses the least data.
    return max(renames, key=len, default={})


def columns_problem(columns: Sequence[str], method: str, text_field: str = "text") -> Problem | None:
    """Return the problem of a data set with these `columns` for `method`; None if TRL accepts the columns."""
    formats = formats_of(method, text_field)
    if matching(columns, formats):
        return None
    renames = _renames(columns, formats)
    others = [name for name in METHODS if matching(columns, formats_of(name, text_field))]
    if renames:
        named = " and ".join(f"'{source}' to '{want}'" for source, want in renames.items())
        flag = ",".join(f"{want}={source}" for source, want in renames.items())
        fix = f"rename {named}: --columns {shlex.quote(flag)}"
        if "prompt" in renames.values() and {"instruction", "input"} <= set(columns):
            fix += "; join 'instruction' and 'input' first, because 'input' would be lost"
    elif others:
        fix = f"these columns fit {', '.join(f'isotype {name}' for name in others)}"
    elif method == "sft" and "prompt" in columns:
        fix = "add a column 'completion', because TRL expects both 'prompt' and 'completion'"
    elif method == "sft":
        fix = f"name the columns: {_named(formats)}; or name the column of the text: --dataset_text_field COLUMN"
    else:
        fix = f"name the columns: {_named(formats)}; or choose a method for these columns"
    accepted = ", or ".join(" + ".join(f"'{name}'" for name in item.required) for item in formats)
    return Problem(f"the columns are {quoted(columns)}", f"for {method}: {accepted}", fix)


def _named(formats: Sequence[Format]) -> str:
    wanted = max((form.required for form in formats), key=len)
    return f"--columns {','.join(f'{want}=COLUMN' for want in wanted)}"


def quoted(names: Iterable[str]) -> str:
    """Return up to twelve names in quotes, and the number of other names."""
    return listed((f"'{name if len(name) <= 40 else name[:37] + '…'}'" for name in names), 12) or "none"


def _places(word: str, lines: Sequence[int]) -> str:
    if len(lines) <= 1:
        return f", {word} {lines[0]}" if lines else ""
    shown = lines[:3] if len(lines) > 3 else lines[:-1]
    last = f"{len(lines) - 3} more" if len(lines) > 3 else lines[-1]
    return f", {word}s {', '.join(map(str, shown))} and {last}"


def same_beginning(row: Row) -> bool:
    """Return True if `chosen` and `rejected` begin with the same message, or if one column is not a conversation."""
    chosen, rejected = row.get("chosen"), row.get("rejected")
    if not isinstance(chosen, list) or not isinstance(rejected, list):
        return True
    return bool(chosen[:1] == rejected[:1])


_ALL_ALIKE = "write all values of the column as text, or as numbers"
_UNFIT = {
    MIXED: ("has values of different kinds", "one kind of value in a column", _ALL_ALIKE),
    HUGE: (
        "holds a whole number beyond 64 bits",
        "whole numbers of at most 64 bits",
        "write the number as text",
    ),
    DEEP: ("is nested too deeply", f"at most {DEEPEST} nested lists and objects", "write the value as text"),
}


@dataclass
class Survey:
    """Checks of all rows of a data set for a method, and the results.

    Attributes:
        word: "line" if rows are counted by the lines of a file, and "row" if the rows of a table are counted.
        cells: True if the rows come from CSV. A CSV column with several kinds of values is text.
        findings: maps (source, problem) to line numbers. The list is empty if the problem concerns the whole source.
        shapes: type of every column, merged over all rows.
        first: the first row that is an object (valid or not); None if no row is an object.
        keys: maps (place, name of an unused key) to a count. A place is "row", "message" or "part".
    """

    method: Method
    text_field: str = "text"
    word: str = "line"
    cells: bool = False

    findings: dict[tuple[str, Problem], list[int]] = field(default_factory=dict)
    shapes: dict[str, Shape] = field(default_factory=dict)
    count: int = 0
    first: Row | None = None
    keys: Counter[tuple[str, str]] = field(default_factory=Counter)
    pictured: bool = False

    def note(self, source: str, line: int | None, problem: Problem) -> None:
        lines = self.findings.setdefault((source, problem), [])
        if line is not None:
            lines.append(line)

    def problems(self) -> list[Problem]:
        """Return the findings as problems. They begin with the source and the numbers of lines or rows."""
        findings = self.findings.items()
        return [
            replace(p, given=f"{source}{_places(self.word, at)}: {p.given}") for (source, p), at in findings
        ]

    def add(self, source: str, line: int, row: object) -> None:
        """Check a row. If `row` is a `Problem`, record it."""
        self.count += 1
        if isinstance(row, Problem):
            self.note(source, line, row)
        elif not isinstance(row, dict):
            fix = 'write {"column": value, …}'
            self.note(source, line, Problem(f"the row is {describe(row)}", "a JSON object", fix))
        else:
            if self.first is None:
                self._begin(source, line, row)
            faults = [*self._faults(row)]
            for fault in faults or self._merge_types(row):
                self.note(source, line, fault)
            if not faults:
                unread = (name for name in self._unread if row.get(name) is not None)
                self.keys.update(("row", name) for name in unread)
                count_keys(row, self._chats, self.keys)

    def _begin(self, source: str, line: int, row: Row) -> None:
        """Derive the checks for all rows from the first row, and record a problem if the columns of the first row are wrong."""
        chosen = matching(row, formats_of(self.method.name, self.text_field))
        judged = (*chosen.required, *self.method.optional) if chosen else ()
        known = {**COLUMNS, self.text_field: TEXT} if self.method.name == "sft" else COLUMNS
        self.first, self._place = row, f"{self.word} {line}"
        self._pictures = {*PICTURE_COLUMNS} if self.method.takes_pictures else set()
        self._optional = self._pictures - {"image"}  # rows may lack the column `images`
        self._checks = [(name, known[name]) for name in judged if name in row and name in known]
        self._chats = [name for name in judged if name in row and name in CHATS]
        self._turns = [name for name in TURN_COLUMNS if chosen and name in chosen.required]
        self._plain = all(isinstance(row[name], str) for name in self._turns)
        # GRPO and RLOO pass all columns to the reward functions.
        reads_all = chosen is None or self.method.loss == "policy"
        self._unread = [] if reads_all else [name for name in row if name not in judged]
        if wrong := columns_problem(tuple(row), self.method.name, self.text_field):
            usual = {*COLUMNS, *NEAR_NAMES, *(name for names in NEAR_NAMES.values() for name in names)}
            if self.cells and usual.isdisjoint(name.lower() for name in row):
                # The first line of the CSV file is a row, not the header.
                fix = "add a first line that names the columns, such as prompt,completion"
                wrong = replace(wrong, fix=fix)
            self.note(source, None, wrong)

    def _faults(self, row: Row) -> Iterator[Problem]:
        assert self.first is not None
        self.pictured |= any(row.get(name) for name in self._pictures)
        if row.keys() - self._optional != self.first.keys() - self._optional:
            lacking = [name for name in self.first if name not in row]
            added = [name for name in row if name not in self.first]
            differs = [f"lacks {quoted(lacking)}"] * bool(lacking) + [f"adds {quoted(added)}"] * bool(added)
            expected = f"the columns of {self._place}: {quoted(self.first)}"
            fix = "use the same columns in every row; write null in an optional column without a value"
            yield Problem(f"the row {' and '.join(differs)}", expected, fix)
            return
        faults = [
            (name, column, fault) for name, column in self._checks if (fault := column.fault(row[name]))
        ]
        for name, column, fault in faults:
            fix = REFILL if row[name] in (None, "", []) else column.fix
            yield Problem(f"column '{name}' {fault}", column.expected, fix)
        if not faults:
            for name in self._chats:
                yield from chat_problems(name, row[name])
            yield from message_problems(row, self._chats, self.method.name, self.method.takes_pictures)
            yield from self._turn_problems(row)

    def _turn_problems(self, row: Row) -> Iterator[Problem]:
        # The common messages of `chosen` and `rejected` become the prompt, except for a reward model.
        if self.method.loss != "reward" and not row.get("prompt") and not same_beginning(row):
            expected = "the same first messages in both columns, which become the prompt"
            fix = "write the question in both columns, or in a column 'prompt'"
            yield Problem("'chosen' and 'rejected' begin with different messages", expected, fix)
        if mixed := mixed_turns(row, self._turns):
            yield mixed
        elif self._turns and isinstance(row[self._turns[0]], str) != self._plain:
            kind, first = ("messages", "text") if self._plain else ("text", "messages")
            expected, fix = f"{first}, as on {self._place}", "write all rows as text, or all rows as messages"
            yield Problem(f"{kind} in {quoted(self._turns)}", expected, fix)

    def _merge_types(self, row: Row) -> Iterator[Problem]:
        """Merge the types of a row's cells into the types of the columns. Yield a problem if no type fits all rows."""
        for name, value in row.items():
            if name in self._pictures:
                self.shapes["images"] = ("list", PICTURE)
                continue
            before = self.shapes.setdefault(name, NULL)
            shape = STRING if type(value) is str else shape_of(value)
            if shape == before:
                continue
            after = merge(before, shape)
            if after == MIXED and self.cells:
                after = STRING
            elif after in _UNFIT and after != before:
                what, expected, fix = _UNFIT[str(after)]
                yield Problem(f"column '{name}' {what}", expected, fix)
            self.shapes[name] = after

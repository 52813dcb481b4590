"""Reads a file of another training program. For each name in the file, tables.yaml says whether it is translated, omitted or refused."""

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any, Literal, Self

import yaml

from isotype.core.errors import Problem
from isotype.core.names import listed
from isotype.data.locate import looks_like_path
from isotype.data.reading import PRESETS
from isotype.data.sharegpt import CALL, SPEAKERS

OFF = "off or empty"
"""The note on an argument whose value turns off a feature of the other program."""
NOT_HERE = "not read, because {} is not on this machine; all rows are assumed to have the maximum length"
Kind = Literal["a number above 0", "a list", "names with values", "text"]
_KINDS: Mapping[Kind, Any] = {
    "a number above 0": (int, float),
    "a list": list,
    "names with values": dict,
    "text": str,
}
_REMOVE = "remove it from the file to train without it"


@cache
def tables() -> dict[str, Any]:
    tables: dict[str, Any] = yaml.safe_load(
        Path(__file__).with_name("tables.yaml").read_text(encoding="utf-8")
    )
    return tables


def _words(text: str) -> dict[str, str]:
    pairs = (word.partition("=") for word in text.split())
    return {theirs: ours or theirs for theirs, _, ours in pairs}


@dataclass
class Reader:
    """Translates a file of another training program, or a part of the file, name by name.

    A name in the file is called settled when it has been translated, omitted with a note, or refused.

    Attributes:
        given: the values in the file, by name. A name in a group is written `group.name`.
        values: the translated values, by isotype's names.
        used: translated name -> isotype's names. There are no names if isotype always does what the translated name requests.
        notes: note on what isotype does instead -> the names that were omitted.
        trains: True if the data sets must be on this machine, because a training reads them.
    """

    table: str
    method: str
    folder: Path
    given: dict[str, Any]
    values: dict[str, Any] = field(default_factory=dict)
    used: dict[str, list[str]] = field(default_factory=dict)
    notes: dict[str, list[str]] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    trains: bool = True
    _settled: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, table: str, content: Mapping[str, Any], method: str, folder: Path) -> Self:
        given: dict[str, Any] = {}
        for name, value in content.items():
            grouped = isinstance(value, dict) and value and name in tables()[table]["groups"].split()
            given |= {f"{name}.{key}": item for key, item in value.items()} if grouped else {str(name): value}
        return cls(table, method, folder, {name: plain(value) for name, value in given.items()})

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of a name, or `default` if the file lacks the name or the value is empty."""
        value = self.given.get(name)
        return default if value is None or value in ("", [], {}) else value

    def typed(self, name: str, kind: Kind, default: Any) -> Any:
        """Return the value of a name, or `default` if the file lacks the name. Refuse a value that is not of `kind`."""
        value = self.get(name)
        if value is None or value is False:
            return default
        right = isinstance(value, _KINDS[kind]) and value is not True
        if right and (kind != "a number above 0" or value >= 0):
            return value or default
        if name not in self._settled:
            self.refuse(name, kind, "correct the value")
        return default

    def use(self, names: str, **ours: Any) -> None:
        """Record that `names` are translated into `ours`. Without `ours`, isotype always does what the names request."""
        self.values.update(ours)
        for name in self._unsettled(names):
            self.used[name] = list(ours)
            self._settled.add(name)

    def note(self, effect: str, names: str) -> None:
        for name in self._unsettled(names):
            self.notes.setdefault(OFF if self.get(name) in (None, False) else effect, []).append(name)
            self._settled.add(name)

    def refuse(self, what: str, expected: str, fix: str = _REMOVE) -> None:
        """Record that a name is refused. `what` is `NAME`, or `NAME: FAULT`."""
        name = what.partition(":")[0]
        shown = what if ":" in what else f"{name}: {_shown(self.given.get(name))}"
        self.problems.append(Problem(shown, expected, fix))
        self._settled.add(name)

    def absorb(self, inner: Self, prefix: str) -> None:
        """Add the results of `inner` (the reader of a part of the file), with `prefix` before each name."""
        for effect, names in inner.notes.items():
            self.notes.setdefault(effect, []).extend(f"{prefix}{name}" for name in names)
        self.used |= {f"{prefix}{name}": ours for name, ours in inner.used.items()}
        self.problems += [Problem(f"{prefix}{p.given}", p.expected, p.fix) for p in inner.problems]

    def apply_rules(self) -> None:
        """Apply the rules of the table to names whose meaning depends on other names."""
        for rule in tables()[self.table]["rules"]:
            names = rule.get("use", rule.get("names", ""))
            ours, more = self._filled(rule.get("as", {})), self._filled(rule.get("add", {}))
            if not all(self._holds(*condition) for condition in rule.get("if", {}).items()):
                continue
            if "refuse" in rule:
                self.refuse(rule["refuse"], rule["expected"], rule["fix"])
            elif "note" in rule:
                self.note(rule["note"], names)
                self.values = ours | self.values
            elif not ours or not ours.keys() & self.values.keys():
                for name, value in more.items():
                    was = self.values.get(name, type(value)())
                    ours[name] = was + value if isinstance(value, list) else was | value
                self.use(names, **ours)

    def finish(self) -> None:
        """Translate, omit or refuse each unsettled name. Drop values for which the method has no argument."""
        for name in self._unsettled(" ".join(self.given)):
            self._settle(name, self.given[name])
        self.values = tables()[self.table]["defaults"] | self.values
        by_method = tables()["of_methods"].items()
        others = [names.split() for names, of in by_method if self.method not in of.split()]
        for ours in [name for name in self.values if any(name in names for names in others)]:
            lost = self.values.pop(ours)
            for name in [name for name, meant in self.used.items() if ours in meant]:
                self.used[name].remove(ours)
                if not self.used[name]:
                    effect = f"not done; isotype {self.method} has no {ours}" if lost else OFF
                    self.notes.setdefault(effect, []).append(name)
                    del self.used[name]

    def text(self) -> str:
        """Return lines for the user, with the number of translated names, and the notes on omitted names."""
        lines = [f"  {', '.join(names)}: {effect}" for effect, names in self.notes.items() if effect != OFF]
        title = tables()[self.table]["title"]
        used = f"{len(self.used)} names in {title}'s file are used"
        return "\n".join([f"{used}; notes on other names:", *lines]) if lines else used

    def _settle(self, name: str, value: Any) -> None:
        table = tables()[self.table]
        ours, (kind, text) = _words(table["used"]).get(name), _entry(self.table, name)
        choices = _words(table["choices"].get(ours, ""))
        passes = table.get("passes") and self._similar(name, 1) != [name]
        if self.get(name) is None or (not value and ours is None and not passes):
            self.notes.setdefault(OFF, []).append(name)
        elif choices and str(value) not in choices:
            self.refuse(
                name,
                f"one of {', '.join(choices)}",
                "choose one of these values, because isotype has no other",
            )
        elif ours is not None:
            self.use(name, **{ours: choices.get(str(value), value)})
        elif kind == "refused" and value and not (value == 1 and name.endswith(("_size", "_degree"))):
            self.refuse(name, text)
        elif kind:
            effect = {"idle": text, "differs": f"not done; {text}"}.get(kind, OFF) if value else OFF
            self.notes.setdefault(effect, []).append(name)
        elif passes and not self._similar(name, 0.9):
            self.use(name, **{name: value})
        else:
            near = self._similar(name)
            fix = f"did you mean {near[0]}? Else remove it" if near else _REMOVE
            self.refuse(name, f"a name of {table['title']} that isotype translates", fix)

    def _similar(self, name: str, cutoff: float = 0.6) -> list[str]:
        """Return the name of the other program that is most similar to `name`, or an empty list."""
        table = tables()[self.table]
        ruled = " ".join(rule.get("use", rule.get("names", "")) for rule in table["rules"])
        known = [*_words(table["used"]), *ruled.split(), *(other for *_, other in _listed(self.table))]
        return difflib.get_close_matches(name, [other for other in known if "*" not in other], 1, cutoff)

    def _unsettled(self, names: str) -> list[str]:
        """Return the names in the file that match `names` (names or patterns) and are not settled yet."""
        patterns = names.split()
        left = (name for name in self.given if name not in self._settled)
        return [name for name in left if any(fnmatchcase(name, pattern) for pattern in patterns)]

    def _holds(self, name: str, wanted: Any) -> bool:
        if "*" in name:
            return any(fnmatchcase(item, name) for item in self.given)
        value = self.values.get(name[1:]) if name.startswith("=") else self.get(name)
        if wanted == "*":
            return value is not None and value is not False
        options = wanted if isinstance(wanted, list) else [wanted]
        return any(
            value is option if option is None or isinstance(option, bool) else value == self._filled(option)
            for option in options
        )

    def _filled(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {name: self._filled(item) for name, item in value.items()}
        if isinstance(value, list):
            return [self._filled(item) for item in value]
        if not isinstance(value, str) or not value.startswith("$"):
            return value
        name, _, other = value[1:].partition("|")
        return self.get(name, yaml.safe_load(other) if other else None)


def _listed(table: str) -> Iterator[tuple[str, str, str]]:
    for kind in ("idle", "differs", "refused"):
        for text, names in tables()[table][kind].items():
            yield from ((kind, text, name) for name in names.split())


def _entry(table: str, name: str) -> tuple[str, str]:
    """Return the entry of a name in the table: its kind (idle, differs or refused) and text, or ("", ""). Patterns are tried last."""
    entries = [entry for entry in _listed(table) if fnmatchcase(name, entry[2])]
    kind, text, _ = min(entries, key=lambda entry: entry[2] != name, default=("", "", ""))
    return kind, text


def plain(value: Any) -> Any:
    """Convert a number or boolean that YAML reads as text (`2e-5`, `"true"`). Return any other value unchanged."""
    if isinstance(value, str) and re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", value):
        return float(value) if re.search(r"[.eE]", value) else int(value)
    return {"true": True, "false": False}.get(value.lower(), value) if isinstance(value, str) else value


def _shown(value: Any) -> str:
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= 80 else f"{text[:77]}…"


FRAME = "not done; no words are added: a prompt is the instruction, an empty line and the input"
_NATIVE = {"messages": ["conversations"]}
_ALPACA = {name: list(sources) for name, sources in PRESETS["alpaca"].items()}


@dataclass
class Rows:
    """A data set that the file names.

    Attributes:
        kind: content of each row: `chat`, `turns` (a prompt and its answer, as text) or `text`.
        columns: maps isotype's column name to the columns of the data set that are joined into this column.
        name: configuration of the data set on the hub.
        split: the rows to train on, in the notation of `datasets` (`train[:10%]`).
        files: names of the files in `path` to read, or None for all files.
    """

    path: str
    kind: str
    columns: Mapping[str, list[str]]
    name: str | None = None
    split: str = "train"
    files: Any = None

    @property
    def renamed(self) -> dict[str, list[str]]:
        """Isotype's column name -> columns of the data set, for columns whose names differ from isotype's names."""
        renamed = {ours: theirs for ours, theirs in self.columns.items() if theirs != [ours]}
        return {} if renamed == _NATIVE else renamed

    def entry(self) -> dict[str, Any]:
        columns = {ours: theirs[0] if len(theirs) == 1 else theirs for ours, theirs in self.renamed.items()}
        split = None if self.split == "train" else self.split
        more = {"name": self.name, "split": split, "data_files": self.files, "columns": columns}
        return {"path": self.path, **{key: value for key, value in more.items() if value}}


def use_rows(reader: Reader, names: str, rows: Sequence[Rows], whole: str) -> None:
    """Translate the arguments `names` into `rows` (data sets). `whole`: the file's argument for loss on prompts."""
    paths = {row.path for row in rows if looks_like_path(row.path)}
    absent = sorted(path for path in paths if not Path(path).expanduser().exists())
    if absent and not reader.trains:
        reader.note(NOT_HERE.format(listed(absent)), names)
        rows = []
    columns = _columns_argument(rows[0].renamed) if rows else None
    if len(rows) > 1 or (
        rows and (rows[0].files or columns is None or not re.fullmatch(r"\w+", rows[0].split))
    ):
        reader.use(names, datasets=[row.entry() for row in rows])
    elif rows:
        split = None if rows[0].split == "train" else rows[0].split
        more = {"dataset_config": rows[0].name, "dataset_train_split": split, "columns": columns}
        reader.use(names, dataset_name=rows[0].path, **{key: value for key, value in more.items() if value})
    kinds, prompts = {row.kind for row in rows}, bool(reader.get(whole))
    if "turns" in kinds and "chat" not in kinds:
        reader.values["apply_chat_template"] = True
    if "chat" in kinds and reader.method == "sft" and not prompts:
        reader.use(whole, assistant_only_loss=True)
    elif kinds == {"turns"} and prompts:
        reader.use(whole, completion_only_loss=False)
    reader.use(f"{names} {whole}")


def _columns_argument(columns: Mapping[str, list[str]]) -> str | None:
    """Return the value of `--columns` for `columns`, or None if `--columns` cannot express them."""
    if columns == _ALPACA:
        return "alpaca"
    if any(len(theirs) > 1 or re.search("[,=]", theirs[0]) for theirs in columns.values()):
        return None
    return ",".join(f"{ours}={theirs[0]}" for ours, theirs in columns.items())


def same_roles(roles: Mapping[str, Any]) -> bool:
    """Return True if isotype maps the names of speakers to the same roles as `roles` (role -> names)."""
    return all(
        SPEAKERS.get(str(name).lower(), "").replace(CALL, "assistant") == role
        for role, names in roles.items()
        for name in (names if isinstance(names, list) else [names])
    )

"""The data sets of another trainer's file as isotype's arguments: one by `dataset_name`, else a `datasets` list."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from isotype.data.reading import PRESETS
from isotype.data.sharegpt import CALL, SPEAKERS
from isotype.train.dialects.reader import Reader

FRAME = "not done: words around an instruction and its input; they are the prompt, with an empty line between them"
_NATIVE = {"messages": ["conversations"]}
_ALPACA = {name: list(sources) for name, sources in PRESETS["alpaca"].items()}


@dataclass
class Rows:
    """One data set.

    Attributes:
        path: file, folder or hub id.
        kind: what a row holds: chat, turns (a prompt and what follows, as text), text.
        columns: the trainer's name -> the data set's, several of which are joined.
        name: of its configuration on the hub.
        split: what is trained on, as `datasets` writes it (`train[:10%]`).
        files: those of `path` that are read.
    """

    path: str
    kind: str
    columns: Mapping[str, list[str]]
    name: str | None = None
    split: str = "train"
    files: Any = None

    @property
    def renamed(self) -> dict[str, list[str]]:
        """The columns of which isotype has to be told the name."""
        told = {ours: theirs for ours, theirs in self.columns.items() if theirs != [ours]}
        return {} if told == _NATIVE else told

    def entry(self) -> dict[str, Any]:
        """As one of a `datasets` list."""
        columns = {ours: theirs[0] if len(theirs) == 1 else theirs for ours, theirs in self.renamed.items()}
        split = None if self.split == "train" else self.split
        more = {
            "path": self.path,
            "name": self.name,
            "split": split,
            "data_files": self.files,
            "columns": columns,
        }
        return {key: value for key, value in more.items() if value}


def use_rows(reader: Reader, names: str, rows: Sequence[Rows], whole: str) -> None:
    """Let the `names` of a file mean these data sets, and the name `whole` that prompts are learned, too."""
    columns = _pairs(rows[0].renamed) if rows else None
    if len(rows) > 1 or (
        rows and (rows[0].files or columns is None or not re.fullmatch(r"\w+", rows[0].split))
    ):
        reader.use(names, datasets=[each.entry() for each in rows])
    elif rows:
        split = None if rows[0].split == "train" else rows[0].split
        more = {"dataset_config": rows[0].name, "dataset_train_split": split, "columns": columns}
        reader.use(names, dataset_name=rows[0].path, **{key: value for key, value in more.items() if value})
    kinds, prompts = {each.kind for each in rows}, bool(reader.get(whole))
    if "turns" in kinds and "chat" not in kinds:
        reader.values["apply_chat_template"] = True
    if "chat" in kinds and reader.method == "sft" and not prompts:
        reader.use(whole, assistant_only_loss=True)
    elif kinds == {"turns"} and prompts:
        reader.use(whole, completion_only_loss=False)
    reader.use(f"{names} {whole}")


def _pairs(columns: Mapping[str, list[str]]) -> str | None:
    """Columns as one word of the command line; None where it cannot say them."""
    if columns == _ALPACA:
        return "alpaca"
    if any(len(theirs) > 1 or re.search("[,=]", theirs[0]) for theirs in columns.values()):
        return None
    return ",".join(f"{ours}={theirs[0]}" for ours, theirs in columns.items())


def speaks(roles: Mapping[str, Any]) -> bool:
    """Whether {role: its names in the rows} is how isotype reads those names."""
    return all(
        SPEAKERS.get(str(name).lower(), "").replace(CALL, "assistant") == role
        for role, names in roles.items()
        for name in (names if isinstance(names, list) else [names])
    )

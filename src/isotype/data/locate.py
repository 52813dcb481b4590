"""Find the files of a data set on this machine: a file, a directory, or a data set of the package."""

import difflib
import errno
import re
import stat
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path

from isotype.core.arguments import did_you_mean
from isotype.core.errors import DataError, Problem
from isotype.core.names import grouped, listed
from isotype.data import drawn
from isotype.data.columns import quoted
from isotype.data.pictures import SUFFIXES
from isotype.data.rows import METADATA, READERS, captioned

_SPECIAL = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}

EMBEDDED = "embedded:"

PARQUET = ".parquet"
_SUFFIXES = (*READERS, PARQUET)
_SPLIT_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_SPLIT_OF_WORD = {word: split for split, words in _SPLIT_WORDS.items() for word in words}
_OF_A_MODEL = ("model.safetensors", "model.safetensors.index.json", "adapter_config.json", "tokenizer.json")
# Files that `datasets` writes beside data and ignores itself.
_NOT_DATA = {"config.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}


@dataclass(frozen=True)
class LocalData:
    """A data set on this machine.

    Attributes:
        splits: maps a split to its files. If `saved` is True, maps a split to its directory.
        saved: True if `save_to_disk` wrote the data set.
        folder: the directory of the data set, or None for a file or an embedded data set.
    """

    name: str
    splits: Mapping[str, tuple[Path, ...]]
    saved: bool = False
    folder: Path | None = None

    def unread(self, wanted: Collection[str]) -> str | None:
        """Return a line that lists data files that are not read, in other splits or in inner folders; None without such files."""
        if self.folder is None:
            return None
        others = [path for split, paths in self.splits.items() if split not in wanted for path in paths]
        files = {path for paths in self.splits.values() for path in paths}
        below = [] if self.saved else _data_files(self.folder.glob("*/*"))
        deeper = [path for path in below if path not in files]
        names = [str(path.relative_to(self.folder)) for path in (*others, *deeper)]
        return f"{self.name}: not read: {listed(names)}" if names else None


def data_error(name: str, problems: Sequence[Problem]) -> DataError:
    return DataError.first_of(f"The data set '{name}' cannot be trained on", problems)


def embedded_root() -> Path:
    return Path(str(resources.files("isotype"))) / "data"


def looks_like_path(name: str) -> bool:
    """Return True if `name`, which is not an existing path, cannot be a hub id (`owner/name`)."""
    suffix = Path(name).suffix
    separators = name.count("/") + name.count("\\")
    return (
        suffix.lower() in _SUFFIXES
        or name.startswith((".", "/", "~", "\\"))
        or separators > 1
        or (separators == 1 and suffix[1:].isalpha())
    )


def find_local(name: str, test_split: str = "test") -> LocalData | None:
    """Return the local or embedded data set `name`, or None for a hub id. Raise DataError if the data set is unusable."""
    if name.startswith(EMBEDDED):
        return _find_embedded(name)
    path = Path(name).expanduser()
    mode = _mode(path)
    if isinstance(mode, Problem):
        raise data_error(name, [mode])
    if mode is not None:
        if not stat.S_ISDIR(mode):
            return _find_file(name, path, test_split)
        return replace(_find_in_directory(name, path), folder=path)
    if looks_like_path(name):
        raise data_error(name, [_missing(path)])
    return None


def _mode(path: Path) -> int | Problem | None:
    """Return the mode of a file or directory, the problem of an unusable `path`, or None if `path` does not exist."""
    expected = "a file or a directory"
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and path.is_symlink():
            loop = error.errno == errno.ELOOP
            where = "back to itself" if loop else f"to '{path.readlink()}', which does not exist"
            return Problem(f"'{path}' is a link that leads {where}", expected, "name the file itself")
        if isinstance(error, (FileNotFoundError, NotADirectoryError)):
            return None
        why = getattr(error, "strerror", None) or str(error)
        fix = "check the path and its permissions"
        return Problem(f"'{path}' cannot be read: {why}", expected, fix)
    if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
        return mode
    kind = _SPECIAL.get(stat.S_IFMT(mode), "no file")
    fix = "write the data into a file first, because a run reads the data several times"
    return Problem(f"'{path}' is {kind}", expected, fix)


def _missing(path: Path) -> Problem:
    missing, expected = f"there is no file or directory '{path}'", "a file or directory that exists"
    fix = f"'{path.parent}' does not exist either, so check the beginning of the path"
    if path.parent.is_dir():
        names = sorted(item.name for item in path.parent.iterdir() if not item.name.startswith("."))
        holds = f"'{path.parent}' holds {quoted(names)}"
        # Names are compared without suffixes, because equal suffixes would make all names similar.
        stems = {Path(name).stem: name for name in sorted(names, key=lambda name: name.endswith(path.suffix))}
        fix = did_you_mean(path.stem, stems, holds, shown=lambda stem: repr(str(path.with_name(stems[stem]))))
    return Problem(missing, expected, fix)


def _find_embedded(name: str) -> LocalData:
    root = embedded_root()
    names = sorted({file.parent.name for file in root.glob("*/*.jsonl")} | {drawn.NAME})
    inner = name.removeprefix(EMBEDDED)
    if inner == drawn.NAME:
        return _find_in_directory(name, drawn.shapes_folder())
    if inner in names:
        return _find_in_directory(name, root / inner)
    close = difflib.get_close_matches(inner, names, n=1) or names
    fix = f"--dataset_name {EMBEDDED}{close[0]}" if close else "name a local file instead"
    what = f"no embedded data set is called '{inner}'"
    raise data_error(name, [Problem(what, f"one of {quoted(names)}", fix)])


def _find_file(name: str, path: Path, test_split: str) -> LocalData:
    if path.suffix.lower() not in _SUFFIXES:
        unpack = path.suffix.lower() in (".gz", ".bz2", ".xz", ".zst", ".zip", ".tar")
        fix = "unpack the file first" if unpack else "convert the file to JSON lines or parquet"
        file = f"isotype does not read this kind of file: '{path.name}'"
        raise data_error(name, [Problem(file, f"a file ending in {', '.join(_SUFFIXES)}", fix)])
    splits = {"train": (path,)}
    siblings = [
        item
        for item in sorted(path.parent.iterdir(), key=lambda item: (item.suffix != path.suffix, item.name))
        if item.stem == test_split and item.suffix.lower() in _SUFFIXES and item != path and item.is_file()
    ]
    if siblings and test_split != "train":
        splits[test_split] = (siblings[0],)
    return LocalData(name, splits)


def _split_word(stem: str) -> str | None:
    words = re.split(r"[-._ 0-9]+", stem.lower())
    return next((_SPLIT_OF_WORD[word] for word in words if word in _SPLIT_OF_WORD), None)


def _find_in_directory(name: str, folder: Path) -> LocalData:
    if (folder / "dataset_dict.json").is_file():
        saved = sorted(item for item in folder.iterdir() if (item / "state.json").is_file())
        return LocalData(name, {item.name: (item,) for item in saved}, saved=True)
    if (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file():
        return LocalData(name, {"train": (folder,)}, saved=True)
    if any((folder / file).is_file() for file in _OF_A_MODEL):
        directory = f"the directory '{folder}' holds a model: {quoted(sorted(item.name for item in folder.iterdir()))}"
        fix = f"name the model in --model_name_or_path {name}, and the data in --dataset_name"
        raise data_error(name, [Problem(directory, "a directory of data", fix)])
    files = _data_files(folder.glob("*")) or _data_files(folder.glob("*/*"))
    if not files:
        names = sorted(item.name for item in folder.iterdir())
        expected = f"files ending in {', '.join(_SUFFIXES)}, or a data set that save_to_disk wrote"
        fix = f"name a directory with such files; this directory holds {quoted(names)}"
        if any(Path(file).suffix.lower() in SUFFIXES for file in names):
            fix = "write a text for each image: cat.txt for cat.png, or metadata.jsonl with 'file_name' and 'text'"
        fix = fix if names else "the directory is empty"
        raise data_error(name, [Problem(f"the directory '{folder}' holds no data", expected, fix)])
    inside = {path: _split_word(path.parent.name) if path.parent != folder else None for path in files}
    words = {path: (None if captioned(path) else _split_word(path.stem)) or inside[path] for path in files}
    if not any(words.values()):
        return LocalData(name, {"train": tuple(files)})
    splits = grouped(files, lambda path: words[path] or (path.parent.name if captioned(path) else path.stem))
    return LocalData(name, {split: tuple(paths) for split, paths in splits.items()})


def is_data_file(path: Path) -> bool:
    """Return True if isotype reads files with this name as data. The file does not have to exist."""
    return path.suffix.lower() in _SUFFIXES and path.name not in _NOT_DATA


def _data_files(paths: Iterable[Path]) -> list[Path]:
    """Return the data files in `paths`. Raise DataError if a file cannot be used, such as a pipe or a broken link."""
    data = filter(is_data_file, paths)
    named = sorted(f for f in data if not any(part.startswith(".") for part in (f.name, f.parent.name)))
    modes = {path: _mode(path) for path in named}
    problems = [mode for mode in modes.values() if isinstance(mode, Problem)]
    if problems:
        raise data_error(str(named[0].parent), problems)
    files = [path for path, mode in modes.items() if isinstance(mode, int) and stat.S_ISREG(mode)]
    # In a folder of images with metadata or captions, other text files only describe the data set.
    if metadata := [path for path in files if path.stem.lower() == METADATA]:
        return metadata
    captions = [path for path in files if captioned(path)]
    return captions if captions and all(path.suffix.lower() == ".txt" for path in files) else files


def splits_problems(name: str, splits: Iterable[str], wanted: Sequence[str]) -> list[Problem]:
    """Return a problem for each wanted split that does not exist. The first wanted split is the training split."""
    have, problems = sorted(splits), []
    for position, split in enumerate(wanted):
        if split in have:
            continue
        what = f"'{name}' has no split '{split}'; its splits are {quoted(have)}"
        expected = "a split for the evaluation, because evaluation is on"
        fix = "--dataset_test_split NAME with one of its splits, or --eval_strategy no"
        if position == 0:
            expected = "the split to train on"
            fix = f"--dataset_train_split {(difflib.get_close_matches(split, have, n=1) or have)[0]}"
        problems.append(Problem(what, expected, fix))
    return problems

"""Readers of the rows in text files (JSON, JSON lines, CSV, TSV, plain text), with line numbers.

A reader yields (line, row), or (line, `Problem`) for an unreadable row. The same readers check a file and build the data
set. Blank lines and a byte order mark are skipped.
"""

import codecs
import csv
import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn

from isotype.core.errors import Problem
from isotype.core.names import plural
from isotype.data.pictures import PICTURE_COLUMNS, SUFFIXES
from isotype.data.placed import CAPTIONS
from isotype.data.reading import Reading

Record = tuple[int, Any]

LONGEST_LINE = 1 << 28
"""Maximum bytes in a line. A tokenizer needs about a hundred times as much memory as the text."""
_FEW_NULS = 1 << 12
_WHOLE = (".json",)  # suffixes of files whose lines are not examples
_NO_TEXT_FIX = "save the file in UTF-8; to convert UTF-16 without a byte order mark: iconv -f UTF-16LE -t UTF-8 OLD > NEW"
_UNPACK = "unpack the file first, for example: {} OLD > NEW"
_KINDS = (
    (b"\x1f\x8b", "a gzip archive", _UNPACK.format("gunzip -c")),
    (b"BZh", "a bzip2 archive", _UNPACK.format("bunzip2 -c")),
    (b"\xfd7zXZ\0", "an xz archive", _UNPACK.format("unxz -c")),
    (b"\x28\xb5\x2f\xfd", "a zstandard archive", _UNPACK.format("zstd -dc")),
    (b"PK\x03\x04", "a zip archive", _UNPACK.format("unzip -p")),
    (b"PAR1", "a parquet file", "rename the file with the suffix .parquet"),
    (b"ARROW1", "an Arrow file", "convert the file to parquet"),
    (b"SQLite format 3\0", "a SQLite database", "write the rows as JSON lines"),
    (b"\x89HDF\r\n", "an HDF5 file", "write the rows as JSON lines"),
)  # fmt: skip

_BLANK = " \t\r\n"
_SPACE = re.compile(r"[ \t\r\n]*")


def digest_or_problem(path: Path) -> str | Problem:
    """Return the hex digest of a file, or a problem if the file is not UTF-8 text."""
    digest = hashlib.blake2b(digest_size=16)
    limit = -1 if path.suffix.lower() in _WHOLE else LONGEST_LINE + 1
    offset = 0
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(iter(partial(file.readline, limit), b""), 1):
                if offset == 0 and (other := _other_kind(raw)):
                    return other
                if (offset == 0 and b"\0" in raw[:2]) or 2 * raw.count(b"\0") > max(len(raw), _FEW_NULS):
                    what = f"NUL bytes from offset {offset + raw.index(bytes(1))} on"
                    return Problem(what, "a text file in UTF-8", _NO_TEXT_FIX)
                if len(raw) == limit:
                    what = f"line {number} is longer than {LONGEST_LINE >> 20} MiB"
                    expected = "examples for which a tokenizer has enough memory"
                    return Problem(what, expected, "split the line into several examples")
                raw.decode()
                digest.update(raw)
                offset += len(raw)
    except UnicodeDecodeError as error:
        return _not_utf8(offset + error.start, error.object[error.start], "CP1252")
    except OSError as error:
        return unreadable(error)
    return digest.hexdigest()


def _other_kind(raw: bytes) -> Problem | None:
    """Return a problem if the first bytes of a file show a binary or compressed format, else None."""
    if raw.startswith((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)):
        return _not_utf8(0, raw[0], "UTF-32")
    if raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return _not_utf8(0, raw[0], "UTF-16")
    for mark, kind, fix in _KINDS:
        if raw.startswith(mark):
            return Problem(f"the file is {kind}, despite its name", "a text file in UTF-8", fix)
    return None


def unreadable(error: OSError) -> Problem:
    return Problem(
        f"cannot be read: {error.strerror}", "a file that you are allowed to read", "check its permissions"
    )


def _not_utf8(offset: int, byte: int, guess: str) -> Problem:
    position = f"byte 0x{byte:02x} at offset {offset} is not UTF-8"
    fix = f"convert the file, for example: iconv -f {guess} -t UTF-8 OLD > NEW"
    return Problem(position, "a text file in UTF-8", fix)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")


def _without_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object. Raise ValueError if a key occurs twice, because Python would keep only the last value."""
    content = dict(pairs)
    if len(content) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(
            f"the key {next(key for key in keys if keys.count(key) > 1)!r} occurs twice in an object"
        )
    return content


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, object_pairs_hook=_without_repeated_keys)


def _excerpt(text: str, at: int) -> str:
    first = text.rfind("\n", 0, at) + 1
    last = text.find("\n", at) if "\n" in text[at:] else len(text)
    start, end = max(first, at - 20), min(last, at + 20)
    return repr("…" * (start > first) + text[start:end].rstrip("\r") + "…" * (end < last))


def _not_json(text: str, error: ValueError | RecursionError, expected: str) -> Problem:
    fix = "fix the line, or write the file with a JSON library"
    if isinstance(error, RecursionError):
        return Problem("not JSON: its lists or objects are nested too deeply", expected, fix)
    if not isinstance(error, json.JSONDecodeError):
        return Problem(f"not JSON: {error}", expected, fix)
    position = f"not JSON at column {error.colno}: {_excerpt(text, error.pos)}"
    return Problem(position, f"{expected} (parser: {error.msg})", fix)


def _lone_surrogate(text: str, value: object) -> Problem | None:
    """Return a problem if a text contains a lone surrogate, which is half of a character and cannot be encoded in UTF-8; else None."""
    if "\\ud" not in text and "\\uD" not in text:
        return None
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        what = f"\\u{ord(error.object[error.start]):04x} is half of a character"
        return Problem(what, "whole characters", "remove this half, or write both halves of the character")
    return None


def read_json(path: Path) -> Iterator[Record]:
    """Yield the JSON objects of a file. A file that begins with `[` is an array. In other files, each line is an object."""
    with path.open(encoding="utf-8-sig", newline="\n") as file:
        lines = ((number, line) for number, line in enumerate(file, 1) if line.strip(_BLANK))
        first = next(lines, None)
        if first is None:
            return
        if first[1].lstrip(_BLANK).startswith("["):
            yield from _json_array(path.read_text(encoding="utf-8-sig"))
            return
        for number, line in chain([first], lines):
            yield number, _json_line(line)
            if line.strip(_BLANK) == "{":
                return  # the object has several lines, and each of them would be reported again


def _json_line(line: str) -> Any:
    """Return the JSON value in a line, or the problem with the line."""
    try:
        value = _DECODER.decode(line)
        return _lone_surrogate(line, value) or value
    except (ValueError, RecursionError) as error:
        if line.strip(_BLANK) == "{":
            fix = "write each object on one line, or all objects in one array: [{…}, {…}]"
            return Problem("the object extends over several lines", "one JSON object per line", fix)
        return _not_json(line, error, "one JSON object per line")


def _json_array(text: str) -> Iterator[Record]:
    line, counted, at = 1, 0, _skip(text, text.index("[") + 1)
    try:
        while text[at : at + 1] != "]":
            line, counted = line + text.count("\n", counted, at), at
            value, end = _DECODER.raw_decode(text, at)
            yield line, _lone_surrogate(text[at:end], value) or value
            at = _skip(text, end)
            if text[at : at + 1] == ",":
                at = _skip(text, at + 1)
            elif text[at : at + 1] != "]":
                raise json.JSONDecodeError("Expecting ',' or ']'", text, at)
        if (end := _skip(text, at + 1)) < len(text):
            raise json.JSONDecodeError("Extra data", text, end)
    except (ValueError, RecursionError) as error:
        yield getattr(error, "lineno", line), _not_json(text, error, "an array of JSON objects")


def _skip(text: str, at: int) -> int:
    space = _SPACE.match(text, at)
    return space.end() if space else at


def read_csv(path: Path, delimiter: str = ",") -> Iterator[Record]:
    """Yield the rows of a CSV file. All cells are text. A row that extends over several lines has the number of its first line."""
    # By default a cell has at most 131072 characters in the whole process; a book is longer.
    csv.field_size_limit(max(csv.field_size_limit(), 2**31 - 1))
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, delimiter=delimiter, strict=True)
        header: list[str] = []
        start = 1
        try:
            for cells in reader:
                line, start = start, reader.line_num + 1
                if not cells:
                    continue
                if not header:
                    header = [name or f"Unnamed: {i}" for i, name in enumerate(cells)]
                    repeated = sorted({name for name in header if header.count(name) > 1})
                    if repeated:
                        what = f"the header names {', '.join(map(repr, repeated))} more than once"
                        fix = "rename or remove the repeated columns"
                        yield line, Problem(what, "a different name for each column", fix)
                        return
                elif len(cells) == len(header):
                    yield line, dict(zip(header, cells, strict=True))
                else:
                    fix = 'put cells that contain the separator or quotes in quotes: "a, ""b"""'
                    what = plural(len(cells), "cell")
                    yield line, Problem(what, f"{len(header)} cells, one for each column of the header", fix)
        except csv.Error as error:
            fix = 'quote cells as "…" and double the quotes inside of a cell: ""'
            yield start, Problem(f"not CSV: {error}", "comma-separated values (RFC 4180)", fix)


def read_text(path: Path, lines: bool = False) -> Iterator[Record]:
    """Yield the file as a row with the column `text`. If `lines` is True, yield each line as such a row. Blank texts are skipped."""
    with path.open(encoding="utf-8-sig") as file:
        for number, text in enumerate((line.rstrip("\n") for line in file) if lines else [file.read()], 1):
            if text.strip():
                yield number, {"text": text}


READERS: dict[str, Callable[[Path], Iterator[Record]]] = {
    ".json": read_json,
    ".jsonl": read_json,
    ".ndjson": read_json,
    ".csv": read_csv,
    ".tsv": partial(read_csv, delimiter="\t"),
    ".txt": read_text,
}
CELL_SUFFIXES = (".csv", ".tsv")
METADATA = "metadata"
"""File name of the metadata in a folder of images, as in `datasets`."""
_FILE_NAMES = {
    **dict.fromkeys(("file_name", "image_file_name"), "image"),
    **dict.fromkeys(("file_names", "image_file_names", "images_file_names"), "images"),
}
_PICTURE_CELLS = frozenset({*PICTURE_COLUMNS, *CAPTIONS, *_FILE_NAMES})

_TRUTH = {"true": True, "false": False}
_INTEGER = re.compile(r"-?(0|[1-9][0-9]{0,17})")
_FLOAT = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")


def cell_value(cell: str) -> bool | int | float | str | None:
    """Convert a CSV cell to None, a bool, a number or text."""
    if not cell:
        return None
    if cell.lower() in _TRUTH:
        return _TRUTH[cell.lower()]
    if _INTEGER.fullmatch(cell):
        return int(cell)
    return float(cell) if _FLOAT.fullmatch(cell) else cell


def read_rows(
    path: Path, textual: frozenset[str], reading: Reading, names: Counter[str] | None = None
) -> Iterator[Record]:
    """Yield (line, row) of one file, or (line, Problem) for an unreadable row.

    In a CSV file, cells of the columns `textual` stay text, and `cell_value` converts all other cells. `reading` then
    converts the rows to the trainer's format. `names` counts speakers (see `Reading.apply`).
    """
    suffix = path.suffix.lower()
    rows = read_text(path, lines=True) if reading.lines and suffix == ".txt" else READERS[suffix](path)
    if suffix in CELL_SUFFIXES:
        textual |= frozenset() if reading.columns is None else reading.columns.sources
        textual |= _PICTURE_CELLS if reading.takes_pictures else frozenset()
        rows = _valued(rows, textual)
    if reading.takes_pictures:
        rows = _with_pictures(path, rows)
    at = path.parent
    return ((line, reading.apply(row, names, at) if isinstance(row, dict) else row) for line, row in rows)


def _valued(rows: Iterable[Record], textual: frozenset[str]) -> Iterator[Record]:
    for line, row in rows:
        if isinstance(row, dict):
            row = {name: cell if name in textual else cell_value(cell) for name, cell in row.items()}
        yield line, row


def _with_pictures(path: Path, rows: Iterator[Record]) -> Iterator[Record]:
    """Yield a file's rows with their images. The image of a caption is in the folder of the caption file."""
    if picture := captioned(path):
        yield from ((line, {"image": picture.name, "caption": row["text"].strip()}) for line, row in rows)
        return
    named = _FILE_NAMES if path.stem.lower() == METADATA else {}
    cells = path.suffix.lower() in CELL_SUFFIXES
    for line, row in rows:
        if isinstance(row, dict):
            if named:
                row = {named.get(name, name): value for name, value in row.items()}
            if cells and str(row.get("images", "")).startswith("["):
                cell = _json_line(row["images"])
                row = cell if isinstance(cell, Problem) else row | {"images": cell}
        yield line, row


def captioned(path: Path) -> Path | None:
    """Return the image whose path differs only in the suffix from the path of the caption (.txt); None without one."""
    if path.suffix.lower() != ".txt":
        return None
    return next((at for suffix in SUFFIXES if (at := path.with_suffix(suffix)).is_file()), None)


def generate(
    paths: Sequence[str], textual: tuple[str, ...], columns: tuple[str, ...], reading: Reading
) -> Iterator[dict[str, Any]]:
    """Yield the rows of checked files for `Dataset.from_generator`. `datasets` may divide the list `paths` into shards."""
    for path in paths:
        for _, row in read_rows(Path(path), frozenset(textual), reading):
            yield {name: row.get(name, []) if name == "images" else row[name] for name in columns}

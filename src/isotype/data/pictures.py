"""A picture of a row: read into a path or bytes, its header checked before training."""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from isotype.core.console import Bar
from isotype.core.errors import Problem, first_line
from isotype.data.cells import describe

PICTURE_COLUMNS = ("image", "images")
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")
NEEDS_PILLOW = Problem(
    "pictures, and the package pillow is not installed",
    "pillow, which reads them",
    "pip install 'isotype[vision]'",
)
_READABLE = "a picture that can be read"
_FIX = "correct the path, or write the file again"
_FORMS = "a path, base64 text, a data URL, or {bytes, path}"
_SHORTEST = 32
"""Minimum characters of base64 text; shorter text is a path."""
_THREADS = 16
"""More than there are cores, since they wait for files."""

Stored = str | bytes | Mapping[str, Any]
"""A path, the bytes of a file, or both as `datasets` stores them: {bytes, path}."""


def stored(value: Any, folder: Path | None = None) -> Stored | Problem:
    """Return a picture as a path or bytes, or its problem.

    Args:
        value: a path, base64 text, a data URL, a `file://` URL, bytes, or an object with one of these.
        folder: base of relative paths; if the file is not there, the working directory.
    """
    if isinstance(value, Mapping):
        return _of_object(value, folder)
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str) or not value:
        return Problem(f"a picture is {describe(value)}", _FORMS, "write its path")
    if value.startswith(("http://", "https://")):
        what = f"the picture '{_short(value)}' is on the network"
        return Problem(what, "pictures on this machine", "download it first, and write its path")
    if value.startswith("data:"):
        return _decoded(value.partition("base64,")[2], value)
    path = Path(value.removeprefix("file://")).expanduser()
    places = [path] if folder is None or path.is_absolute() else [folder / path, path]
    try:
        at = next((place for place in places if place.is_file()), None)
    except (OSError, ValueError):  # longer than a path can be
        return _decoded(value, value)
    if at is None and len(value) >= _SHORTEST and path.suffix.lower() not in SUFFIXES:
        content = _decoded(value, value)
        if isinstance(content, bytes):
            return content
    return str((at or places[0]).absolute())


def _of_object(value: Mapping[str, Any], folder: Path | None) -> Stored | Problem:
    if isinstance(value.get("bytes"), bytes):
        return value
    for key in ("path", "url", "image", "image_url", "base64", "data", "source", "bytes"):
        if value.get(key) is not None:
            return stored(value[key], folder)
    return Problem(f"a picture is {describe(value)}", _FORMS, "write its path")


def _decoded(text: str, shown: str) -> bytes | Problem:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        return Problem(f"the picture '{_short(shown)}' cannot be read: {first_line(error)}", _READABLE, _FIX)


def _short(value: str, most: int = 80) -> str:
    return value if len(value) <= most else value[: most - 3] + "…"


def picture_problem(picture: Stored, *, whole: bool = False) -> Problem | None:
    """Return the problem of a picture that cannot be read, None if it can; `whole`: decode it, else check its header."""
    size = _read(picture, (lambda opened: opened.load()) if whole else (lambda opened: opened.verify()))
    return size if isinstance(size, Problem) else None


def size_of(picture: Stored) -> tuple[int, int] | Problem:
    """Return (width, height) of a picture in pixels as displayed, from its header; or the problem of reading it."""
    return _read(picture, lambda opened: None)


def _read(picture: Stored, check: Callable[[Any], object]) -> tuple[int, int] | Problem:
    if find_spec("PIL") is None:
        return NEEDS_PILLOW
    from PIL import ExifTags, Image, UnidentifiedImageError

    content: Any = picture
    if isinstance(picture, Mapping):
        content = picture["path"] if picture.get("bytes") is None else picture["bytes"]
    shown = "" if isinstance(content, bytes) else f" '{_short(str(content), 1000)}'"
    try:
        with Image.open(io.BytesIO(content) if isinstance(content, bytes) else content) as opened:
            width, height = opened.size
            # For the tags of a PNG file pillow would decode it.
            tags = {} if opened.format == "PNG" else opened.getexif()
            turned = tags.get(ExifTags.Base.Orientation, 1) in (5, 6, 7, 8)
            check(opened)
    except FileNotFoundError:
        return Problem(f"there is no picture{shown}", _READABLE, _FIX)
    except UnidentifiedImageError:
        what = f"the picture{shown} cannot be read: no kind of picture that pillow knows"
        return Problem(what, _READABLE, _FIX)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        return Problem(f"the picture{shown} cannot be read: {first_line(error)}", _READABLE, _FIX)
    return (height, width) if turned else (width, height)


def broken(paths: Sequence[str]) -> Iterator[tuple[str, Problem]]:
    """Yield (path, problem) of each picture whose header cannot be read: in a thread pool, with a bar."""
    bar = Bar("reading the headers of pictures")
    bar.total = len(paths)
    pool = ThreadPoolExecutor(_THREADS)
    try:
        for path, problem in zip(paths, pool.map(picture_problem, paths), strict=True):
            bar.advance()
            if problem is not None:
                yield path, problem
    finally:
        bar.close()
        pool.shutdown(cancel_futures=True)


def picture_columns(rows: Any) -> list[str]:
    """Return the columns of pictures in a data set or split; of a stream without column names, those of its first row."""
    names: Iterable[str] = getattr(rows, "column_names", None) or next(iter(rows), {})
    present = {*names}
    return [name for name in PICTURE_COLUMNS if name in present]


def broken_rows(rows: Any, *, whole: bool = False) -> Iterator[tuple[int, Problem]]:
    """Yield (row, problem) of the pictures of a `datasets.Dataset`, as `picture_problem` finds them."""
    read = partial(picture_problem, whole=whole)
    names = picture_columns(rows)
    bar = Bar("reading pictures")
    bar.total = len(rows)
    with ThreadPoolExecutor(_THREADS) as pool:
        start = 0
        # Arrow gives the stored values, undecoded.
        for table in rows.select_columns(names).with_format("arrow").iter(batch_size=64):
            rows_of_table = enumerate(table.to_pylist(), start)
            found = [(at, each) for at, row in rows_of_table for each in pictures_in(row)]
            for (at, _), problem in zip(found, pool.map(read, (each for _, each in found)), strict=True):
                if problem is not None:
                    yield at, problem
            start += table.num_rows
            for _ in range(table.num_rows):
                bar.advance()
    bar.close()


def data_url(picture: Any, side: int = 256) -> str:
    """Return a decoded picture as a data URL, at most `side` pixels wide and high."""
    small = picture.copy()
    small.thumbnail((side, side))
    stream = io.BytesIO()
    plain = small.size == picture.size and small.width * small.height <= 64 * 64
    small.convert("RGB").save(stream, "png" if plain else "jpeg", quality=80)
    return f"data:image/{'png' if plain else 'jpeg'};base64,{base64.b64encode(stream.getvalue()).decode()}"


def row_without_pictures(rows: Any) -> int | None:
    """Return the index of the first row of a `datasets.Dataset` without a picture, None if there is none; no picture is decoded."""
    at = 0
    for table in rows.with_format("arrow").iter(1000):
        columns = [table.column(name) for name in PICTURE_COLUMNS if name in table.column_names]
        for number in range(table.num_rows):
            cells = [column[number] for column in columns]
            if not any(cell.is_valid and len(cell) for cell in cells):
                return at + number
        at += table.num_rows
    return None


def pictures_in(row: Mapping[str, Any]) -> list[Any]:
    """Return the pictures in the columns of a row, unchanged."""
    cells: Iterable[Any] = (row[name] for name in PICTURE_COLUMNS if row.get(name) is not None)
    return [each for cell in cells for each in (cell if isinstance(cell, list) else [cell])]

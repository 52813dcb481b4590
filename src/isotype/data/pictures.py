"""Images in the rows of a data set: where they are stored, and checks of their files before training."""

import base64
import binascii
import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from operator import methodcaller
from pathlib import Path
from typing import Any

from isotype.core.console import with_bar
from isotype.core.errors import Problem, first_line
from isotype.data.cells import describe

PICTURE_COLUMNS = ("image", "images")
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")
NEEDS_PILLOW = Problem(
    "the rows have images, but the package pillow is not installed",
    "pillow, which reads images",
    "pip install 'isotype[vision]'",
)
_READABLE = "a readable image"
_FIX = "correct the path, or write the file again"
_FORMS = "a path, base64 text, a data URL, or {bytes, path}"
_SHORTEST = 32
"""Minimum number of characters in base64 text. A shorter text is a path."""
_THREADS = 16
"""Number of threads that read images. More threads than cores are useful, because threads mostly wait for files."""

Stored = str | bytes | Mapping[str, Any]
"""An image: its path, the bytes of its file, or {bytes, path} as `datasets` stores it."""


def stored(value: Any, folder: Path | None = None) -> Stored | Problem:
    """Return an image of a row as a path, bytes or {bytes, path}, or return the problem with the image.

    Args:
        value: a path, base64 text, a data URL, a `file://` URL, bytes, or an object with one of these.
        folder: folder to which paths are relative. If a path does not exist there, it is relative to the working directory.
    """
    if isinstance(value, Mapping):
        return _of_object(value, folder)
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str) or not value:
        return Problem(f"an image is {describe(value)}", _FORMS, "write its path")
    if value.startswith(("http://", "https://")):
        what = f"the image '{_short(value)}' is on the network"
        return Problem(what, "images on this machine", "download the image, and write its path")
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
    return Problem(f"an image is {describe(value)}", _FORMS, "write its path")


def _decoded(text: str, shown: str) -> bytes | Problem:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        return Problem(f"the image '{_short(shown)}' cannot be read: {first_line(error)}", _READABLE, _FIX)


def _short(value: str, most: int = 80) -> str:
    return value if len(value) <= most else value[: most - 3] + "…"


def picture_problem(picture: Stored, *, whole: bool = False) -> Problem | None:
    """Return the problem of an unreadable image, or None. Unless `whole` is True, only the header is read."""
    size = _read(picture, methodcaller("load" if whole else "verify"))
    return size if isinstance(size, Problem) else None


def size_of(picture: Stored) -> tuple[int, int] | Problem:
    """Return an image's displayed (width, height) in pixels, read from its header, or the problem with the image."""
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
            # Pillow decodes the whole image to read the tags of a PNG file.
            tags = {} if opened.format == "PNG" else opened.getexif()
            turned = tags.get(ExifTags.Base.Orientation, 1) in (5, 6, 7, 8)
            check(opened)
    except FileNotFoundError:
        return Problem(f"there is no image{shown}", _READABLE, _FIX)
    except UnidentifiedImageError:
        return Problem(f"the image{shown} cannot be read: no format that pillow reads", _READABLE, _FIX)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        return Problem(f"the image{shown} cannot be read: {first_line(error)}", _READABLE, _FIX)
    return (height, width) if turned else (width, height)


def broken(paths: Sequence[str]) -> Iterator[tuple[str, Problem]]:
    with ThreadPoolExecutor(_THREADS) as pool:
        problems = with_bar(pool.map(picture_problem, paths), "reading the headers of images", len(paths))
        for path, problem in zip(paths, problems, strict=True):
            if problem is not None:
                yield path, problem


def picture_columns(rows: Any) -> list[str]:
    """Return the image columns of a data set or split. If the column names of a stream are unknown, read the first row."""
    names: Iterable[str] = getattr(rows, "column_names", None) or next(iter(rows), {})
    present = {*names}
    return [name for name in PICTURE_COLUMNS if name in present]


def data_url(picture: Any) -> str:
    """Return a decoded image as a data URL, scaled down to at most 256 pixels in width and height."""
    small = picture.copy()
    small.thumbnail((256, 256))
    stream = io.BytesIO()
    plain = small.size == picture.size and small.width * small.height <= 64 * 64
    small.convert("RGB").save(stream, "png" if plain else "jpeg", quality=80)
    return f"data:image/{'png' if plain else 'jpeg'};base64,{base64.b64encode(stream.getvalue()).decode()}"


def pictures_in(row: Mapping[str, Any]) -> list[Any]:
    cells: Iterable[Any] = (row[name] for name in PICTURE_COLUMNS if row.get(name) is not None)
    return [picture for cell in cells for picture in (cell if isinstance(cell, list) else [cell])]

"""Files that are whole or not there, after a power cut too: built aside, brought to the disk, renamed into place.

A text by `write_whole`. Of a directory every instant between two of these steps leaves the new files or the old ones; `recover` finishes or
undoes what a killed process left. The names that a directory may hold in between:

- `.isotype-saving/`: what is being built; worth nothing until it is published.
- `.NAME.isotype-old/`: the whole former NAME, set aside while the new one takes its place.
- `.NAME.isotype-deleted/`: being deleted; worth nothing.
- `.isotype-publishing/`: whole files on their way into the directory itself.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterator
from itertools import chain, count
from pathlib import Path

from isotype.core.terminal import as_typed

STAGING = ".isotype-saving"
"""Folder inside the output directory in which files are built before they are renamed into place."""

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})
"""errno of a full disk and of a used-up quota."""

_PARTLY = re.compile(r"\d+ requested and \d+ written")
_PUBLISHING = ".isotype-publishing"
_OLD = ".isotype-old"
_DELETED = ".isotype-deleted"


def fsync_tree(directory: Path) -> None:
    """Bring every file below `directory`, and the names themselves, to the disk."""
    for root, _, files in os.walk(directory):
        for name in files:
            bring_to_disk(Path(root) / name)
        bring_to_disk(Path(root))


def publish_directory(built: Path, final: Path) -> None:
    """Rename `built` to `final`, in place of an older `final`.

    Where it cannot be brought to the disk, all is as before. What an interrupt finds renamed stays: it is whole, and somebody
    may have read it already.
    """
    old = final.with_name(f".{final.name}{_OLD}")
    published = False
    try:
        if final.exists():
            if old.exists():
                discard(old)
            final.rename(old)
        built.rename(final)
        published = True
        bring_to_disk(final.parent)
    except BaseException as error:
        if published and isinstance(error, OSError):
            final.rename(built)
        if old.exists() and not final.exists():
            old.rename(final)
        raise
    if old.exists():
        discard(old)


def publish_file(built: Path, final: Path) -> None:
    """Rename the file `built` to `final`, where nothing is; where it cannot be brought to the disk, nothing is there again."""
    built.rename(final)
    try:
        bring_to_disk(final.parent)
    except OSError:
        final.rename(built)
        raise


def publish_files(built: Path, final: Path) -> None:
    """Rename every file below `built` over the one of the same name below the directory `final`.

    Files cannot be renamed all at once. Once the first one may have been, `recover(final)` renames the rest.
    """
    ready = final / _PUBLISHING
    if ready.exists():
        _move_files(ready, final)
    built.rename(ready)
    try:
        bring_to_disk(final)
    except OSError:
        ready.rename(built)
        raise
    _move_files(ready, final)


def discard(directory: Path) -> None:
    """Delete a directory so that it is whole or gone under its name, even if the process is killed meanwhile."""
    deleted = directory.with_name(f".{directory.name.removeprefix('.')}{_DELETED}")
    if deleted.exists():
        shutil.rmtree(deleted)
    directory.rename(deleted)
    # A file that somebody still reads may stay (NFS); `recover` deletes it later.
    shutil.rmtree(deleted, ignore_errors=True)


def recover(directory: Path) -> None:
    """Finish or undo what a killed process left in `directory`; no other process may be writing there."""
    if not directory.is_dir():
        return
    for deleted in directory.glob(f".*{_DELETED}"):
        shutil.rmtree(deleted)
    for old in directory.glob(f".*{_OLD}"):
        final = old.with_name(old.name.removeprefix(".").removesuffix(_OLD))
        if final.exists():
            discard(old)
        else:
            old.rename(final)
    if (directory / _PUBLISHING).exists():
        _move_files(directory / _PUBLISHING, directory)
    if (directory / STAGING).exists():
        shutil.rmtree(directory / STAGING)


def write_failure(error: BaseException, directory: Path) -> tuple[int | None, str] | None:
    """Why a file below `directory` could not be written, or None where `error` is not about that.

    Args:
        error: raised while files were being written, by Python, by safetensors or by `torch.save`.
        directory: where; it still exists and is as full as it was.

    Returns:
        (errno, the system's own words); errno is None where nothing names one.
    """
    for each in _chain(error):
        number = getattr(each, "errno", None) if isinstance(each, OSError) else None
        # safetensors and tokenizers keep Rust's text of the error; the latter raises Exception.
        said = re.search(r"\(os error (\d+)\)", str(each))
        if said and type(each).__name__ in ("SafetensorError", "Exception"):
            number = int(said[1])
        if number is not None:
            return number, os.strerror(number)
    # `ndarray.tofile`: "4096 requested and 512 written".
    by_numpy = (isinstance(e, OSError) and _PARTLY.fullmatch(str(e)) for e in _chain(error))
    if any(by_numpy) or any(map(_raised_by_torch_save, _chain(error))):
        # torch's C++ stream and C's buffered files lose errno: ask the file system itself.
        try:
            _probe(directory)
        except OSError as refused:
            if refused.errno is not None:
                return refused.errno, os.strerror(refused.errno)
        return None, "a file could not be written to the end"
    return None


def _move_files(ready: Path, final: Path) -> None:
    for source in sorted(ready.rglob("*")):
        target = final / source.relative_to(ready)
        if source.is_dir():
            target.mkdir(parents=True, exist_ok=True)
        else:
            source.replace(target)
    bring_to_disk(final)
    shutil.rmtree(ready)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _raised_by_torch_save(error: BaseException) -> bool:
    trace = error.__traceback__ if isinstance(error, RuntimeError) else None
    while trace is not None:
        if trace.tb_frame.f_globals.get("__name__") == "torch.serialization":
            return True
        trace = trace.tb_next
    return False


def _probe(directory: Path) -> None:
    """Write a MiB and delete it again; raises the OSError that says why not."""
    path = directory / ".probe"
    try:
        with path.open("wb") as file:
            file.write(bytes(1 << 20))
            os.fsync(file.fileno())
    finally:
        path.unlink(missing_ok=True)


def write_whole(path: Path, text: str) -> Path:
    """Write a text under a temporary name, then move it into place: a reader sees the former file or the new one.

    Raises:
        OSError: it cannot be written; a former file is untouched.
    """
    if not path.name:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8", newline="\n") as file:
            file.write(as_typed(text))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        bring_to_disk(path.parent)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def bring_to_disk(path: Path) -> None:
    """Wait until a file, or the names in a directory, are on the disk."""
    if os.name == "nt" and path.is_dir():
        return  # Windows has no handle on a directory to bring to the disk
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def unused(path: Path) -> Path:
    """The path, or where something lies there the first of `NAME-2`, `NAME-3`, … beside it that nothing has."""
    names = chain((path,), (path.with_stem(f"{path.stem}-{number}") for number in count(2)))
    return next(each for each in names if not each.exists())

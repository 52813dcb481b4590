"""Atomic writes, also across power cuts: files are built aside, synced to disk, renamed into place.

`write_whole` writes one text. For a directory, an interrupt between any two steps leaves the new files or the
old ones; `recover` finishes or undoes the rest. Names in a directory in between:

- `.isotype-saving/`: files being built; discarded unless published.
- `.NAME.isotype-old/`: the complete former NAME while the new one takes its place.
- `.NAME.isotype-deleted/`: being deleted.
- `.isotype-publishing/`: complete files being moved into the directory.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import socket
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import chain, count
from pathlib import Path

from isotype.core.errors import SaveError, UsageError
from isotype.core.terminal import as_typed

STAGING = ".isotype-saving"
"""Subfolder of the output directory in which files are built before they are renamed."""

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})
"""errno of a full disk and of an exhausted quota."""

_PARTLY = re.compile(r"\d+ requested and \d+ written")
_PUBLISHING = ".isotype-publishing"
_OLD = ".isotype-old"
_DELETED = ".isotype-deleted"


def fsync_tree(directory: Path) -> None:
    """Sync every file and every name below `directory` to disk."""
    for root, _, files in os.walk(directory):
        for name in files:
            bring_to_disk(Path(root) / name)
        bring_to_disk(Path(root))


def publish_directory(built: Path, final: Path) -> None:
    """Rename `built` to `final`, replacing an older `final`.

    If syncing fails, the rename is undone. If it is interrupted, the complete new directory stays.
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
    """Rename the file `built` to `final`, which does not exist; undo it if syncing fails."""
    built.rename(final)
    try:
        bring_to_disk(final.parent)
    except OSError:
        final.rename(built)
        raise


def publish_files(built: Path, final: Path) -> None:
    """Move every file below `built` to the same name below the directory `final`.

    Files cannot be renamed all at once; after an interrupt `recover(final)` moves the rest.
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
    """Delete a directory under its name atomically, even if the process is killed meanwhile."""
    deleted = directory.with_name(f".{directory.name.removeprefix('.')}{_DELETED}")
    if deleted.exists():
        shutil.rmtree(deleted)
    directory.rename(deleted)
    # A file that is still open may stay (NFS); `recover` deletes it later.
    shutil.rmtree(deleted, ignore_errors=True)


def recover(directory: Path) -> None:
    """Finish or undo what a killed process left in `directory`; no other process may write there."""
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
    """Return (errno or None, the system's message) if `error` says that a file below `directory` was not
    written; else None.

    `error` was raised by Python, safetensors or `torch.save`; `directory` is as full as at that time.
    """
    for each in _chain(error):
        number = getattr(each, "errno", None) if isinstance(each, OSError) else None
        # safetensors and tokenizers carry Rust's text of the error; tokenizers raises a bare Exception.
        said = re.search(r"\(os error (\d+)\)", str(each))
        if said and type(each).__name__ in ("SafetensorError", "Exception"):
            number = int(said[1])
        if number is not None:
            return number, os.strerror(number)
    # `ndarray.tofile`: "4096 requested and 512 written".
    by_numpy = (isinstance(e, OSError) and _PARTLY.fullmatch(str(e)) for e in _chain(error))
    if any(by_numpy) or any(map(_raised_by_torch_save, _chain(error))):
        # torch's C++ stream and C's buffered files lose errno: ask the file system.
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
    """Write and delete one MiB; raises the OSError if it fails."""
    path = directory / ".probe"
    try:
        with path.open("wb") as file:
            file.write(bytes(1 << 20))
            os.fsync(file.fileno())
    finally:
        path.unlink(missing_ok=True)


def write_whole(path: Path, text: str) -> Path:
    """Write a text to a temporary file and rename it, so that readers see the former file or the new one."""
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
    """Sync a file, or the names in a directory, to disk."""
    if os.name == "nt" and path.is_dir():
        return  # Windows cannot sync a directory
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def unused(path: Path) -> Path:
    """Return the path, or the first unused one of `NAME-2`, `NAME-3`, … if it exists."""
    names = chain((path,), (path.with_stem(f"{path.stem}-{number}") for number in count(2)))
    return next(each for each in names if not each.exists())


LOCK_FILE = ".isotype-lock"
"""Lock file in a folder that is being written; removed when the writer ends."""

_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL})


@contextmanager
def only_writer(directory: Path, command: str) -> Iterator[str | None]:
    """Lock `directory` for writing by this process.

    The lock is `flock`: the kernel releases it when the process ends, also by SIGKILL. On NFS it holds
    between hosts. Yields None, or a sentence saying why locks are not supported. `command` describes this
    process to others.

    Raises:
        UsageError: another process writes there; it is named.
        SaveError: the directory is not writable.
    """
    path = directory / LOCK_FILE
    descriptor = _locked_file(path)
    if isinstance(descriptor, str):
        yield f"{directory} cannot be locked ({descriptor}): see to it that no other run writes there"
        return
    try:
        now = datetime.now(UTC).isoformat(timespec="seconds")
        who = {"pid": os.getpid(), "host": socket.gethostname(), "since": now, "command": command}
        with _refusals(path):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(who).encode(), 0)
        yield None
    finally:
        path.unlink(
            missing_ok=True
        )  # before releasing the lock: a process that waits for it then opens a new file
        os.close(descriptor)


@contextmanager
def wait_for_turn(path: Path) -> Iterator[bool]:
    """Wait for an exclusive lock on the file `path` (created if missing), and hold it.

    Yields False if locks are not supported: other processes may run at the same time.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        yield _lock(descriptor, wait=True) is None
    finally:
        os.close(descriptor)


@contextmanager
def held(directory: Path) -> Iterator[None]:
    """Hold a directory that is being built, so that `remove_abandoned` skips it."""
    descriptor = _hold(directory)
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def remove_abandoned(directories: Iterable[Path]) -> None:
    """Remove the directories that no living process has `held`; none if locks are not supported."""
    for each in directories:
        descriptor = _hold(each)
        if descriptor is not None:
            shutil.rmtree(each, ignore_errors=True)
            os.close(descriptor)


def _hold(directory: Path) -> int | None:
    """Return the descriptor of the locked directory; None if another process holds it, or without locks."""
    try:
        descriptor = os.open(directory, os.O_RDONLY)
    except OSError:
        return None
    try:
        why = _lock(descriptor)
    except OSError as error:
        why = str(error)
    if why is None:
        return descriptor
    os.close(descriptor)
    return None


def _locked_file(path: Path) -> int | str:
    """Return the locked file's descriptor, or why there are no locks."""
    while True:
        with _refusals(path):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            why = _lock(descriptor)
        except OSError as error:
            holder = os.read(descriptor, 1 << 16)
            os.close(descriptor)
            if not isinstance(error, BlockingIOError):
                raise
            raise _taken(path, holder) from error
        if why is None and _same_file(descriptor, path):
            return descriptor
        os.close(descriptor)
        if why is not None:
            path.unlink(missing_ok=True)
            return why
        # Its holder ended and removed the file between the two calls.


def _lock(descriptor: int, *, wait: bool = False) -> str | None:
    """Lock an open file or directory; return why locks are not supported, None if it is locked.

    Raises BlockingIOError if another process holds it and `wait` is false.
    """
    if sys.platform == "win32":
        return "Windows has no flock"
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return os.strerror(error.errno)
    return None


@contextmanager
def _refusals(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        what = f"{path}: {error.strerror}"
        expected = "a folder that can be written, with room for what comes out"
        fix = "free some room, make it writable, or give another one"
        raise SaveError.of("nothing can be written to the output directory", what, expected, fix) from error


def _same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _taken(path: Path, holder: bytes) -> UsageError:
    who, stop = "another process", "wait until it has ended"
    try:
        said = json.loads(holder)
        who = f"process {said['pid']} on {said['host']} since {said['since']}: {said['command']}"
        stop = f"wait for it, or stop it (kill {said['pid']} on {said['host']}; it saves a checkpoint)"
    except (ValueError, KeyError, TypeError):
        pass  # it holds the lock but has not yet written its name
    what, fix = f"{path.parent} is written by {who}", f"{stop}, or give another one"
    return UsageError.of("another run writes into the output directory", what, "one run in a folder", fix)

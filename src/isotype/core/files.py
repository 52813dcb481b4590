"""Atomic writes of files and directories, and locks on them.

Files are written next to their final path, synced to disk and renamed, so that they survive an interrupt or a power
failure. `write_whole` writes one text. After an interrupt, `recover` completes or undoes the replacement of a
directory's files, so that all files are new, or all are old. Before `recover`, the directory may contain:

- `.isotype-saving/`: files that are being written. `recover` deletes them.
- `.NAME.isotype-old/`: the complete former NAME, while the new NAME replaces it.
- `.NAME.isotype-deleted/`: a directory that is being deleted.
- `.isotype-publishing/`: complete files that are being moved into the directory.
"""

import errno
import json
import os
import re
import shutil
import socket
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from itertools import chain, count
from pathlib import Path
from traceback import walk_tb

from isotype.core.errors import SaveError, UsageError, causes
from isotype.core.terminal import as_typed

STAGING = ".isotype-saving"
"""Subfolder of the output directory for files that are not renamed yet."""

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Values of errno for a full disk and for an exhausted quota."""

_PARTLY = re.compile(r"\d+ requested and \d+ written")
_PUBLISHING = ".isotype-publishing"
_OLD = ".isotype-old"
_DELETED = ".isotype-deleted"


def fsync_tree(directory: Path) -> None:
    """Sync all files and names below `directory` to disk."""
    for root, _, files in os.walk(directory):
        for name in files:
            bring_to_disk(Path(root) / name)
        bring_to_disk(Path(root))


def create_once(folder: Path, write: Callable[[Path], None]) -> Path:
    """Return `folder`. If it is missing, `write` fills a temporary folder, which is renamed to `folder`. Several processes may call this at once."""
    if folder.is_dir():
        return folder
    part = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}")
    try:
        part.mkdir(parents=True)
        write(part)
        fsync_tree(part)
        part.rename(folder)
    except OSError:
        if not folder.is_dir():  # else another process was faster
            raise
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return folder


def publish_directory(built: Path, final: Path) -> None:
    """Rename the directory `built` to `final`. Delete a former `final`.

    If syncing to disk fails, undo the rename. If this function is interrupted, the complete new directory remains.
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
    """Rename the file `built` to `final`, which must not exist. If syncing to disk fails, undo the rename."""
    built.rename(final)
    try:
        bring_to_disk(final.parent)
    except OSError:
        final.rename(built)
        raise


def publish_files(built: Path, final: Path) -> None:
    """Move every file below `built` to the same name below `final`.

    Moving several files is not atomic. After an interrupt, `recover(final)` moves the rest.
    """
    ready = final / _PUBLISHING
    if ready.exists():
        _move_files(ready, final)
    publish_file(built, ready)
    _move_files(ready, final)


def discard(directory: Path) -> None:
    """Delete a directory. Even if the process is killed, `directory` never exists with only a part of its files."""
    deleted = directory.with_name(f".{directory.name.removeprefix('.')}{_DELETED}")
    if deleted.exists():
        shutil.rmtree(deleted)
    directory.rename(deleted)
    # On NFS, a file that is still open may stay. `recover` deletes it later.
    shutil.rmtree(deleted, ignore_errors=True)


def recover(directory: Path) -> None:
    """Complete or undo the writes that a killed process left in `directory`. Meanwhile, no other process may write there."""
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
    """Return (errno, message of the system) if `error` means that writing a file below `directory` failed; else None.

    `error` may come from Python, safetensors or `torch.save`. The errno is None if it is unknown. Call this function
    before disk space in `directory` is freed.
    """
    for cause in causes(error):
        number = getattr(cause, "errno", None) if isinstance(cause, OSError) else None
        # Errors of safetensors and tokenizers have Rust's message. tokenizers raises a bare Exception.
        rust_message = re.search(r"\(os error (\d+)\)", str(cause))
        if rust_message and type(cause).__name__ in ("SafetensorError", "Exception"):
            number = int(rust_message[1])
        if number is not None:
            return number, os.strerror(number)
    # `ndarray.tofile` raises OSError("4096 requested and 512 written") without an errno.
    by_numpy = (isinstance(cause, OSError) and _PARTLY.fullmatch(str(cause)) for cause in causes(error))
    if any(by_numpy) or any(map(_raised_by_torch_save, causes(error))):
        # torch's C++ stream and C's buffered files lose errno. Another write shows it.
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


def _raised_by_torch_save(error: BaseException) -> bool:
    frames = (frame for frame, _ in walk_tb(error.__traceback__))
    raised = (frame.f_globals.get("__name__") == "torch.serialization" for frame in frames)
    return isinstance(error, RuntimeError) and any(raised)


def _probe(directory: Path) -> None:
    """Write and delete a file of one MiB. Raise OSError if writing fails."""
    path = directory / ".probe"
    try:
        with path.open("wb") as file:
            file.write(bytes(1 << 20))
            os.fsync(file.fileno())
    finally:
        path.unlink(missing_ok=True)


def write_whole(path: Path, text: str) -> Path:
    """Write a text to a temporary file, and rename it to `path`. Readers see either the old text or the whole new text."""
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
    """Sync the content of a file, or the names in a directory, to disk."""
    if os.name == "nt" and path.is_dir():
        return  # Windows cannot sync a directory
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def unused(path: Path) -> Path:
    """Return `path` if it does not exist, or else the first of `NAME-2`, `NAME-3`, … that does not exist."""
    paths = chain((path,), (path.with_stem(f"{path.stem}-{number}") for number in count(2)))
    return next(candidate for candidate in paths if not candidate.exists())


LOCK_FILE = ".isotype-lock"
"""Name of the lock file in a folder to which a process writes. The file is removed when the process ends."""

_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL})


@contextmanager
def only_writer(directory: Path, command: str) -> Iterator[str | None]:
    """Lock `directory` against other processes of isotype.

    Yields None, or a sentence that says why locks are not supported. The lock is a `flock`. The kernel releases the
    lock when the process ends, even by SIGKILL. On NFS, the lock also excludes other hosts. If another process tries
    to lock the directory, its error shows `command`.

    Raises:
        UsageError: another process has locked the directory.
        SaveError: the directory is not writable.
    """
    path = directory / LOCK_FILE
    descriptor = _locked_file(path)
    if isinstance(descriptor, str):
        yield f"{directory} cannot be locked ({descriptor}): make sure that no other run writes into it"
        return
    try:
        now = datetime.now(UTC).isoformat(timespec="seconds")
        holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": now, "command": command}
        with _refusals(path):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(holder).encode(), 0)
        yield None
    finally:
        # The file is removed before its lock is released. A waiting process then opens a new file.
        path.unlink(missing_ok=True)
        os.close(descriptor)


@contextmanager
def wait_for_turn(path: Path) -> Iterator[bool]:
    """Wait for an exclusive lock on the file `path` (created if missing), and keep the lock in the `with` block.

    Yields False if locks are not supported. Other processes may then run the same code at the same time.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        yield _lock(descriptor, wait=True) is None
    finally:
        os.close(descriptor)


@contextmanager
def directory_lock(directory: Path) -> Iterator[bool]:
    """Lock a directory in the `with` block, so that no process removes it by `remove_abandoned`.

    Yields False if another process has the lock, or if locks are not supported.
    """
    with ExitStack() as stack:
        locked = False
        with suppress(OSError):
            descriptor = os.open(directory, os.O_RDONLY)
            stack.callback(os.close, descriptor)
            locked = _lock(descriptor) is None
        yield locked


def remove_abandoned(directories: Iterable[Path]) -> None:
    """Remove the directories that no running process has locked by `directory_lock`. If locks are not supported, remove none."""
    for directory in directories:
        with directory_lock(directory) as locked:
            if locked:
                shutil.rmtree(directory, ignore_errors=True)


def _locked_file(path: Path) -> int | str:
    """Lock the file `path`. Return its descriptor, or a clause on why locks are not supported."""
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
            raise _already_locked(path, holder) from error
        if why is None and _same_file(descriptor, path):
            return descriptor
        os.close(descriptor)
        if why is not None:
            path.unlink(missing_ok=True)
            return why
        # The process with the lock removed this file between the two calls. Lock the file that is there now.


def _lock(descriptor: int, *, wait: bool = False) -> str | None:
    """Lock an open file or directory. Return None, or a clause on why locks are not supported.

    If another process has the lock, wait until it is released (if `wait` is True), or raise BlockingIOError.
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
        expected = "a writable folder, with enough space for the results"
        fix = "free some space, make the folder writable, or use another folder"
        raise SaveError.of("nothing can be written to the output directory", what, expected, fix) from error


def _same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _already_locked(path: Path, holder: bytes) -> UsageError:
    who, stop = "another process", "wait until that process has ended"
    try:
        about = json.loads(holder)
        who = f"process {about['pid']} on {about['host']} since {about['since']}: {about['command']}"
        stop = f"wait for that process, or stop it (kill {about['pid']} on {about['host']}; it saves a checkpoint)"
    except (ValueError, KeyError, TypeError):
        pass  # the other process has locked the file and not yet described itself
    what, fix = f"{path.parent} is written by {who}", f"{stop}, or use another folder"
    headline = "another run writes into the output directory"
    return UsageError.of(headline, what, "only one run that writes into a folder", fix)

"""Locks that give a folder one writer; they end with the process that holds them."""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from isotype.core.errors import SaveError, UsageError

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

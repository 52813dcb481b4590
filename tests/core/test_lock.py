"""A folder's lock: refused while it is held, gone with its process, and said where there are none."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from isotype.core.errors import SaveError, UsageError
from isotype.core.files import LOCK_FILE, only_writer

fcntl = pytest.importorskip("fcntl")

HOLDER = """
import sys, time
from pathlib import Path
from isotype.core.files import only_writer
with only_writer(Path(sys.argv[1]), "isotype sft") as unlocked:
    print("held", flush=True)
    time.sleep(60)
"""


def test_the_lock_ends_with_its_process(tmp_path: Path) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, tmp_path], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    try:
        assert holder.stdout.readline() == "held\n"
        with (
            pytest.raises(UsageError, match=f"process {holder.pid} on .* since .*: isotype sft"),
            only_writer(tmp_path, "other"),
        ):
            raise AssertionError("two writers")
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        holder.stdout.close()
    assert (tmp_path / LOCK_FILE).exists()  # what a killed process leaves locks nothing
    with only_writer(tmp_path, "next") as unlocked:
        assert unlocked is None
    assert list(tmp_path.iterdir()) == []


def test_a_holder_that_has_not_said_who_it_is(tmp_path: Path) -> None:
    with (tmp_path / LOCK_FILE).open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(UsageError, match="is written by another process"), only_writer(tmp_path, "x"):
            raise AssertionError("two writers")


def test_a_file_that_was_taken_away_before_it_was_locked_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = fcntl.flock, []

    def late(descriptor: int, how: int) -> None:
        calls.append(how)
        if len(calls) == 1:
            (tmp_path / LOCK_FILE).unlink()  # its holder ends here
        real(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with only_writer(tmp_path, "x"):
        assert len(calls) == 2
        monkeypatch.setattr(fcntl, "flock", real)
        with pytest.raises(UsageError), only_writer(tmp_path, "y"):
            raise AssertionError("two writers")


def test_a_file_system_without_locks_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*args: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", none)
    with only_writer(tmp_path, "x") as unlocked:
        assert unlocked == (
            f"{tmp_path} cannot be locked (No locks available): make sure that no other run writes into it"
        )
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(SaveError, match="No space left on device"), only_writer(tmp_path, "x"):
        raise AssertionError("nothing can be written")
    assert list(tmp_path.iterdir()) == []

"""Every instant of a publication is stopped: by SIGKILL's stand-in (the process ends on the spot) and by an error."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from isotype.core import files
from isotype.core.files import (
    STAGING,
    create_once,
    discard,
    publish_directory,
    publish_files,
    recover,
    write_failure,
    write_whole,
)

OLD = {"weights": "old weights", "config": "old config"}
NEW = {"weights": "new weights", "config": "new config", "sub/extra": "new extra"}
CALLS = ("rename", "replace", "fsync", "unlink", "rmdir", "mkdir")


def write(directory: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)
    return directory


def read(directory: Path) -> dict[str, str]:
    return {p.relative_to(directory).as_posix(): p.read_text() for p in directory.rglob("*") if p.is_file()}


def prepare(root: Path) -> None:
    write(root / "checkpoint-1", OLD)
    write(root, OLD)
    write(root / STAGING / "checkpoint-1", NEW)
    write(root / STAGING / "model", NEW)


def replace_checkpoint(root: Path) -> None:
    publish_directory(root / STAGING / "checkpoint-1", root / "checkpoint-1")


def replace_files(root: Path) -> None:
    publish_files(root / STAGING / "model", root)


def delete_checkpoint(root: Path) -> None:
    discard(root / "checkpoint-1")


def top_files(root: Path) -> dict[str, str]:
    return {name: text for name, text in read(root).items() if not name.startswith(("checkpoint-", "."))}


def hidden(root: Path) -> list[str]:
    return [path.name for path in root.iterdir() if path.name.startswith(".")]


# Runs an operation, but ends the process at the k-th call that changes the file system, before or after it.
KILLED = """
import itertools, os, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
import tests.core.test_files as cases

def kill_at(last, after):
    count = itertools.count()
    def wrap(call):
        def counted(*args, **kwargs):
            k = next(count)
            if k == last and not after:
                os._exit(9)
            result = call(*args, **kwargs)
            if k == last:
                os._exit(9)
            return result
        return counted
    os.fsync = lambda descriptor: None  # a killed process loses nothing that the kernel has
    for name in cases.CALLS:
        setattr(os, name, wrap(getattr(os, name)))

def killed(operation, root, last, after):
    pid = os.fork()
    if pid == 0:
        kill_at(last, after)
        operation(root)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9

def results_of(operation, base):
    results, k = [], 0
    while True:
        more = False
        for after in (False, True):
            for again in (None, 0, 1, 3):  # the process that recovers may be killed as well
                root = base / f"{{k}}-{{after}}-{{again}}"
                cases.prepare(root)
                more |= killed(operation, root, k, after)
                if again is not None:
                    killed(cases.recover, root, again, after)
                cases.recover(root)
                results.append([cases.read(root / "checkpoint-1"), cases.top_files(root), cases.hidden(root)])
        k += 1
        if not more:
            return results
import json
print(json.dumps([results_of(getattr(cases, name), Path(sys.argv[1]) / name) for name in sys.argv[2:]]))
"""
OPERATIONS: dict[str, tuple[tuple[dict[str, str], ...], tuple[dict[str, str], ...]]] = {
    "replace_checkpoint": ((OLD, NEW), (OLD,)),
    "replace_files": ((OLD,), (OLD, NEW)),
    "delete_checkpoint": ((OLD, {}), (OLD,)),
}
"""What a checkpoint and the files beside it are after each."""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_process_killed_at_any_instant_leaves_the_old_or_the_new(tmp_path: Path) -> None:
    code = KILLED.format(tests=str(Path(__file__).parents[2]))
    command = [sys.executable, "-c", code, str(tmp_path), *OPERATIONS]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for (checkpoint, beside), results in zip(OPERATIONS.values(), json.loads(done.stdout), strict=True):
        assert len(results) > 8 * 3
        for content, top, rest in results:
            assert content in checkpoint
            assert top in beside
            assert rest == []
        for variants, column in ((checkpoint, 0), (beside, 1)):
            assert all(any(result[column] == variant for result in results) for variant in variants)


@pytest.fixture
def refuse(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Let the k-th call that changes the file system raise an error, before it does anything or after."""
    originals = {name: getattr(os, name) for name in CALLS}

    def refuse_at(last: int, error: Callable[[], BaseException], *, after: bool = False) -> None:
        count = iter(range(10**6))

        def wrap(call: Callable[..., object]) -> Callable[..., object]:
            def counted(*args: object, **kwargs: object) -> object:
                meant = next(count) == last
                if meant and not after:
                    raise error()
                result = call(*args, **kwargs)
                if meant:
                    raise error()
                return result

            return counted

        for name, call in originals.items():
            monkeypatch.setattr(os, name, wrap(call))

    yield refuse_at
    monkeypatch.undo()


@pytest.mark.parametrize("k", range(8))
def test_an_error_at_any_instant_leaves_the_old_or_the_new(
    k: int, refuse: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    prepare(tmp_path)
    refuse(k, lambda: OSError(errno.EIO, os.strerror(errno.EIO)))
    with suppress(OSError):
        replace_checkpoint(tmp_path)
    monkeypatch.undo()
    # Even before anything recovers: a reader of today finds a whole checkpoint.
    assert read(tmp_path / "checkpoint-1") in (OLD, NEW)
    recover(tmp_path)
    assert read(tmp_path / "checkpoint-1") in (OLD, NEW)
    assert hidden(tmp_path) == []


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("older", [False, True])
def test_an_interrupt_at_any_instant_takes_no_checkpoint_away_that_was_there_to_read(
    older: bool, after: bool, refuse: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    found: list[bool] = []
    for k in range(8):
        root = tmp_path / str(k)
        prepare(root)
        if not older:
            shutil.rmtree(root / "checkpoint-1")
        published: list[bool] = []

        def interrupt(root: Path = root, published: list[bool] = published) -> KeyboardInterrupt:
            published.append((root / "checkpoint-1" / "sub").exists())
            return KeyboardInterrupt()

        refuse(k, interrupt, after=after)
        with suppress(KeyboardInterrupt):
            replace_checkpoint(root)
        monkeypatch.undo()
        recover(root)
        assert read(root / "checkpoint-1") == (NEW if published != [False] else OLD if older else {})
        assert hidden(root) == []
        found += published
    assert True in found


def test_publishing_replaces_and_leaves_nothing_behind(tmp_path: Path):
    prepare(tmp_path)
    replace_checkpoint(tmp_path)
    replace_files(tmp_path)
    assert read(tmp_path / "checkpoint-1") == NEW
    assert top_files(tmp_path) == NEW
    assert hidden(tmp_path) == [STAGING]


def test_publishing_files_finishes_an_unfinished_publication_first(tmp_path: Path):
    write(tmp_path / ".isotype-publishing", {"config": "middle", "only-middle": "middle"})
    write(tmp_path / STAGING / "model", NEW)
    replace_files(tmp_path)
    assert top_files(tmp_path) == {**NEW, "only-middle": "middle"}


def test_a_folder_is_made_once_and_whole(tmp_path: Path):
    def fail(part: Path) -> None:
        (part / "a").touch()
        raise ZeroDivisionError

    folder = tmp_path / "cache" / "folder"
    with pytest.raises(ZeroDivisionError):
        create_once(folder, fail)
    assert list(folder.parent.iterdir()) == []
    for write in (lambda part: (part / "b").touch(), fail):
        assert create_once(folder, write) == folder
        assert [path.name for path in folder.iterdir()] == ["b"]


def test_recover_leaves_other_files_alone_and_takes_a_missing_directory(tmp_path: Path):
    mine = {".hidden.old/a": "1", ".b.deleted/c": "2", "checkpoint-3/x": "3", "notes.txt": "4"}
    write(tmp_path, mine)
    recover(tmp_path)
    recover(tmp_path / "nowhere")
    assert read(tmp_path) == mine


def test_a_write_failure_is_told_by_errno_from_python_and_safetensors(tmp_path: Path):
    import torch
    from safetensors.torch import save_file

    full = OSError(errno.ENOSPC, "whatever the platform says")
    assert write_failure(full, tmp_path) == (errno.ENOSPC, "No space left on device")
    wrapped = RuntimeError("wrapped")
    wrapped.__context__ = full
    assert write_failure(wrapped, tmp_path) == (errno.ENOSPC, "No space left on device")
    with pytest.raises(Exception, match="No such file") as caught:
        save_file({"a": torch.zeros(2)}, tmp_path / "nowhere" / "a.safetensors")
    assert write_failure(caught.value, tmp_path) == (errno.ENOENT, "No such file or directory")


def test_other_errors_are_not_about_writing(tmp_path: Path):
    assert write_failure(RuntimeError("No space left on device"), tmp_path) is None
    assert write_failure(ValueError("(os error 28)"), tmp_path) is None


def test_torch_save_loses_errno_so_the_file_system_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import torch

    class Full:
        def write(self, data: bytes) -> int:
            raise RuntimeError("stream error")

        def flush(self) -> None: ...

    with pytest.raises(RuntimeError) as caught:
        torch.save({"a": torch.zeros(2)}, Full())
    assert write_failure(caught.value, tmp_path) == (None, "a file could not be written to the end")
    assert list(tmp_path.iterdir()) == []

    def refuse(descriptor: int) -> None:
        raise OSError(errno.EDQUOT, "quota")

    monkeypatch.setattr(files.os, "fsync", refuse)
    assert write_failure(caught.value, tmp_path) == (errno.EDQUOT, os.strerror(errno.EDQUOT))
    assert list(tmp_path.iterdir()) == []


def test_discard_takes_over_from_a_discard_that_was_killed(tmp_path: Path):
    write(tmp_path / "checkpoint-1", OLD)
    write(tmp_path / ".checkpoint-1.isotype-deleted", {"half": "deleted"})
    discard(tmp_path / "checkpoint-1")
    assert list(tmp_path.iterdir()) == []
    shutil.rmtree(tmp_path)


def test_a_path_without_a_name_is_a_directory():
    with pytest.raises(IsADirectoryError):
        write_whole(Path(), "text")

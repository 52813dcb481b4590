"""C++ that is compiled once and kept; what is said where it cannot be."""

from __future__ import annotations

import ctypes
import os
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from isotype.core import compiled
from isotype.core.cache import LIBRARIES
from isotype.core.compiled import LOCK, SWITCH, NotCompiledError, find_compilers, load_compiled
from isotype.precision.devices.machine import compiler_here
from tests.pairwise import few
from tests.refusals import refused

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="there is no C++ compiler"
)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ISOTYPE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv(SWITCH, raising=False)
    return tmp_path / "cache" / LIBRARIES


def libraries(cache: Path) -> list[Path]:
    """What is in the folder, but for its lock."""
    return sorted(file for file in cache.iterdir() if file.name != LOCK)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    file = tmp_path / "answer.cpp"
    file.write_text('extern "C" int answer() { return ANSWER; }')
    return file


def command(tmp_path: Path, lines: str) -> str:
    """A program that stands for a compiler."""
    file = tmp_path / "a compiler"
    file.write_text(f"#!/bin/sh\n{lines}\n")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return f"'{file}' --flag"


@needs_compiler
def test_it_is_compiled_once_for_each_source_and_options(
    cache: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load_compiled(source, ["-DANSWER=42"]).answer() == 42
    assert load_compiled(source, ["-DANSWER=43"]).answer() == 43
    source.write_text(source.read_text().replace("ANSWER;", "ANSWER + 1;"))
    assert load_compiled(source, ["-DANSWER=42"]).answer() == 43
    assert len(libraries(cache)) == 3
    monkeypatch.setattr(compiled, "_compile", lambda *_: pytest.fail("compiled again"))
    assert load_compiled(source, ["-DANSWER=42"]).answer() == 43


@needs_compiler
def test_a_compiler_that_fails_is_quoted_and_leaves_nothing(cache: Path, source: Path) -> None:
    with pytest.raises(NotCompiledError, match=r"failed: .*answer\.cpp.*ANSWER.*declared"):
        load_compiled(source, [])
    assert libraries(cache) == []


def test_no_compiler(cache: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert (
        refused(NotCompiledError, load_compiled, source, [])
        == "there is no C++ compiler (c++, g++, clang++) on the path"
    )
    monkeypatch.setenv("CXX", "icpx -static")
    with pytest.raises(NotCompiledError, match=r"there is no C\+\+ compiler \(icpx\) on the path"):
        load_compiled(source, [])
    assert not cache.exists()


def test_a_compiler_of_the_users_choice(
    cache: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", command(tmp_path, 'echo "$1" >&2; exit 3'))
    with pytest.raises(NotCompiledError, match="a compiler failed: --flag"):
        load_compiled(source, [])
    monkeypatch.setattr(compiled, "_LIMIT", 0.1)
    monkeypatch.setenv("CXX", command(tmp_path, "exec sleep 5"))
    with pytest.raises(NotCompiledError, match="took more than 0 s"):
        load_compiled(source, [])


def cut_short(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:4096])


def zeros_at_the_end(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-2048] + bytes(2048))


def empty(file: Path) -> None:
    file.write_bytes(b"")


@needs_compiler
@few("damage", [cut_short, zeros_at_the_end, empty], cut_short, empty)
def test_a_damaged_library_is_compiled_again(
    cache: Path, source: Path, damage: Callable[[Path], None]
) -> None:
    """In a process of its own: the loader reads past the end of a file that was cut short, which ends the process by SIGBUS."""
    code = """if True:
        import sys
        from pathlib import Path
        from isotype.core.compiled import load_compiled
        print(load_compiled(Path(sys.argv[1]), ["-DANSWER=44"]).answer())
    """
    command = [sys.executable, "-c", code, str(source)]
    first = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    (file,) = libraries(cache)
    whole = file.read_bytes()
    damage(file)
    second = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (second.returncode, second.stdout) == (0, first.stdout), second.stderr
    assert libraries(cache) == [file]
    assert file.read_bytes() == whole


@needs_compiler
def test_it_is_on_the_disk_before_it_has_its_name(
    cache: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[tuple[str, str]] = []
    bring, replace = compiled.bring_to_disk, Path.replace
    monkeypatch.setattr(
        compiled, "bring_to_disk", lambda path: (steps.append(("disk", path.name)), bring(path))
    )
    monkeypatch.setattr(
        Path, "replace", lambda self, to: (steps.append(("name", to.suffix)), replace(self, to))[1]
    )
    load_compiled(source, ["-DANSWER=48"])
    assert steps == [("disk", "library.so"), ("name", ".so"), ("disk", LIBRARIES)]


def refusal(source: Path, caplog: pytest.LogCaptureFixture) -> str:
    """Why a library is not loaded; the one line that is said of it says so too."""
    compiled._warn.cache_clear()
    caplog.clear()
    for _ in range(2):
        with pytest.raises(NotCompiledError) as caught:
            load_compiled(source, ["-DANSWER=49"])
    (line,) = caplog.messages
    assert line == (
        f"{caught.value}, so no compiled library is loaded; remove this path, or set ISOTYPE_CACHE to your own folder"
    )
    return str(caught.value)


needs_users = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="a system without owners and modes")


@needs_users
@needs_compiler
def test_what_others_may_write_is_not_loaded(
    cache: Path, source: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = os.umask(0)  # whatever the umask is, nobody else may write
    try:
        load_compiled(source, ["-DANSWER=49"])
    finally:
        os.umask(before)
    (file,) = libraries(cache)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (cache, file)] == [0o700, 0o700]
    monkeypatch.setattr(ctypes, "CDLL", lambda path: pytest.fail("loaded"))
    for path in (file, cache):
        for mode in (0o702, 0o720):
            path.chmod(mode)
            assert refusal(source, caplog) == f"{path} may be written by other users (mode {mode:o})"
        path.chmod(0o700)
    cache.chmod(0o770)
    assert compiler_here().startswith(
        f"{cache} may be written by other users (mode 770): attention, LoRA layers"
    )


@needs_users
@needs_compiler
def test_what_belongs_to_somebody_else_is_not_loaded(
    cache: Path, source: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_compiled(source, ["-DANSWER=49"])
    (file,) = libraries(cache)
    monkeypatch.setattr(ctypes, "CDLL", lambda path: pytest.fail("loaded"))
    look, user = os.stat, os.geteuid()
    for theirs in (file, cache):

        def looked(path: Any, *args: Any, theirs: Path = theirs, **kwargs: Any) -> os.stat_result:
            about = look(path, *args, **kwargs)
            if path != theirs:
                return about
            return os.stat_result((*about[:4], user + 1, *about[5:]))

        with monkeypatch.context() as patch:
            patch.setattr(os, "stat", looked)
            assert refusal(source, caplog) == f"{theirs} belongs to user {user + 1}, but this is user {user}"
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    assert refusal(source, caplog) == f"{cache} belongs to user {user}, but this is user {user + 1}"


def test_what_a_killed_compiler_leaves_is_removed_by_the_next(
    cache: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It writes into the folder of temporary files as compilers do, says so, and waits.
    begun = tmp_path / "begun"
    waits = command(
        tmp_path,
        f"echo half > $TMPDIR/half.s; echo $$ > '{begun}.part'; mv '{begun}.part' '{begun}'; exec sleep 100",
    )
    code = "import sys; from pathlib import Path; from isotype.core.compiled import load_compiled; load_compiled(Path(sys.argv[1]), [])"
    killed = subprocess.Popen([sys.executable, "-c", code, str(source)], env={**os.environ, "CXX": waits})
    try:
        deadline = time.monotonic() + 100
        while not begun.exists() and killed.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
    finally:
        killed.kill()
        killed.wait()
    os.kill(int(begun.read_text()), signal.SIGKILL)
    (left,) = libraries(cache)
    assert [file.name for file in left.iterdir()] == ["half.s"]
    monkeypatch.setenv("CXX", command(tmp_path, "exit 3"))
    with pytest.raises(NotCompiledError, match="failed"):
        load_compiled(source, [])
    assert libraries(cache) == []


@needs_compiler
def test_processes_that_start_together_compile_once(cache: Path, source: Path, tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    real = shlex.join(find_compilers()[0])
    counts = command(tmp_path, f'echo call >> "{calls}"; shift; exec {real} "$@"')
    code = "import sys; from pathlib import Path; from isotype.core.compiled import load_compiled; print(load_compiled(Path(sys.argv[1]), ['-DANSWER=50']).answer())"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(source)],
            env={**os.environ, "CXX": counts},
            stdout=subprocess.PIPE,
        )
        for _ in range(3)
    ]
    assert [process.communicate(timeout=120)[0].strip() for process in processes] == [b"50"] * 3
    assert calls.read_text().split() == ["call"]


def test_the_switch(cache: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "0")
    with pytest.raises(NotCompiledError, match=r"^\$ISOTYPE_COMPILE is 0$"):
        load_compiled(source, ["-DANSWER=51"])
    assert not cache.exists()
    assert compiler_here().startswith("$ISOTYPE_COMPILE is 0: attention, LoRA layers")
    monkeypatch.setenv(SWITCH, "never")
    with pytest.raises(NotCompiledError, match="is 'never': 0 switches compiling off, 1 is the default"):
        load_compiled(source, [])


@needs_compiler
def test_the_next_compiler_is_tried(
    cache: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command(tmp_path, "echo no OpenMP error here >&2; exit 1")
    (tmp_path / "a compiler").rename(tmp_path / "first")
    works = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))))
    monkeypatch.setattr(compiled, "_COMPILERS", (str(tmp_path / "first"), works))
    assert load_compiled(source, ["-DANSWER=45"]).answer() == 45
    monkeypatch.setattr(compiled, "_COMPILERS", (str(tmp_path / "first"),) * 2)
    with pytest.raises(NotCompiledError, match=r"first failed: no OpenMP error here; .*first failed: "):
        load_compiled(source, ["-DANSWER=46"])


def test_a_compiler_that_cannot_be_read(cache: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "'g++")
    with pytest.raises(NotCompiledError, match=r"\$CXX is \"'g\+\+\": No closing quotation"):
        load_compiled(source, [])


def test_what_is_no_library(
    cache: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the last argument is where the library goes
    monkeypatch.setenv("CXX", command(tmp_path, 'for last; do :; done; echo nothing > "$last"'))
    with pytest.raises(NotCompiledError, match=r"answer\.cpp could not be compiled or loaded"):
        load_compiled(source, [])


def test_a_cache_that_cannot_be_written(
    cache: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.parent.mkdir()
    cache.write_text("a file where the folder would be")
    monkeypatch.setenv("CXX", command(tmp_path, "exit 0"))
    with pytest.raises(NotCompiledError, match="could not be compiled or loaded"):
        load_compiled(source, [])

"""C++ that is compiled once and kept; what is said where it cannot be."""

from __future__ import annotations

import shutil
import stat
from pathlib import Path

import pytest

from isotype.core import compiled
from isotype.core.compiled import NotCompiledError, load_compiled

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="there is no C++ compiler"
)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ISOTYPE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    return tmp_path / "cache" / "compiled"


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
    assert len(list(cache.iterdir())) == 3
    monkeypatch.setattr(compiled, "_compile", lambda *_: pytest.fail("compiled again"))
    assert load_compiled(source, ["-DANSWER=42"]).answer() == 43


@needs_compiler
def test_a_compiler_that_fails_is_quoted_and_leaves_nothing(cache: Path, source: Path) -> None:
    with pytest.raises(NotCompiledError, match=r"failed: .*answer\.cpp.*ANSWER.*declared"):
        load_compiled(source, [])
    assert list(cache.iterdir()) == []


def test_no_compiler(cache: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(NotCompiledError) as caught:
        load_compiled(source, [])
    assert str(caught.value) == "there is no C++ compiler (c++, g++, clang++) on the path"
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


@needs_compiler
def test_a_damaged_library_is_made_again(cache: Path, source: Path) -> None:
    load_compiled(source, ["-DANSWER=44"])
    (file,) = cache.iterdir()
    file.unlink()
    file.write_bytes(b"damaged")
    assert load_compiled(source, ["-DANSWER=44"]).answer() == 44


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
    cache.parent.write_text("a file where the folder would be")
    monkeypatch.setenv("CXX", command(tmp_path, "exit 0"))
    with pytest.raises(NotCompiledError, match="could not be compiled or loaded"):
        load_compiled(source, [])

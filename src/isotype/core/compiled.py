"""C++ that comes with isotype, compiled once on each machine that has a compiler.

Nothing rests on it: what is computed there is computed by torch's operators elsewhere.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from isotype.core.cache import default_cache_dir

_COMPILERS = ("c++", "g++", "clang++")
_OPTIONS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-shared",
    # By OpenMP's threads, which are torch's own where both name the same library.
    "-fopenmp",
    "-ffp-contract=fast",
    "-fno-math-errno",
    # Values are copied as bytes and read as lanes.
    "-fno-strict-aliasing",
)
_LIMIT = 300.0
"""Seconds after which a compiler is not waited for. It takes about five."""


class NotCompiledError(Exception):
    """Why a source could not be compiled or loaded, as a clause."""


def load_compiled(source: Path, options: Sequence[str], headers: Sequence[Path] = ()) -> ctypes.CDLL:
    """The library of a C++ source: from the cache folder, or compiled now and kept there.

    The compiler is `$CXX`, or the first of c++, g++ and clang++ on the path that can.

    Args:
        source: one file.
        options: what the compiler is told of this CPU, say. Libraries of other options are kept beside this one.
        headers: what the source includes of isotype's own.

    Raises:
        NotCompiledError: no compiler, or all failed; or the cache folder cannot be written.
    """
    reasons = []
    for compiler in find_compilers():
        try:
            return _loaded(compiler, [source, *headers], options)
        except NotCompiledError as error:
            reasons.append(str(error))
        except (OSError, RuntimeError) as error:  # RuntimeError: nobody's home to keep a cache in
            reasons.append(f"{source.name} could not be compiled or loaded: {error}")
    raise NotCompiledError("; ".join(reasons))


def find_compilers() -> list[list[str]]:
    """The commands of the compilers on this machine, at least one.

    Raises:
        NotCompiledError: there is none.
    """
    given = os.environ.get("CXX", "").strip()
    try:
        commands = [shlex.split(given)] if given else [[name] for name in _COMPILERS]
    except ValueError as error:
        raise NotCompiledError(f"$CXX is {given!r}: {error}") from error
    found = [[path, *more] for name, *more in commands if (path := shutil.which(name))]
    if not found:
        sought = ", ".join(command[0] for command in commands)
        raise NotCompiledError(f"there is no C++ compiler ({sought}) on the path")
    return found


def _loaded(compiler: list[str], sources: Sequence[Path], options: Sequence[str]) -> ctypes.CDLL:
    file = _file(compiler, sources, options)
    if file.is_file():
        try:
            return ctypes.CDLL(str(file))
        except OSError:
            pass  # damaged: it is made again
    _compile(compiler, sources, options, file)
    return ctypes.CDLL(str(file))


def _file(compiler: list[str], sources: Sequence[Path], options: Sequence[str]) -> Path:
    program = Path(compiler[0]).resolve()
    stat = program.stat()
    key = hashlib.sha256(b"".join(each.read_bytes() for each in sources))
    key.update(
        repr((compiler, str(program), stat.st_size, stat.st_mtime_ns, _OPTIONS, tuple(options))).encode()
    )
    return default_cache_dir() / "compiled" / f"{sources[0].stem}-{key.hexdigest()[:16]}.so"


def _compile(compiler: list[str], sources: Sequence[Path], options: Sequence[str], file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    source, *headers = sources
    folders = sorted({f"-I{header.parent}" for header in headers})
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        made = Path(folder) / file.name
        command = [*compiler, *_OPTIONS, *options, *folders, str(source), "-o", str(made)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_LIMIT)
        except subprocess.TimeoutExpired as late:
            raise NotCompiledError(f"{compiler[0]} took more than {_LIMIT:.0f} s") from late
        if done.returncode:
            said = next(
                (line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[:200]
            )
            raise NotCompiledError(f"{compiler[0]} failed: {said}")
        made.replace(file)

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

    The compiler is `$CXX`, or the first of c++, g++ and clang++ on the path.

    Args:
        source: one file.
        options: what the compiler is told of this CPU, say. Libraries of other options are kept beside this one.
        headers: what the source includes of isotype's own.

    Raises:
        NotCompiledError: no compiler, or it failed; or the cache folder cannot be written.
    """
    compiler = find_compiler()
    file = _file(compiler, [source, *headers], options)
    try:
        if not file.is_file():
            folders = sorted({f"-I{header.parent}" for header in headers})
            _compile(compiler, source, [*options, *folders], file)
        return ctypes.CDLL(str(file))
    except OSError as error:
        raise NotCompiledError(f"{file} could not be made or loaded: {error}") from error


def find_compiler() -> list[str]:
    """The compiler's command.

    Raises:
        NotCompiledError: there is none.
    """
    given = shlex.split(os.environ.get("CXX", ""))
    for name, *more in [given] if given else [[name] for name in _COMPILERS]:
        if found := shutil.which(name):
            return [found, *more]
    sought = given[0] if given else ", ".join(_COMPILERS)
    raise NotCompiledError(f"there is no C++ compiler ({sought}) on the path")


def _file(compiler: list[str], sources: Sequence[Path], options: Sequence[str]) -> Path:
    program = Path(compiler[0]).resolve()
    stat = program.stat()
    key = hashlib.sha256(b"".join(each.read_bytes() for each in sources))
    key.update(
        repr((compiler, str(program), stat.st_size, stat.st_mtime_ns, _OPTIONS, tuple(options))).encode()
    )
    return default_cache_dir() / "compiled" / f"{sources[0].stem}-{key.hexdigest()[:16]}.so"


def _compile(compiler: list[str], source: Path, options: Sequence[str], file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        made = Path(folder) / file.name
        command = [*compiler, *_OPTIONS, *options, str(source), "-o", str(made)]
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

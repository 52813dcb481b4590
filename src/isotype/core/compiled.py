"""Compiles isotype's C++ sources once on each machine. Without a compiler, torch's operators compute the same
results.

The code of a compiled library runs in this process. Therefore isotype loads only libraries of this user, from a
folder that other users cannot write to. The checksum in the name of a file is verified before the library is loaded,
because a truncated library can end the process (SIGBUS).
"""

import ctypes
import hashlib
import logging
import os
import shlex
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from isotype.core.cache import LIBRARIES, default_cache_dir
from isotype.core.files import bring_to_disk, wait_for_turn

SWITCH = "ISOTYPE_COMPILE"
"""Name of an environment variable. With the value 0, no libraries are compiled or loaded."""

logger = logging.getLogger("isotype")

LOCK = "turn.lock"
"""Lock file in the folder of libraries. A process locks this file while the compiler runs, and never removes it."""

_COMPILERS = ("c++", "g++", "clang++")
_OPTIONS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-shared",
    "-fopenmp",  # torch links the same OpenMP library, so both use the same threads
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-strict-aliasing",  # values are copied as bytes and read as vector lanes
)
_LIMIT = 300.0
"""Timeout of a compiler in seconds. Compiling takes about 5 seconds."""


class NotCompiledError(Exception):
    """A source could not be compiled or loaded. The message of the error is a clause."""


class RefusedError(NotCompiledError):
    """Another user could have written the library."""


def load_compiled(source: Path, options: Sequence[str], headers: Sequence[Path] = ()) -> ctypes.CDLL:
    """Load the library of a C++ source from the cache folder. If the folder does not contain the library, compile it
    first.

    The compiler is `$CXX`, or the first of c++, g++ and clang++ that succeeds. The source includes `headers`.

    Raises:
        NotCompiledError: compiling failed, no compiler is installed, compiling is off, or the cache folder cannot be
            used.
    """
    reasons = []
    for compiler in find_compilers():
        try:
            return _loaded(compiler, [source, *headers], options)
        except RefusedError:
            raise
        except NotCompiledError as error:
            reasons.append(str(error))
        except (OSError, RuntimeError) as error:  # RuntimeError: no home directory for a cache
            reasons.append(f"{source.name} could not be compiled or loaded: {error}")
    raise NotCompiledError("; ".join(reasons))


def find_compilers() -> list[list[str]]:
    """Return the commands of this machine's compilers. Raise NotCompiledError without one."""
    switch = os.environ.get(SWITCH, "").strip()
    if switch not in ("", "0", "1"):
        raise NotCompiledError(f"${SWITCH} is {switch!r}: 0 switches compiling off, 1 is the default")
    if switch == "0":
        raise NotCompiledError(f"${SWITCH} is 0")
    chosen = os.environ.get("CXX", "").strip()
    try:
        commands = [shlex.split(chosen)] if chosen else [[name] for name in _COMPILERS]
    except ValueError as error:
        raise NotCompiledError(f"$CXX is {chosen!r}: {error}") from error
    compilers = [[path, *more] for name, *more in commands if (path := shutil.which(name))]
    if not compilers:
        sought = ", ".join(command[0] for command in commands)
        raise NotCompiledError(f"there is no C++ compiler ({sought}) on the path")
    return compilers


def check_folder() -> None:
    """Raise `RefusedError` if the folder of libraries exists, but is not safe to load from."""
    folder = default_cache_dir() / LIBRARIES
    if folder.exists():
        _refuse_others(folder)


def _loaded(compiler: list[str], sources: Sequence[Path], options: Sequence[str]) -> ctypes.CDLL:
    folder, name = default_cache_dir() / LIBRARIES, _name(compiler, sources, options)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _refuse_others(folder)
    library = _cached(folder, name)
    if library is None:
        with wait_for_turn(folder / LOCK) as locked:
            if locked:  # no compiler is running: remove what killed processes left
                for unfinished in folder.glob(".making-*"):
                    shutil.rmtree(unfinished, ignore_errors=True)
            library = _cached(folder, name) or _compile(compiler, sources, options, folder / name)
    return ctypes.CDLL(str(library))


def _name(compiler: list[str], sources: Sequence[Path], options: Sequence[str]) -> str:
    program = Path(compiler[0]).resolve()
    status = program.stat()
    key = hashlib.sha256(b"".join(source.read_bytes() for source in sources))
    key.update(
        repr((compiler, str(program), status.st_size, status.st_mtime_ns, _OPTIONS, tuple(options))).encode()
    )
    return f"{sources[0].stem}-{key.hexdigest()[:16]}"


def _cached(folder: Path, name: str) -> Path | None:
    """Return the cached library whose bytes match the checksum in its name. Delete damaged libraries."""
    for file in sorted(folder.glob(f"{name}-*.so")):
        _refuse_others(file)
        if file.stem == f"{name}-{_checksum(file)}":
            return file
        file.unlink(missing_ok=True)
    return None


def _checksum(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16]


def _refuse_others(path: Path) -> None:
    if not hasattr(os, "geteuid"):
        return  # on Windows the folders of a user are private, and file modes say nothing
    status, user = path.stat(), os.geteuid()  # stat follows links, as the loader does
    if status.st_uid != user:
        why = f"{path} belongs to user {status.st_uid}, but this is user {user}"
    elif status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        why = f"{path} may be written by other users (mode {stat.S_IMODE(status.st_mode):o})"
    else:
        return
    _warn(
        f"{why}, so no compiled library is loaded; remove this path, or set ISOTYPE_CACHE to your own folder"
    )
    raise RefusedError(why)


@cache
def _warn(message: str) -> None:
    logger.warning(message)


def _compile(compiler: list[str], sources: Sequence[Path], options: Sequence[str], target: Path) -> Path:
    """Compile a source, and return the path of the library: `target` with a checksum at the end of its name."""
    source, *headers = sources
    includes = sorted({f"-I{header.parent}" for header in headers})
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".making-") as folder:
        built = Path(folder) / "library.so"
        command = [*compiler, *_OPTIONS, *options, *includes, str(source), "-o", str(built)]
        # A killed compiler leaves temporary files behind. So they are in this folder, too.
        environment = {**os.environ, "TMPDIR": folder}
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=_LIMIT, env=environment
            )
        except subprocess.TimeoutExpired as late:
            raise NotCompiledError(f"{compiler[0]} took more than {_LIMIT:.0f} s") from late
        if done.returncode:
            lines = done.stderr.splitlines()
            message = next((line for line in lines if "error" in line), done.stderr.strip()[:200])
            raise NotCompiledError(f"{compiler[0]} failed: {message}")
        built.chmod(0o700)  # not by the umask, which may let other users write the file
        bring_to_disk(built)
        library = target.with_name(f"{target.name}-{_checksum(built)}.so")
        built.replace(library)
        bring_to_disk(target.parent)
        return library

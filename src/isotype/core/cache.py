"""The cache folder for files that can be rebuilt, and the temporary folder used if it is not writable."""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import stat
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

logger = logging.getLogger("isotype")

LIBRARIES = "libraries"
"""Subfolder of the cache for compiled libraries."""


def default_cache_dir() -> Path:
    """Return the cache folder: `$ISOTYPE_CACHE`, `$XDG_CACHE_HOME/isotype` or `~/.cache/isotype`.

    If it is not writable, a warning is logged and a temporary folder of this process and its children is
    returned.
    """
    folder, why = _folder("ISOTYPE_CACHE", "isotype")
    if not why:
        return folder
    instead = _temporary()
    logger.warning(
        f"nothing can be kept in {folder} ({why}): {instead} is used until this process ends; "
        "set ISOTYPE_CACHE to a folder that can be written"
    )
    os.environ["ISOTYPE_CACHE"] = str(instead)  # for child processes
    return instead


def prepare_library_caches() -> None:
    """Point Hugging Face's libraries to a writable folder; call it before they are imported.

    Otherwise they fail in the middle of a command. A folder that is readable but not writable is still read:
    models are found in it, and only data sets are stored elsewhere.
    """
    folder, why = _folder("HF_HOME", "huggingface")
    if not why:
        return
    instead = _temporary() / "huggingface"
    if folder.is_dir() and os.access(folder, os.R_OK | os.X_OK):
        names = {"HF_DATASETS_CACHE": "datasets", "HF_MODULES_CACHE": "modules"}
        moved = {name: str(instead / each) for name, each in names.items() if name not in os.environ}
        what = "data sets are kept"
    else:
        moved, what = {"HF_HOME": str(instead)}, "what Hugging Face's libraries download is kept"
    os.environ.update(moved)
    if moved:
        logger.warning(
            f"nothing can be kept in {folder} ({why}): {what} in {instead} until this process ends; "
            "set HF_HOME to a folder that can be written"
        )


def why_unusable(folder: Path) -> str:
    """Return why a folder (or its first existing parent) is not writable, as a clause; "" if it is."""
    try:
        there = next(each for each in (folder, *folder.absolute().parents) if each.exists())
        with tempfile.TemporaryDirectory(prefix=".isotype-", dir=there):
            return ""
    except OSError as error:
        return error.strerror or str(error)


def _folder(variable: str, name: str) -> tuple[Path, str]:
    """Return (folder that the variable names, else `name` in the user's cache; reason if unusable, else "")."""
    chosen = os.environ.get(variable)
    path = Path(chosen) if chosen else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / name
    try:
        folder = path.expanduser()
    except RuntimeError as error:  # a user without a home
        return path, str(error)
    return folder, why_unusable(folder)


def _keep_libraries(folder: Path) -> None:
    """Link compiled libraries to a temporary folder shared by all processes of this user: compiling takes 18 s."""
    if not hasattr(os, "geteuid"):
        return
    kept = folder.with_name(f"isotype-libraries-{os.geteuid()}")
    with suppress(FileExistsError):
        kept.mkdir(mode=0o700)
    about = kept.lstat()  # of the link itself: its owner can change its target
    if stat.S_ISDIR(about.st_mode) and about.st_uid == os.geteuid():
        (folder / LIBRARIES).symlink_to(kept)


@cache
def _temporary() -> Path:
    folder, process = Path(tempfile.mkdtemp(prefix="isotype-")), os.getpid()
    _keep_libraries(folder)

    def remove() -> None:
        if os.getpid() == process:  # not in a copy of this process
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return folder

"""Where isotype keeps what it can make again, and what happens where nothing can be kept."""

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
"""Folder in the cache that compiled libraries are kept in."""


def default_cache_dir() -> Path:
    """Where isotype keeps what it can make again: `$ISOTYPE_CACHE`, `$XDG_CACHE_HOME/isotype` or `~/.cache/isotype`.

    Where nothing can be written there, a temporary folder of this process and of those that it starts, and one line says so.
    """
    folder, why = _folder("ISOTYPE_CACHE", "isotype")
    if not why:
        return folder
    instead = _temporary()
    logger.warning(
        f"nothing can be kept in {folder} ({why}): {instead} is used until this process ends; "
        "set ISOTYPE_CACHE to a folder that can be written"
    )
    os.environ["ISOTYPE_CACHE"] = str(instead)  # for the processes that this one starts
    return instead


def prepare_library_caches() -> None:
    """Let Hugging Face's libraries keep their files where they can; call it before they are imported.

    They fail in the midst of a command where their folder cannot be made. One that is there and can only be read goes on to be
    read: models are found in it, and only data sets are kept elsewhere.
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
    """Why nothing can be written to a folder, or to where it would be made, as a clause; "" where it can. Leaves nothing behind."""
    try:
        there = next(each for each in (folder, *folder.absolute().parents) if each.exists())
        with tempfile.TemporaryDirectory(prefix=".isotype-", dir=there):
            return ""
    except OSError as error:
        return error.strerror or str(error)


def _folder(variable: str, name: str) -> tuple[Path, str]:
    """(the folder that a variable names, else the one of this name in the user's cache; why nothing can be kept there, "" if it can)."""
    chosen = os.environ.get(variable)
    path = Path(chosen) if chosen else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / name
    try:
        folder = path.expanduser()
    except RuntimeError as error:  # a user without a home
        return path, str(error)
    return folder, why_unusable(folder)


def _keep_libraries(folder: Path) -> None:
    """Link the compiled libraries of a temporary folder to one that all processes of this user share: to compile them takes 18 s."""
    if not hasattr(os, "geteuid"):
        return
    kept = folder.with_name(f"isotype-libraries-{os.geteuid()}")
    with suppress(FileExistsError):
        kept.mkdir(mode=0o700)
    about = kept.lstat()  # of itself: whoever owns a link can change where it leads
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

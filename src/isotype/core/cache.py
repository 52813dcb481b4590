"""Cache folders of isotype and Hugging Face's libraries. If such a folder is not writable, a temporary folder replaces it."""

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


def default_cache_dir() -> Path:
    """Return the cache folder: `$ISOTYPE_CACHE`, `$XDG_CACHE_HOME/isotype` or `~/.cache/isotype`.

    If this folder is not writable, log a warning, and return a temporary folder for this process and its children.
    """
    folder, why = _folder("ISOTYPE_CACHE", "isotype")
    if not why:
        return folder
    instead = _temporary()
    logger.warning(
        f"nothing can be stored in {folder} ({why}): {instead} is used until this process ends; "
        "set ISOTYPE_CACHE to a folder that can be written"
    )
    os.environ["ISOTYPE_CACHE"] = str(instead)  # for child processes
    return instead


def prepare_library_caches() -> None:
    """If the cache of Hugging Face's libraries is not writable, set a temporary folder for them.

    Call this function before the libraries are imported. Models are still read from a cache that is readable. Data
    sets and modules are stored in the temporary folder.
    """
    folder, why = _folder("HF_HOME", "huggingface")
    if not why:
        return
    instead = _temporary() / "huggingface"
    if folder.is_dir() and os.access(folder, os.R_OK | os.X_OK):
        names = {"HF_DATASETS_CACHE": "datasets", "HF_MODULES_CACHE": "modules"}
        moved = {name: str(instead / sub) for name, sub in names.items() if name not in os.environ}
        what = "data sets are stored"
    else:
        moved, what = {"HF_HOME": str(instead)}, "downloads of Hugging Face's libraries are stored"
    os.environ.update(moved)
    if moved:
        logger.warning(
            f"nothing can be stored in {folder} ({why}): {what} in {instead} until this process ends; "
            "set HF_HOME to a folder that can be written"
        )


def why_unusable(folder: Path) -> str:
    """Return a clause on why a folder (or its first existing parent) is not writable; "" if it is writable."""
    try:
        existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        with tempfile.TemporaryDirectory(prefix=".isotype-", dir=existing):
            return ""
    except OSError as error:
        return error.strerror or str(error)


def _folder(variable: str, name: str) -> tuple[Path, str]:
    """Return (folder, reason why it is not writable). The reason is "" if the folder is writable."""
    chosen = os.environ.get(variable)
    path = Path(chosen) if chosen else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / name
    try:
        folder = path.expanduser()
    except RuntimeError as error:  # a user without a home
        return path, str(error)
    return folder, why_unusable(folder)


def _keep_libraries(folder: Path) -> None:
    """Let all processes of this user share a folder of compiled libraries. Compiling takes 18 s."""
    if not hasattr(os, "geteuid"):
        return
    shared = folder.with_name(f"isotype-libraries-{os.geteuid()}")
    with suppress(FileExistsError):
        shared.mkdir(mode=0o700)
    status = shared.lstat()  # not stat: the owner of a link could change its target later
    if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid():
        (folder / LIBRARIES).symlink_to(shared)


@cache
def _temporary() -> Path:
    folder, process = Path(tempfile.mkdtemp(prefix="isotype-")), os.getpid()
    _keep_libraries(folder)

    def remove() -> None:
        if os.getpid() == process:  # a forked child leaves the folder to its parent
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return folder

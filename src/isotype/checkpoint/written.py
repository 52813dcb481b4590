"""What has just been written, read back: headers, and the directories of archives."""

from __future__ import annotations

import zipfile
from pathlib import Path

from isotype.checkpoint.formats.headers import read_headers
from isotype.core.errors import CheckpointError, Problem, SaveError

_ARCHIVES = (".pt", ".pth", ".bin")


def require_readable(directory: Path) -> None:
    """Whether every safetensors file and every file of `torch.save` below `directory` is whole, by its own header.

    Raises:
        SaveError: one is not; each is named.
    """
    wrong = []
    for path in sorted(directory.rglob("*")):
        if path.suffix in (".safetensors", ".gguf"):
            try:
                read_headers(path)
            except CheckpointError as error:
                wrong.append((path, error.problems[0].given if error.problems else error.headline))
        elif path.suffix in _ARCHIVES and not zipfile.is_zipfile(path):
            wrong.append((path, "it does not end as torch.save ends a file"))
    if wrong:
        raise SaveError(
            "what was written cannot be read back",
            [
                Problem(f"{path}: {why}", "the file as it was written", "check the disk, or give another one")
                for path, why in wrong
            ],
        )

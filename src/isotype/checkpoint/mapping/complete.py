"""Whether a GGUF file holds every weight of its model."""

from __future__ import annotations

from pathlib import Path

from isotype.checkpoint.formats.config import build_on_meta
from isotype.checkpoint.formats.gguf_config import gguf_config
from isotype.checkpoint.formats.headers import read_headers
from isotype.checkpoint.locate import resolve_source
from isotype.checkpoint.mapping.match import match


def require_complete_gguf(path: str | Path) -> None:
    """Compare a GGUF file with the model that its metadata describe; of anything else `facts_of` does it.

    Raises:
        CheckpointError: tensors are missing, of another size than the model's or there twice; or there is no such file.
    """
    found = resolve_source(path)
    if isinstance(found, Path) and found.suffix == ".gguf":
        match(build_on_meta(gguf_config(found), str(found)), read_headers(found)).require_complete()

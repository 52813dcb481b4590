"""The transformers config of a GGUF file, by transformers' own reading of its metadata."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from isotype.checkpoint.formats.config import BUILD_ERRORS
from isotype.checkpoint.formats.gguf import read_gguf_header, without_vocabulary
from isotype.core.errors import CheckpointError, Problem


def gguf_config(path: Path) -> Any:
    """The config of a GGUF file.

    Raises:
        CheckpointError: the file is damaged, or of an architecture that transformers does not read from GGUF.
    """
    from huggingface_hub.errors import StrictDataclassError

    _, metadata = read_gguf_header(path)
    try:
        if not _size_is_read(str(metadata.get("general.architecture"))):
            return _config(path)
        with tempfile.TemporaryDirectory(prefix="isotype-") as scratch:
            copy = Path(scratch) / path.name
            copy.write_bytes(without_vocabulary(path))
            config = _config(copy)
    except (*BUILD_ERRORS, StrictDataclassError) as error:
        fix = "use the config.json of the model it was made from"
        problem = Problem(f"{path}: {error}", "an architecture that transformers reads from GGUF", fix)
        raise CheckpointError("transformers cannot read this GGUF file", [problem]) from error
    config.name_or_path = str(path.parent)
    return config


def _config(path: Path) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(path.parent, gguf_file=path.name)


def _size_is_read(architecture: str) -> bool:
    """Whether transformers takes the size of the vocabulary from its own key, not from the vocabulary."""
    from transformers import integrations

    # Those that transformers 5.23 has a reader of its own for, which skips the vocabulary, too.
    own = getattr(getattr(integrations, "gguf", None), "GGUF_CONFIG_ARCHS", ())
    keys = integrations.GGUF_CONFIG_MAPPING.get(architecture, ("vocab_size",))
    return architecture not in own and "vocab_size" in keys

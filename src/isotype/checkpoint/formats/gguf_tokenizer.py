"""The tokenizer and the config of a GGUF file's model, written once in transformers' format."""

from __future__ import annotations

import hashlib
import shutil
import uuid
import warnings
from collections.abc import Mapping
from importlib import metadata as packages
from pathlib import Path
from typing import Any

from isotype.checkpoint.formats.headers import CheckpointHeaders
from isotype.compat.transformers import gguf_bar_hidden, without_bars
from isotype.core.cache import default_cache_dir
from isotype.core.errors import CheckpointError, SaveError
from isotype.core.files import fsync_tree, write_failure
from isotype.core.pretrained import pretrained

_MIB = 1 << 20
# Part of a copy's fingerprint: raise it whenever what tokenizer_copy() writes changes, so that no stale copy is used.
_REVISION = 1
# transformers 5.23 does not know these values of tokenizer.ggml.pre and splits text as GPT-2 does. Their merges were
# learned on text whose digits were isolated first, "\p{N}" in llama.cpp's llama-vocab.cpp; without that
# "x\n  12" becomes other tokens than the model has been trained on.
_ISOLATED_DIGITS = frozenset(
    {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}
)
# These are unknown to it, too, but split as GPT-2 does.
_AS_GPT2 = frozenset({"gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling"})


def tokenizer_copy(headers: CheckpointHeaders, cache_dir: Path | None = None) -> Path:
    """Return a directory with the tokenizer and the config of a GGUF file's model, as by save_pretrained().

    It is cached in `cache_dir` (default `$ISOTYPE_CACHE/gguf`, else `~/.cache/isotype/gguf`) by the file's size and
    first and last MiB, and created atomically.
    """
    path = headers.path
    root = cache_dir or default_cache_dir() / "gguf"
    target = root / f"{path.stem}-{_fingerprint(path)}-tokenizer"
    if target.is_dir():
        return target
    _check_room(root)
    scratch = root / f".{target.name}.{uuid.uuid4().hex}"
    try:
        scratch.mkdir()
        _convert(path, headers.metadata, scratch)
        fsync_tree(scratch)
        try:
            scratch.rename(target)
        except OSError:
            if not target.is_dir():
                raise
            # Another process was faster; its copy is as good.
        return target
    except Exception as error:
        failure = write_failure(error, root)
        if failure is None:
            raise
        what, expected = f"{target}: {failure[1]}", "a directory that can be written, with room"
        fix = "free some room, or set ISOTYPE_CACHE to another directory"
        raise SaveError.of("the tokenizer of a GGUF file cannot be written", what, expected, fix) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _fingerprint(path: Path) -> str:
    """Return a hash of the file and of the versions that read it: an update may convert it differently."""
    size = path.stat().st_size
    digest = hashlib.sha256(f"{size} {_REVISION} {packages.version('transformers')}".encode())
    with path.open("rb") as file:
        digest.update(file.read(_MIB))
        file.seek(max(0, size - _MIB))
        digest.update(file.read(_MIB))
    return digest.hexdigest()[:16]


def _check_room(root: Path) -> None:
    try:
        root.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(root).free
    except OSError as error:
        what, fix = f"{root}: {error}", "set ISOTYPE_CACHE to another one"
        raise SaveError.of("no cache directory", what, "a directory that can be written", fix) from error
    if free < _MIB:
        what, expected = f"{root} has {free / _MIB:.1f} MiB left", "room for the tokenizer of a GGUF file"
        fix = "free some space, or set ISOTYPE_CACHE to another disk"
        raise SaveError.of("not enough disk space", what, expected, fix)


def _convert(path: Path, metadata: Mapping[str, object], target: Path) -> None:
    from transformers import AutoConfig, AutoTokenizer

    with without_bars(), gguf_bar_hidden():
        try:
            config = pretrained(AutoConfig, path.parent, gguf_file=path.name)
            tokenizer = pretrained(AutoTokenizer, path.parent, gguf_file=path.name)
        except (ValueError, KeyError, NotImplementedError) as error:
            headline = "transformers cannot read this GGUF file"
            expected = f"an architecture that transformers reads from GGUF (this one: {metadata.get('general.architecture')})"
            fix = "use the model's safetensors checkpoint instead"
            raise CheckpointError.of(headline, f"{path}: {error}", expected, fix) from error
        _mend_tokenizer(tokenizer, metadata)
        config.save_pretrained(target)
        tokenizer.save_pretrained(target)


def _mend_tokenizer(tokenizer: Any, metadata: Mapping[str, object]) -> None:
    """Restore what transformers omits from a tokenizer read from GGUF."""
    from tokenizers.pre_tokenizers import ByteLevel, Digits
    from tokenizers.pre_tokenizers import Sequence as InTurn

    split = metadata.get("tokenizer.ggml.pre")
    backend = tokenizer.backend_tokenizer
    if split in _ISOLATED_DIGITS:
        backend.pre_tokenizer = InTurn([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    elif split is not None and split not in _AS_GPT2 and isinstance(backend.pre_tokenizer, ByteLevel):
        warnings.warn(
            f"transformers does not know the pre-tokenizer {split!r} of this GGUF file and splits text as GPT-2 does: "
            "some texts become other tokens than in training; use the tokenizer of the original model",
            stacklevel=2,
        )
    length = metadata.get(f"{metadata.get('general.architecture')}.context_length")
    if isinstance(length, int):
        tokenizer.model_max_length = length

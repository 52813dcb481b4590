"""Calls `from_pretrained` of transformers and PEFT. The code of a checkpoint is never run."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from isotype.compat.imports import code_refused
from isotype.core.dtypes import dtypes_named
from isotype.core.errors import CheckpointError, UsageError

TOKENIZER_FILES = (
    "tokenizer_config.json",
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
)


def pretrained(kind: Any, source: Path | str | None, **arguments: Any) -> Any:
    """Return `kind.from_pretrained(source, …)`. If the files name custom code, transformers' own class is used.

    Raises:
        CheckpointError: only the code of the checkpoint can read its files.
        UsageError: `trust_remote_code` is True.
        OSError, ValueError: errors of `from_pretrained`.
    """
    if arguments.pop("trust_remote_code", False):
        expected = "a model and a tokenizer that need only the classes of transformers"
        fix = "omit trust_remote_code; to use code that you trust, load the model yourself, and pass the nn.Module"
        raise UsageError.of("code of a checkpoint is not run", "trust_remote_code=True", expected, fix)
    name = str(kind.__name__)
    if automatic := name.startswith("Auto"):
        arguments["trust_remote_code"] = False
    try:
        with code_refused():
            return kind.from_pretrained(source, **arguments)
    except (OSError, ValueError) as error:
        files = ("config.json",) if name == "AutoConfig" else (*TOKENIZER_FILES, "config.json")
        named = code_named(source, arguments.get("revision"), files) if automatic and source else iter(())
        for file, key, reference in named:
            what = f"{file}: {key} names {reference}"
            expected = "files that transformers reads without the checkpoint's code"
            fix = "use a converted checkpoint without custom code, or the tokenizer of the original model"
            raise CheckpointError.of("code of a checkpoint is not run", what, expected, fix) from error
        raise


def code_named(
    source: Path | str, revision: str | None, files: tuple[str, ...] = TOKENIZER_FILES
) -> Iterator[tuple[Path, str, str]]:
    """Yield (file, key, class) of each custom class that the files of a checkpoint name."""
    for name in files:
        path = _local(source, name, revision)
        if path is None:
            continue
        try:
            content = json.loads(path.read_bytes())
        except (OSError, ValueError, RecursionError):
            continue  # loading the file reports this error
        entries = content.get("auto_map") if isinstance(content, dict) else None
        if isinstance(entries, dict):
            keys = ("AutoConfig",) if name == "config.json" else tuple(entries)
            yield from ((path, f"auto_map.{key}", str(entries[key])) for key in keys if entries.get(key))
        elif entries:
            yield path, "auto_map", str(entries)


def saved_dtype(config: Any) -> torch.dtype | None:
    """Return the dtype that the `config.json` of a loaded model names, or else `config.dtype`; None if neither names a dtype.

    transformers 5 sets `config.dtype` to the dtype of the loaded weights.
    """
    source = getattr(config, "name_or_path", None)
    path = _local(source, "config.json", None) if isinstance(source, str) and source else None
    try:
        content = json.loads(path.read_bytes()) if path else {}
    except (OSError, ValueError, RecursionError):
        content = {}
    names = dtypes_named(content) if isinstance(content, dict) else []
    dtype = getattr(torch, names[0], None) if names else getattr(config, "dtype", None)
    return dtype if isinstance(dtype, torch.dtype) else None


def _local(source: Path | str, name: str, revision: str | None) -> Path | None:
    if Path(source).is_dir():
        path = Path(source) / name
        return path if path.is_file() else None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(str(source), name, revision=revision)
    except HFValidationError:
        return None  # no hub id, such as `embedded:smollm2` or the path of a removed directory
    return Path(cached) if isinstance(cached, str) else None

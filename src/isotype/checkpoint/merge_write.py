"""How a merged model is written, dense, quantized in bitsandbytes' format or as a GGUF file, and opened again."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from isotype.checkpoint.export.gguf_model import write_gguf
from isotype.checkpoint.load import load, without_bars
from isotype.checkpoint.resolve import resolve_precision
from isotype.checkpoint.written import require_readable
from isotype.core.dtypes import GGUF_TYPES, QUANTIZATIONS
from isotype.core.errors import Problem, SaveError, UsageError
from isotype.core.staging import NO_ROOM, fsync_tree, publish_directory, write_failure

FORMATS = (*QUANTIZATIONS, *GGUF_TYPES)
"""What a merged model can be stored as besides dense safetensors: bitsandbytes' formats, and types of GGUF."""


def check_output(output: Path) -> None:
    """Whether nothing is there that would be overwritten.

    Raises:
        UsageError: something is.
    """
    if output.is_dir() and not any(output.iterdir()):
        return
    if output.exists():
        kind = "a directory with files in it" if output.is_dir() else "a file"
        raise UsageError(
            "the output directory is taken",
            [
                Problem(
                    f"--output {output}: {kind}",
                    "a directory that does not exist yet, or an empty one",
                    "give another one, or remove it first",
                )
            ],
        )


@contextmanager
def staged(output: Path) -> Iterator[Path]:
    """Where to build what is published as `output` in the end.

    Raises:
        SaveError: the disk is full or cannot be written; nothing is left behind.
    """
    built = output.parent / f".{output.name}.{uuid.uuid4().hex}"
    try:
        with disk_errors(output):
            built.mkdir(parents=True)
        yield built
        check_output(output)  # again: what came there in the meantime is not ours to remove
        with disk_errors(output):
            require_readable(built)
            fsync_tree(built)
            publish_directory(built, output)
    finally:
        shutil.rmtree(built, ignore_errors=True)


def write_merged(
    model: Any, tokenizer: Any, directory: Path, dtype: torch.dtype, stored: str | None
) -> list[str]:
    """Write the merged model and its tokenizer into `directory`.

    Args:
        model: dense, its weights in `dtype` and pinned ones in float32.
        tokenizer: or processor, or None.
        directory: exists and is empty.
        dtype: that the config names.
        stored: None for dense safetensors, else one of `FORMATS`.

    Returns:
        What is not as asked, in sentences.

    Raises:
        SaveError: there is no room.
        UsageError, PrecisionError: as `write_gguf`.
    """
    seen = {parameter.data_ptr(): parameter for parameter in model.parameters()}
    needed = sum(parameter.nbytes for parameter in seen.values())
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise _no_room(
            directory.parent, f"{free / 1e9:.2f} GB are free", f"{needed / 1e9:.2f} GB for the weights"
        )
    if stored in GGUF_TYPES:
        words = getattr(tokenizer, "tokenizer", tokenizer)  # of a processor, the part for text
        if words is None or not getattr(words, "is_fast", False):
            given = "no tokenizer that can be read as tokenizer.json"
            fix = "copy tokenizer.json beside the adapter"
            raise UsageError("a GGUF file holds its tokenizer", [Problem(given, "a fast tokenizer", fix)])
        name = Path(str(model.config._name_or_path)).stem or "model"
        return write_gguf(model, words, directory / f"model-{stored}.gguf", stored, f"{name} merged")
    with without_bars():
        model.save_pretrained(directory)
    # save_pretrained names the dtype of the first parameter it finds, which may be a pinned one.
    model.config.dtype = dtype
    model.config.save_pretrained(directory)
    if tokenizer is not None:
        tokenizer.save_pretrained(directory)
    return []


def quantize_written(directory: Path, model_class: Any, dtype: torch.dtype, stored: str) -> None:
    """Store the dense model in `directory` in a format of bitsandbytes, as transformers saves and loads it.

    The quantized weights are those that `isotype.load` makes of the dense ones; pinned parameters stay float32.
    """
    policy = replace(resolve_precision(directory, dtype, stored, "cpu"), device="cpu")
    model = load(directory, policy, model_class=model_class)
    for path in directory.glob("*.safetensors*"):
        path.unlink()
    with without_bars():
        model.save_pretrained(directory)


def open_again(model_class: Any, directory: Path, stored: str | None) -> Any:
    """The written model as plain transformers loads it."""
    with without_bars():
        if stored not in GGUF_TYPES:
            return model_class.from_pretrained(directory, dtype="auto")
        from transformers.utils.quantization_config import GgufConfig

        (path,) = directory.glob("*.gguf")
        return model_class.from_pretrained(
            directory,
            gguf_file=path.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.float32,
        )


@contextmanager
def disk_errors(output: Path) -> Iterator[None]:
    """A failure to write becomes a SaveError about `output`."""
    try:
        yield
    except SaveError:
        raise
    except Exception as error:
        failure = write_failure(error, output.parent)
        if failure is None:
            raise
        number, reason = failure
        full = "the disk is full: " if number in NO_ROOM else ""
        raise _no_room(output, f"{full}{reason}", "a directory with room that can be written") from error


def _no_room(place: Path, given: str, expected: str) -> SaveError:
    fix = "free some space, or give --output on another disk"
    return SaveError(
        "the merged model cannot be written",
        [Problem(f"{place}: {given}", expected, fix)],
        hint="the adapter and its base are as they were, and nothing is left behind: the same command goes on",
    )

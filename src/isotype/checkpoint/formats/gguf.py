"""GGUF: its header without the weights, and a dense copy of a model that transformers loads like any other.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
A GGUF's blocks cannot be loaded straight into nf4 or int8, and unpacking them takes long, so the unpacked model is
kept on disk.
"""

from __future__ import annotations

import functools
import hashlib
import math
import mmap
import os
import shutil
import struct
import uuid
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata as packages
from pathlib import Path
from typing import Any

import torch

from isotype.checkpoint.formats.tensor import DAMAGED, TensorHeader, by_name, damaged, file_size
from isotype.core.dtypes import dtype_name, from_safetensors_name
from isotype.core.errors import CheckpointError, Problem, SaveError

# ggml refuses tensors of more dimensions.
_MAX_DIMENSIONS = 4
# Fixed-size value types of GGUF metadata, as struct formats: u8 i8 u16 i16 u32 i32 f32 bool u64 i64 f64.
_SCALARS: Mapping[int, str] = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9
_MIB = 1 << 20
# Part of a copy's fingerprint: raise it whenever what dense_copy() writes changes, so that no stale copy is used.
_REVISION = 1
# transformers 5.23 does not know these values of tokenizer.ggml.pre and splits text as GPT-2 does. Their merges were
# learned on text whose digits were isolated first, "\p{N}" in llama.cpp's llama-vocab.cpp; without that
# "x\n  12" becomes other tokens than the model has been trained on.
_ISOLATED_DIGITS = frozenset(
    {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}
)
# And these it does not know either, but GPT-2's split is theirs.
_AS_GPT2 = frozenset({"gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling"})


def read_gguf_header(path: Path) -> tuple[tuple[TensorHeader, ...], Mapping[str, object]]:
    """The tensors of a GGUF file sorted by name, and its metadata: scalars and strings, without the arrays.

    The file is mapped, not read, and arrays are stepped over: a vocabulary has some 10^5 strings, on which
    gguf.GGUFReader spends seconds.

    Raises:
        CheckpointError: the file is missing, truncated, damaged or of an unknown version or tensor type.
    """
    if file_size(path) == 0:
        raise damaged(path, [Problem("an empty file", "a GGUF file", DAMAGED)])
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            return _parse(data, path)
        except (struct.error, OverflowError) as error:  # OverflowError: an offset that no file has
            given = f"the header goes on after the last byte, {len(data)}"
            raise damaged(path, [Problem(given, "a complete file", DAMAGED)]) from error
        except UnicodeDecodeError as error:
            raise damaged(path, [Problem(f"a name that is not UTF-8 ({error})", "UTF-8", DAMAGED)]) from error


def _parse(data: mmap.mmap, path: Path) -> tuple[tuple[TensorHeader, ...], Mapping[str, object]]:
    if data[:4] != b"GGUF":
        raise damaged(path, [Problem(f"the first bytes {data[:4]!r}", "b'GGUF'", "give a GGUF file")])
    version, tensor_count, entry_count = struct.unpack_from("<IQQ", data, 4)
    if version not in (2, 3):
        fix = "convert it again with a current llama.cpp (little-endian)"
        raise damaged(path, [Problem(f"GGUF version {version}", "version 2 or 3", fix)])
    metadata: dict[str, object] = {}
    *_, (_, _, at) = (("", 0, 24), *_entries(data, entry_count, metadata, path))
    parts = metadata.get("split.count", 0)
    if isinstance(parts, int) and parts > 1:
        fix = "join them with llama.cpp: llama-gguf-split --merge"
        raise damaged(path, [Problem(f"one of {parts} parts of a split GGUF", "a whole GGUF file", fix)])
    entries = []
    for _ in range(tensor_count):
        name, at = _string(data, at)
        (dimensions,) = struct.unpack_from("<I", data, at)
        if dimensions > _MAX_DIMENSIONS:
            given = f"tensor {name!r} of {dimensions} dimensions"
            raise damaged(path, [Problem(given, f"at most {_MAX_DIMENSIONS}", DAMAGED)])
        *sizes, kind, offset = struct.unpack_from(f"<{dimensions}QIQ", data, at + 4)
        at += 4 + 8 * dimensions + 12
        # ggml lists the fastest dimension first, torch last.
        entries.append((name, tuple(reversed(sizes)), kind, offset))
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment <= 0:
        raise damaged(path, [Problem(f"general.alignment {alignment!r}", "a positive number", DAMAGED)])
    start = -(-at // alignment) * alignment
    tensors = _tensors(entries, start, len(data), path)
    return by_name(tensors), metadata


def _entries(
    data: mmap.mmap, count: int, metadata: dict[str, object], path: Path
) -> Iterator[tuple[str, int, int]]:
    """(key, offset, offset past its value) of each metadata entry; notes the values, those of arrays left out."""
    at = 24
    for _ in range(count):
        begin = at
        key, at = _string(data, at)
        (kind,) = struct.unpack_from("<I", data, at)
        at = _value(data, at + 4, kind, key, metadata, path)
        yield key, begin, at


def without_vocabulary(path: Path) -> bytes:
    """A small GGUF file with the metadata of another, without the arrays of its tokenizer, and its tensors' names.

    What a config is made from. gguf.GGUFReader takes seconds for a vocabulary, whose size is noted under its own key.

    Raises:
        CheckpointError: as `read_gguf_header`.
    """
    tensors, _ = read_gguf_header(path)
    metadata: dict[str, object] = {}
    kept: list[bytes] = []
    words = 0
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        for key, begin, end in _entries(data, struct.unpack_from("<Q", data, 16)[0], metadata, path):
            kind, _, size = struct.unpack_from("<IIQ", data, begin + 8 + len(key.encode()))
            if kind == _ARRAY and key.startswith("tokenizer."):
                words = size if key == "tokenizer.ggml.tokens" else words
            else:
                kept.append(data[begin:end])
    size_key = f"{metadata.get('general.architecture')}.vocab_size"
    if words and size_key not in metadata:
        kept.append(_text(size_key) + struct.pack("<II", 4, words))
    header = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(kept)) + b"".join(kept)
    # One float32 each: only the names are of interest.
    header += b"".join(_text(tensor.name) + struct.pack("<IQIQ", 1, 1, 0, 0) for tensor in tensors)
    alignment = metadata.get("general.alignment", 32)
    assert isinstance(alignment, int)  # or the header would not have been read
    return header + bytes(-len(header) % alignment + alignment)


def _text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def _string(data: mmap.mmap, at: int) -> tuple[str, int]:
    (length,) = struct.unpack_from("<Q", data, at)
    (text,) = struct.unpack_from(f"{_within(data, length)}s", data, at + 8)
    return text.decode("utf-8"), at + 8 + length


def _within(data: mmap.mmap, length: int) -> int:
    # struct cannot even write down a format of absurd length; one byte past the end fails the same way.
    return min(length, len(data) + 1)


def _value(data: mmap.mmap, at: int, kind: int, key: str, metadata: dict[str, object], path: Path) -> int:
    """Notes one metadata value (arrays are stepped over) and returns the offset past it."""
    if kind in _SCALARS:
        form = f"<{_SCALARS[kind]}"
        (metadata[key],) = struct.unpack_from(form, data, at)
        return at + struct.calcsize(form)
    if kind == _STRING:
        metadata[key], at = _string(data, at)
        return at
    if kind == _ARRAY:
        element, count = struct.unpack_from("<IQ", data, at)
        at += 12
        if element in _SCALARS:
            size: int = count * struct.calcsize(_SCALARS[element])
            return at + size
        if element == _STRING:
            for _ in range(count):
                (length,) = struct.unpack_from("<Q", data, at)
                at += 8 + length
            return at
        kind = element
    raise damaged(path, [Problem(f"metadata {key!r} of type {kind}", "a GGUF value type", DAMAGED)])


def _tensors(
    entries: Sequence[tuple[str, tuple[int, ...], int, int]], start: int, end: int, path: Path
) -> list[TensorHeader]:
    try:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
    except ImportError as error:
        fix = "pip install gguf"
        raise CheckpointError(
            "gguf is not installed", [Problem(str(path), "the library gguf, which knows its types", fix)]
        ) from error
    types = {kind.value: (kind.name, *GGML_QUANT_SIZES[kind]) for kind in GGMLQuantizationType}
    problems: list[Problem] = []
    tensors: list[TensorHeader] = []
    seen: set[str] = set()
    cut: list[str] = []
    for name, shape, kind, offset in entries:
        if name in seen:
            problems.append(Problem(f"tensor {name!r} twice", "each name once", DAMAGED))
        seen.add(name)
        if kind not in types:
            fix = "update gguf (pip install -U gguf), or convert the model again"
            problems.append(Problem(f"tensor {name!r} of type {kind}", "a type that gguf knows", fix))
            continue
        type_name, block, block_bytes = types[kind]
        if shape and shape[-1] % block:
            given = f"tensor {name!r}: rows of {shape[-1]} elements in {type_name}"
            problems.append(Problem(given, f"a multiple of {block}", DAMAGED))
            continue
        nbytes = math.prod(shape) // block * block_bytes
        if start + offset + nbytes > end:
            cut.append(name)
        dtype = from_safetensors_name(type_name)
        tensors.append(TensorHeader(name, type_name, dtype, shape, nbytes, path, start + offset))
    if cut:
        given = f"{len(cut)} tensors end beyond the file, first {cut[0]!r}"
        problems.append(Problem(given, "a complete file", DAMAGED))
    if problems:
        raise damaged(path, problems)
    return tensors


def dense_copy(
    gguf_path: str | Path, dtype: torch.dtype = torch.bfloat16, cache_dir: Path | None = None
) -> Path:
    """A directory with the model of a GGUF file unpacked to `dtype`, and its tokenizer, as save_pretrained() writes.

    The copy is made once and kept: it is found again by the file's size and first and last MiB. It appears whole or
    not at all, also when several processes make it at the same time.

    Args:
        gguf_path: the GGUF file.
        dtype: storage dtype of the copy's weights.
        cache_dir: where copies are kept; default `$ISOTYPE_CACHE/gguf`, else `~/.cache/isotype/gguf`.

    Raises:
        CheckpointError: the file is damaged, or of an architecture that transformers cannot read from GGUF.
        SaveError: the copy cannot be written.
    """
    return _copy(Path(gguf_path), dtype, cache_dir)


def tokenizer_copy(gguf_path: str | Path, cache_dir: Path | None = None) -> Path:
    """A directory with the tokenizer and the config of a GGUF file's model, kept as `dense_copy` keeps its own.

    Raises:
        CheckpointError: the file is damaged, or of an architecture that transformers cannot read from GGUF.
        SaveError: the copy cannot be written.
    """
    return _copy(Path(gguf_path), None, cache_dir)


def _copy(path: Path, dtype: torch.dtype | None, cache_dir: Path | None) -> Path:
    """The copy with weights in `dtype`, or without weights."""
    tensors, metadata = read_gguf_header(path)
    target = _copy_path(path, dtype, cache_dir)
    root = target.parent
    if target.is_dir():
        return target
    _check_room(root, sum(tensor.elements for tensor in tensors) * dtype.itemsize if dtype else _MIB)
    scratch = root / f".{target.name}.{uuid.uuid4().hex}"
    try:
        scratch.mkdir()
        _convert(path, metadata, dtype, scratch)
        try:
            scratch.rename(target)
        except OSError:
            if not target.is_dir():
                raise
            # Another process was faster; its copy is as good.
        return target
    except OSError as error:
        problem = Problem(
            f"{target}: {error}", "a directory that can be written", "set ISOTYPE_CACHE to another one"
        )
        what = "dense copy" if dtype else "tokenizer"
        raise SaveError(f"the {what} of a GGUF file cannot be written", [problem]) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def some_copy(gguf_path: str | Path) -> Path:
    """As `dense_copy`, in whichever dtype there is a copy already: float32, bfloat16, else a new one in bfloat16."""
    copies = (_copy_path(Path(gguf_path), dtype) for dtype in (torch.float32, torch.bfloat16))
    return next((copy for copy in copies if copy.is_dir()), None) or dense_copy(gguf_path)


def _copy_path(path: Path, dtype: torch.dtype | None, cache_dir: Path | None = None) -> Path:
    root = cache_dir or default_cache_dir() / "gguf"
    return root / f"{path.stem}-{_fingerprint(path)}-{dtype_name(dtype) if dtype else 'tokenizer'}"


def default_cache_dir() -> Path:
    """Where isotype keeps what it can make again: `$ISOTYPE_CACHE`, `$XDG_CACHE_HOME/isotype` or `~/.cache/isotype`."""
    if own := os.environ.get("ISOTYPE_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "isotype"


def _fingerprint(path: Path) -> str:
    """Of the file, and of the code that reads it: an update may unpack it differently."""
    size = path.stat().st_size
    digest = hashlib.sha256(f"{size} {_REVISION} {packages.version('transformers')}".encode())
    with path.open("rb") as file:
        digest.update(file.read(_MIB))
        file.seek(max(0, size - _MIB))
        digest.update(file.read(_MIB))
    return digest.hexdigest()[:16]


def _check_room(root: Path, needed: int) -> None:
    try:
        root.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(root).free
    except OSError as error:
        problem = Problem(
            f"{root}: {error}", "a directory that can be written", "set ISOTYPE_CACHE to another one"
        )
        raise SaveError("no cache directory", [problem]) from error
    if free < needed:
        problem = Problem(
            f"{root} has {free / 1e9:.1f} GB left",
            f"{needed / 1e9:.1f} GB for the dense copy",
            "free some space, or set ISOTYPE_CACHE to another disk",
        )
        raise SaveError("not enough disk space", [problem])


def _convert(path: Path, metadata: Mapping[str, object], dtype: torch.dtype | None, target: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.quantization_config import GgufConfig

    with _quiet_bars():
        try:
            if dtype is None:
                model = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
            else:
                model = AutoModelForCausalLM.from_pretrained(
                    path.parent,
                    gguf_file=path.name,
                    quantization_config=GgufConfig(dequantize=True),
                    dtype=dtype,
                )
            tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        except (ValueError, KeyError, NotImplementedError) as error:
            problem = Problem(
                f"{path}: {error}",
                f"an architecture that transformers reads from GGUF (this one: {metadata.get('general.architecture')})",
                "use the model's safetensors checkpoint instead",
            )
            raise CheckpointError("transformers cannot read this GGUF file", [problem]) from error
        _mend_tokenizer(tokenizer, metadata)
        model.save_pretrained(target)
        tokenizer.save_pretrained(target)


def _mend_tokenizer(tokenizer: Any, metadata: Mapping[str, object]) -> None:
    """What transformers leaves out of a tokenizer restored from GGUF; the one place where it is put back."""
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


@contextmanager
def _quiet_bars() -> Iterator[None]:
    """No progress bars of transformers inside; outside they are as they were."""
    from huggingface_hub import constants
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars
    from transformers import modeling_gguf_pytorch_utils as legacy
    from transformers.utils import logging

    if constants.HF_HUB_DISABLE_PROGRESS_BARS is False:  # the user's word: always show them
        yield
        return
    shown, hub_shown = logging.is_progress_bar_enabled(), not are_progress_bars_disabled()
    bar = legacy.tqdm
    if shown:
        logging.disable_progress_bar()
    # This one bar asks no setting whether it is wanted.
    legacy.tqdm = functools.partial(bar, disable=True)
    try:
        yield
    finally:
        legacy.tqdm = bar
        if shown:
            logging.enable_progress_bar()
            if not hub_shown:
                disable_progress_bars()

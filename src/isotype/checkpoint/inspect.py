"""What a checkpoint holds, by groups of equal tensors of all layers, read from headers alone."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isotype.checkpoint.formats.config import read_json
from isotype.checkpoint.formats.headers import CheckpointHeaders, read_headers
from isotype.checkpoint.formats.hub import cached_headers, remote_headers
from isotype.checkpoint.formats.tensor import TensorHeader
from isotype.checkpoint.locate import resolve_source
from isotype.core.dtypes import dtype_name
from isotype.core.errors import CheckpointError, Problem

# What quantizers store beside a weight: the weight's name, then one of these.
_CONSTANT = re.compile(
    r"(?P<weight>.+?)(\.(absmax|quant_map|nested_absmax|nested_quant_map|quant_state\.bitsandbytes__(?P<four_bit>\w+))"
    r"|(?P<scale>_scale_inv|_scale))$"
)
# bitsandbytes writes the row scales of an int8 layer beside its weight, not below it.
_INT8 = re.compile(r"(?P<layer>.+)\.(SCB|weight_format)$")
_MXFP4 = re.compile(r"(?P<weight>.+)_(blocks|scales)$")
_LAYER_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
# What a quantization_config says that is worth a line.
_SHOWN = ("bnb_4bit_", "load_in_", "bits", "group_size", "desc_act")
_SHOWN_8BIT = ("load_in_", "llm_int8_threshold")
_PACKED_BITS = {"nf4": 4, "fp4": 4, "mxfp4": 4}


@dataclass(frozen=True)
class Mismatched:
    """A tensor that is stored otherwise than those of its group.

    Attributes:
        name: its full name.
        dtype: how it is stored.
    """

    name: str
    dtype: str


@dataclass(frozen=True)
class Group:
    """The tensors of one name in all layers and experts.

    Attributes:
        name: the tensors' name, layer and expert numbers written as `*`.
        count: how many tensors.
        dtype: how most of them are stored: a dtype's name, or a quantization format (`nf4`, `Q4_K`).
        shapes: every shape as stored, most frequent first; packed weights have a packed shape.
        values: numbers of weights in them; of packed formats the numbers packed, not the bytes.
        bytes: in the file, with their quantization constants.
        mismatched: those stored otherwise.
        unlike: the dtype of most of the checkpoint, where this group's float dtype differs; else None.
    """

    name: str
    count: int
    dtype: str
    shapes: tuple[tuple[int, ...], ...]
    values: int
    bytes: int
    mismatched: tuple[Mismatched, ...] = ()
    unlike: str | None = None


@dataclass(frozen=True)
class Total:
    """All tensors that are stored in one dtype or format."""

    dtype: str
    tensors: int
    values: int
    bytes: int


@dataclass(frozen=True)
class Inspection:
    """What one checkpoint holds.

    Attributes:
        path: what was read.
        format: `"safetensors"` or `"gguf"`.
        kind: `"model"` or `"adapter"`.
        groups: in the order of the layers' numbers and names.
        totals: by dtype or format, most bytes first.
        quantization: what config.json, or the tensors themselves, say about it; "" for plain float weights.
        config_dtype: the dtype that config.json names, or None.
        notes: where the file and its config disagree.
    """

    path: str
    format: str
    kind: str
    groups: tuple[Group, ...]
    totals: tuple[Total, ...]
    quantization: str = ""
    config_dtype: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(total.bytes for total in self.totals)

    @property
    def tensors(self) -> int:
        """Number of tensors, quantization constants counted with their weight."""
        return sum(total.tensors for total in self.totals)

    @property
    def values(self) -> int:
        """Number of weights."""
        return sum(total.values for total in self.totals)


@dataclass(frozen=True)
class _Stored:
    """A weight with the constants of its quantization."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    values: int
    bytes: int
    plain: bool


def inspect_checkpoint(path: str | Path, *, revision: str | None = None) -> Inspection:
    """Read the headers of a checkpoint and group its tensors.

    Args:
        path: a directory, a .safetensors file, an index of shards, a .gguf file, `embedded:NAME` or a hub id.
        revision: branch, tag or commit of a hub id.

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged, incomplete or pickled.
    """
    source = resolve_source(path)
    headers = _hub_headers(source, revision) if isinstance(source, str) else read_headers(source)
    config = _config(source)
    stored = gather(headers.tensors)
    main = _main_dtype(stored)
    groups = _groups(stored, main)
    named = _named_dtype(config)
    notes = []
    if named is not None and main is not None and named != main:
        notes.append(f"config.json says {named}, most unquantized weights are {main}")
    return Inspection(
        path=str(path),
        format=headers.format,
        kind=headers.kind,
        groups=groups,
        totals=_totals(stored),
        quantization=_quantization(config, stored),
        config_dtype=named,
        notes=tuple(notes),
    )


def _hub_headers(model_id: str, revision: str | None) -> CheckpointHeaders:
    found = cached_headers(model_id, revision)
    if found is not None:
        return found
    remote, notes = remote_headers(model_id, revision)
    if remote is None:
        fix = "check the spelling and the network, or give a local path"
        raise CheckpointError(
            "the headers on the hub cannot be read",
            [Problem(f"{model_id}: {'; '.join(notes)}", "a model on the hub, or an existing path", fix)],
        )
    return remote


def _config(source: Path | str) -> Mapping[str, Any]:
    if isinstance(source, str):
        return {}
    path = (source if source.is_dir() else source.parent) / "config.json"
    return read_json(path) if path.is_file() and source.suffix != ".gguf" else {}


def _named_dtype(config: Mapping[str, Any]) -> str | None:
    text = config.get("text_config")
    for holder in (config, text if isinstance(text, dict) else {}):
        value = holder.get("dtype") or holder.get("torch_dtype")
        if isinstance(value, str) and value != "auto":
            return value.removeprefix("torch.")
    return None


def _quantization(config: Mapping[str, Any], stored: Sequence[_Stored]) -> str:
    options = config.get("quantization_config")
    if isinstance(options, dict):
        method = str(options.get("quant_method", "bitsandbytes"))
        shown = _SHOWN_8BIT if options.get("load_in_8bit") else _SHOWN
        details = [
            f"{name.removeprefix('bnb_4bit_')}={value}"
            for name, value in options.items()
            if name.startswith(shown) and value not in (None, False)
        ]
        return " ".join([method, *details])
    formats = Counter(tensor.dtype for tensor in stored if not tensor.plain)
    return ", ".join(name for name, _ in formats.most_common())


def gather(tensors: Iterable[TensorHeader]) -> tuple[_Stored, ...]:
    """Weights with their quantization constants: format, values and bytes of each."""
    constants: dict[str, list[TensorHeader]] = defaultdict(list)
    formats: dict[str, str] = {}
    weights = []
    names = {tensor.name: tensor for tensor in tensors}
    for name, tensor in names.items():
        owner, form = _constant_of(name, names)
        if owner is None:
            weights.append(tensor)
            continue
        constants[owner].append(tensor)
        if form:
            formats[owner] = form
    return tuple(_stored(tensor, formats.get(tensor.name), constants[tensor.name]) for tensor in weights)


def _constant_of(name: str, names: Mapping[str, TensorHeader]) -> tuple[str | None, str | None]:
    """(the weight that the tensor is a constant of, the format it shows), (None, None) for a weight."""
    found = _CONSTANT.fullmatch(name)
    if found and found["weight"] in names:
        return found["weight"], found["four_bit"]
    found = _INT8.fullmatch(name)
    if found and f"{found['layer']}.weight" in names:
        return f"{found['layer']}.weight", "int8"
    found = _MXFP4.fullmatch(name)
    if found and name.endswith("_scales") and f"{found['weight']}_blocks" in names:
        return f"{found['weight']}_blocks", "mxfp4"
    return None, None


def _stored(tensor: TensorHeader, form: str | None, constants: Sequence[TensorHeader]) -> _Stored:
    plain = tensor.dtype_name if tensor.dtype is None else dtype_name(tensor.dtype)
    dtype = form or plain
    bits = _PACKED_BITS.get(dtype)
    return _Stored(
        name=tensor.name,
        dtype=dtype,
        shape=tensor.shape,
        values=tensor.bytes * 8 // bits if bits else tensor.elements,
        bytes=tensor.bytes + sum(constant.bytes for constant in constants),
        plain=form is None and tensor.dtype is not None and tensor.dtype.is_floating_point,
    )


def _main_dtype(stored: Iterable[_Stored]) -> str | None:
    """The float dtype of most weights that are not quantized."""
    counts: Counter[str] = Counter()
    for tensor in stored:
        if tensor.plain:
            counts[tensor.dtype] += tensor.values
    return counts.most_common(1)[0][0] if counts else None


def folded_name(name: str) -> str:
    """`model.layers.3.mlp.up_proj.weight` -> `model.layers.*.mlp.up_proj.weight`."""
    return _LAYER_NUMBER.sub("*", name)


def _groups(stored: Iterable[_Stored], main: str | None) -> tuple[Group, ...]:
    together: dict[str, list[_Stored]] = defaultdict(list)
    for tensor in stored:
        together[folded_name(tensor.name)].append(tensor)
    return tuple(_group(name, together[name], main) for name in sorted(together))


def _group(name: str, tensors: Sequence[_Stored], main: str | None) -> Group:
    dtype = Counter(tensor.dtype for tensor in tensors).most_common(1)[0][0]
    shapes = Counter(tensor.shape for tensor in tensors)
    plain = any(tensor.plain for tensor in tensors if tensor.dtype == dtype)
    mismatched = [tensor for tensor in tensors if tensor.dtype != dtype]
    return Group(
        name=name,
        count=len(tensors),
        dtype=dtype,
        shapes=tuple(shape for shape, _ in shapes.most_common()),
        values=sum(tensor.values for tensor in tensors),
        bytes=sum(tensor.bytes for tensor in tensors),
        mismatched=tuple(
            Mismatched(tensor.name, tensor.dtype)
            for tensor in sorted(mismatched, key=lambda t: _natural(t.name))
        ),
        unlike=main if plain and dtype != main else None,
    )


def _natural(name: str) -> list[tuple[int, int, str]]:
    """Sorts `layers.9` before `layers.10`."""
    return [
        (0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", name) if part
    ]


def _totals(stored: Iterable[_Stored]) -> tuple[Total, ...]:
    together: dict[str, list[_Stored]] = defaultdict(list)
    for tensor in stored:
        together[tensor.dtype].append(tensor)
    totals = [
        Total(dtype, len(some), sum(t.values for t in some), sum(t.bytes for t in some))
        for dtype, some in together.items()
    ]
    return tuple(sorted(totals, key=lambda total: (-total.bytes, total.dtype)))

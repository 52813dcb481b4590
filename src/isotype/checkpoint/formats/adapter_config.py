"""adapter_config.json, checked before PEFT reads it: types by PEFT's own fields, limits by one table."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import math
import re
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from isotype.checkpoint.formats.config import BUILD_ERRORS
from isotype.checkpoint.formats.json_file import read_json
from isotype.checkpoint.formats.tensor import TensorHeader
from isotype.core.errors import CheckpointError, Problem
from isotype.core.names import base_name, plural
from isotype.core.patterns import pattern_problems
from isotype.core.pretrained import pretrained

CONFIG_FILE = "adapter_config.json"
_AGAIN = "correct it, or copy the file again"
_MAX_RANK = 2**16


class _Field(NamedTuple):
    """Fields by their names: their type, where PEFT's own is another than it takes, and the numbers that they can be."""

    names: str
    kind: Any = None
    low: float = -math.inf
    high: float = math.inf


_FIELDS = tuple(
    _Field(*each)
    for each in (
        (r"(.*_)?r|subspace_rank|effective_rank", None, 1, _MAX_RANK),
        (r"rank_pattern", dict[str, int] | None, 1, _MAX_RANK),
        (r"alpha_pattern", dict[str, float] | None),
        (r"(.*_)?alpha", float | None, -1e9, 1e9),
        (r".*dropout.*(?<!_scale)", None, 0, 1),
        (r"init_(lora_)?weights", bool | str | None),
        (
            r"bias",
            Literal[
                "none", "all", "lora_only", "delora_only", "oft_only", "boft_only", "hra_only", "vera_only"
            ],
        ),
        (r"layer_replication", None, 0, 2_000),
        (r"layers_to_transform", None, 0, 100_000),
        (r"trainable_token_indices|token_indices", None, 0, 2**20),
        (r"auto_mapping", dict[str, str | None] | None),
        (r".*(seed|key|step|warmup|tinit|tfinal).*", None, -(2**63), 2**63),
        (r".*", None, -1e9, 1e7),
    )
)
"""The first row whose names fit a field counts."""
_EXPRESSIONS = (
    "target_modules",
    "exclude_modules",
    "feedforward_modules",
    "layers_pattern",
    "modules_to_save",
)
_COUNTED = re.compile(r"num_batches_tracked|indices|index|mask|seed|position_ids")


def read_config(directory: Path, tensors: Sequence[TensorHeader]) -> Any:
    """The `PeftConfig` in a directory beside the tensors of the adapter.

    Raises:
        CheckpointError: it is damaged, names no kind of adapter that PEFT knows, or holds values that cannot be; every one is named.
    """
    from peft import PeftConfig, PeftType
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    path = directory / CONFIG_FILE
    content = read_json(path)
    kind = content.get("peft_type")
    known = [each.value for each in PeftType]
    if kind not in known:
        what = f"{path}: peft_type {kind!r:.80}"
        expected = "a type that PEFT knows: " + ", ".join(known)
        raise CheckpointError.of(
            "unknown kind of adapter", what, expected, "update PEFT, or correct the file"
        )
    problems = [*_field_problems(content, path, PEFT_TYPE_TO_CONFIG_MAPPING[PeftType(kind)])]
    if content.get("megatron_config"):  # with it PEFT imports the module that megatron_core names
        what = f"{path}: megatron_config, with the module {content.get('megatron_core')!r:.80}"
        problems.append(
            Problem(
                what,
                "an adapter of transformers' layers: no module that a file names is imported",
                "leave it out",
            )
        )
    if not problems:
        names = {base_name(tensor.name).rpartition(".")[0] for tensor in tensors}
        expressions = {
            f"{path}: {name}": [value] if isinstance(value, str) else value
            for name in _EXPRESSIONS
            if isinstance(value := content.get(name), str) or (name == "layers_pattern" and value)
        }
        expressions |= {
            f"{path}: {name}": value
            for name, value in content.items()
            if name.endswith("_pattern") and isinstance(value, dict)
        }
        problems = [*pattern_problems(expressions, names), *_tensor_problems(content, tensors, path)]
    if problems:
        raise CheckpointError(f"the adapter {directory} cannot be read", problems)
    try:
        return pretrained(PeftConfig, str(directory))
    except BUILD_ERRORS as error:
        expected = f"the config of a {kind} adapter"
        raise CheckpointError.of(
            f"{CONFIG_FILE} cannot be read", f"{path}: {error}", expected, _AGAIN
        ) from error


def _field_problems(content: dict[str, Any], path: Path, kind: Any) -> Iterator[Problem]:
    hints = get_type_hints(kind)
    for name in (each.name for each in dataclasses.fields(kind) if each.name in content):
        value = content[name]
        row = next(row for row in _FIELDS if re.fullmatch(row.names, name))
        wanted = hints[name] if row.kind is None else row.kind
        what = f"{path}: {name} {value!r:.80}"
        if not _fits(value, wanted):
            yield Problem(what, _words(wanted), _AGAIN)
        elif any(not row.low <= number <= row.high for number in _numbers(value)):
            low = "" if row.low == -math.inf else f" from {row.low:g}"
            yield Problem(what, f"numbers{low} to {row.high:g}", _AGAIN)
        elif name in ("base_model_name_or_path", "revision") and not _names(value):
            yield Problem(what, "the name of a model or a revision, in letters that can be printed", _AGAIN)


def _names(value: str | None) -> bool:
    return value is None or (
        value.isprintable() and all(len(part.encode()) < 256 for part in value.split("/"))
    )


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        yield value
    elif isinstance(value, (list, dict)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _numbers(each)


def _choices(kinds: Sequence[Any]) -> list[Any]:
    """The types of a union; a text that is beside an enumeration is one of its values."""
    listed = any(inspect.isclass(each) and issubclass(each, enum.Enum) for each in kinds)
    return [each for each in kinds if not (listed and each is str)]


def _fits(value: Any, kind: Any) -> bool:
    """Whether a value of JSON can be one of a type."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return any(_fits(value, each) for each in _choices(inner))
    if origin is Literal:
        return any(value == each and type(value) is type(each) for each in inner)
    if origin is tuple:
        return isinstance(value, list) and len(value) == len(inner) and all(map(_fits, value, inner))
    if origin in (list, set):
        return isinstance(value, list) and all(_fits(each, inner[0]) for each in value)
    if origin is dict:
        return isinstance(value, dict) and all(_fits(each, inner[1]) for each in value.values())
    if kind is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < math.inf
    if kind is types.NoneType or kind in (bool, str, dict):
        return isinstance(value, kind)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if inspect.isclass(kind) and issubclass(kind, enum.Enum):
        return value in [each.value for each in kind]
    return isinstance(value, dict) if dataclasses.is_dataclass(kind) else True


_WORDS = {
    bool: "true or false",
    str: "text",
    int: "a whole number",
    float: "a number",
    types.NoneType: "null",
    dict: "an object",
}


def _words(kind: Any) -> str:
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return " or ".join(
            sorted({_words(each) for each in _choices(inner)}, key=lambda text: (text == "null", text))
        )
    if origin is Literal:
        return f"one of {', '.join(map(str, inner))}"
    if origin in (list, tuple, set):
        return f"a list of {_words(inner[0])}"
    if origin is dict:
        return f"an object of {_words(inner[1])}"
    if inspect.isclass(kind) and issubclass(kind, enum.Enum):
        return f"one of {', '.join(str(each.value) for each in kind)}"
    return _WORDS.get(kind, "an object")


def _tensor_problems(
    content: dict[str, Any], tensors: Sequence[TensorHeader], path: Path
) -> Iterator[Problem]:
    """Tensors that cannot be an adapter's: no numbers with a fraction, or another rank than their partner or the config has."""
    file = tensors[0].file.name if tensors else "adapter_model.safetensors"
    if not tensors:
        yield Problem(
            f"{path.parent / file} without a tensor", "the weights of an adapter", "copy the file again"
        )
    for tensor in tensors:
        if (
            tensor.dtype is not None
            and not tensor.dtype.is_floating_point
            and not _COUNTED.search(tensor.name)
        ):
            what = f"{file}: {base_name(tensor.name)} in {tensor.dtype_name}"
            yield Problem(what, "float32, bfloat16 or float16", "save the adapter again")
    if content.get("peft_type") not in ("LORA", "ADALORA") or not tensors:
        return
    shapes = {tensor.name: tensor.shape for tensor in tensors}
    for name, shape in shapes.items():
        other = shapes.get(
            name.replace("lora_A", "lora_B").replace("lora_embedding_A", "lora_embedding_B"), ()
        )
        if "_A" in name and len(shape) == len(other) == 2 and shape[0] != other[1]:
            what = f"{file}: {base_name(name)} of {list(shape)} beside B of {list(other)}"
            yield Problem(what, f"{plural(shape[0], 'column')} in B, as A has rows", "save the adapter again")
    widest = max((side for shape in shapes.values() for side in shape), default=0)
    for name in ("r", "init_r", "rank_pattern"):
        if any(number > widest for number in _numbers(content.get(name))):
            expected = f"at most {widest}, the longest side of a tensor in {file}"
            yield Problem(f"{path}: {name} {content[name]!r:.80}", expected, _AGAIN)

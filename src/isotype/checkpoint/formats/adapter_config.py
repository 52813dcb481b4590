"""Check adapter_config.json before PEFT reads it: types by PEFT's own fields, limits by one table."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, get_type_hints

from isotype.checkpoint.formats.config import BUILD_ERRORS
from isotype.checkpoint.formats.json_file import Entry, entry_problems, numbers_in, read_json
from isotype.checkpoint.formats.tensor import TensorHeader
from isotype.core.errors import CheckpointError, Problem
from isotype.core.names import base_name, pattern_problems, plural
from isotype.core.pretrained import pretrained

CONFIG_FILE = "adapter_config.json"
_AGAIN = "correct it, or copy the file again"
_MAX_RANK = 2**16


_Bias = Literal["none", "all", "lora_only", "delora_only", "oft_only", "boft_only", "hra_only", "vera_only"]
_ENTRIES = (
    Entry(r"(.*_)?r|subspace_rank|effective_rank", None, low=1, high=_MAX_RANK),
    Entry(r"rank_pattern", dict[str, int] | None, low=1, high=_MAX_RANK),
    Entry(r"alpha_pattern", dict[str, float] | None),
    Entry(r"(.*_)?alpha", float | None, low=-1e9, high=1e9),
    Entry(r".*dropout.*(?<!_scale)", None, low=0, high=1),
    Entry(r"init_(lora_)?weights", bool | str | None),
    Entry(r"bias", _Bias),
    Entry(r"layer_replication", None, low=0, high=2_000),
    Entry(r"layers_to_transform", None, low=0, high=100_000),
    Entry(r"trainable_token_indices|token_indices", None, low=0, high=2**20),
    Entry(r"auto_mapping", dict[str, str | None] | None),
    Entry(r".*(seed|key|step|warmup|tinit|tfinal).*", None, low=-(2**63), high=2**63),
    Entry(r".*", None, low=-1e9, high=1e7),
)
"""The first row that matches a field's name counts; types are given if PEFT's annotation differs from what it takes."""
_EXPRESSIONS = (
    "target_modules",
    "exclude_modules",
    "feedforward_modules",
    "layers_pattern",
    "modules_to_save",
)
_COUNTED = re.compile(r"num_batches_tracked|indices|index|mask|seed|position_ids")


def read_config(directory: Path, tensors: Sequence[TensorHeader]) -> Any:
    """Return a directory's `PeftConfig`, checked with the adapter's tensors; raise CheckpointError with all faults."""
    from peft import PeftConfig, PeftType
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    path = directory / CONFIG_FILE
    content = read_json(path)
    kind = content.get("peft_type")
    known = [each.value for each in PeftType]
    if kind not in known:
        what = f"{path}: peft_type {kind!r:.80}"
        expected, fix = "a type that PEFT knows: " + ", ".join(known), "update PEFT, or correct the file"
        raise CheckpointError.of("unknown kind of adapter", what, expected, fix)
    problems = [*_field_problems(content, path, PEFT_TYPE_TO_CONFIG_MAPPING[PeftType(kind)])]
    if content.get("megatron_config"):  # with it PEFT imports the module that megatron_core names
        what = f"{path}: megatron_config, with the module {content.get('megatron_core')!r:.80}"
        expected = "an adapter of transformers' layers: no module that a file names is imported"
        problems.append(Problem(what, expected, "leave it out"))
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
        what, expected = f"{path}: {error}", f"the config of a {kind} adapter"
        raise CheckpointError.of(f"{CONFIG_FILE} cannot be read", what, expected, _AGAIN) from error


def _field_problems(content: dict[str, Any], path: Path, kind: Any) -> Iterator[Problem]:
    hints = get_type_hints(kind)
    known = {each.name: content[each.name] for each in dataclasses.fields(kind) if each.name in content}
    yield from entry_problems(known, _ENTRIES, path, _AGAIN, hints)
    for name in ("base_model_name_or_path", "revision"):
        value = known.get(name) or ""
        if isinstance(value, str) and not (
            value.isprintable() and all(len(part.encode()) < 256 for part in value.split("/"))
        ):
            expected = "the name of a model or a revision, in letters that can be printed"
            yield Problem(f"{path}: {name} is {value!r:.80}", expected, _AGAIN)


def _tensor_problems(
    content: dict[str, Any], tensors: Sequence[TensorHeader], path: Path
) -> Iterator[Problem]:
    """Yield tensors that cannot be an adapter's: not of a float dtype, or of another rank than partner or config."""
    if not tensors:
        what = f"{path.parent / 'adapter_model.safetensors'} without a tensor"
        yield Problem(what, "the weights of an adapter", "copy the file again")
        return
    file = tensors[0].file.name
    for tensor in tensors:
        whole = tensor.dtype is not None and not tensor.dtype.is_floating_point
        if whole and not _COUNTED.search(tensor.name):
            what = f"{file}: {base_name(tensor.name)} in {tensor.dtype_name}"
            yield Problem(what, "float32, bfloat16 or float16", "save the adapter again")
    if content.get("peft_type") not in ("LORA", "ADALORA"):
        return
    shapes = {tensor.name: tensor.shape for tensor in tensors}
    for name, shape in shapes.items():
        other = shapes.get(re.sub("lora(_embedding)?_A", r"lora\1_B", name), ())
        if "_A" in name and len(shape) == len(other) == 2 and shape[0] != other[1]:
            what = f"{file}: {base_name(name)} of {list(shape)} beside B of {list(other)}"
            yield Problem(what, f"{plural(shape[0], 'column')} in B, as A has rows", "save the adapter again")
    widest = max((side for shape in shapes.values() for side in shape), default=0)
    for name in ("r", "init_r", "rank_pattern"):
        if any(number > widest for number in numbers_in(content.get(name))):
            what = f"{path}: {name} is {content[name]!r:.80}"
            yield Problem(what, f"at most {widest}, the longest side of a tensor in {file}", _AGAIN)

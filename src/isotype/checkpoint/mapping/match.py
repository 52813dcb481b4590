"""Compares a model with a checkpoint's headers: finds missing, surplus, wrongly shaped and duplicate tensors."""

import difflib
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from isotype.checkpoint.formats.config import names_in_other_classes, without_prefix
from isotype.checkpoint.formats.headers import CheckpointHeaders
from isotype.checkpoint.mapping.schemes import EXPECTED, READABLE
from isotype.checkpoint.mapping.stored import StoredTensor
from isotype.checkpoint.mapping.weight_map import WeightMap, weight_map
from isotype.compat.transformers import may_be_missing, may_be_surplus
from isotype.core.errors import CheckpointError, Problem
from isotype.core.formats import STORED
from isotype.core.names import distinct_names, grouped, listed, plural, starred, unwrapping
from isotype.model.quantized import replaces_conv1d
from isotype.precision.facts import QuantizationFacts

_SAME_PLACE = "use config.json and the weights from the same save of the model"
# Buffers that training does not use, and that older checkpoints lack.
_COUNTERS = (".num_batches_tracked",)
# Tensors that models now compute but older files have, and heads for multi-token prediction, which transformers does not
# load.
_KNOWN = (
    r"rotary(_emb)?\.inv_freq$|(^|\.)position_ids$|^(\w+\.)?(en|de)coder\.version$|"
    r"^(\w+\.)?mtp(_layers|_block)?\.|^rope_(freqs|factors_\w+)\.weight$|\.(nextn|attn_rot_embd)\b"
)
# Causal masks `[1, 1, length, length]`, and the number that stands for a masked score.
_MASKS = re.compile(r"\.(attn|attention)\.(bias|masked_bias|causal_mask)$")
# Scales of the keys and values in a cache: they do not belong to a weight.
_CACHE = re.compile(r"\.([kvq]|kv|output|prob)_(scale|zero_point)$")


def _how_to_save(name: str) -> str:
    """If `name` shows that the model has an adapter or a wrapper, return how to save the model without it; else ""."""
    if name.startswith("base_model.model.") or ".base_layer." in name:
        return "the file contains a base model and an adapter of PEFT: save the model that merge_and_unload() returns"
    return unwrapping(name)


def unknown_quantization(quantization: QuantizationFacts | None) -> bool:
    """Return True if the tensors of a quantized checkpoint cannot be identified by name."""
    return quantization is not None and quantization.method not in READABLE


@dataclass(frozen=True)
class WrongShape:
    """A tensor whose shape differs in the model (`wanted`) and files (`stored`), or whose conversion raised `failure`."""

    name: str
    wanted: tuple[int, ...]
    stored: tuple[int, ...]
    sources: tuple[StoredTensor, ...]
    failure: str = ""


@dataclass(frozen=True)
class Match:
    """The differences between the tensors of a model and the tensors of a checkpoint.

    Attributes:
        missing: names and shapes of the model's tensors that the checkpoint lacks.
        initialised: name -> reason, for each tensor that the checkpoint lacks and that transformers initialises.
        tied: name of a tensor with tied values -> the name that these values have in the checkpoint.
        surplus: tensors of the checkpoint that the model neither has nor ignores.
        unused: tensors of `surplus` that no transformers class for the same config uses.
        unread: tensors whose values cannot be computed, each with the reason.
        buffers: buffers that no file contains, because the model computes them.
    """

    model: str
    path: str
    missing: Mapping[str, tuple[int, ...]]
    initialised: Mapping[str, str]
    tied: Mapping[str, str]
    surplus: tuple[StoredTensor, ...]
    unused: tuple[StoredTensor, ...]
    unread: tuple[tuple[StoredTensor, Problem], ...]
    wrong: tuple[WrongShape, ...]
    buffers: tuple[str, ...]
    weights: WeightMap = field(repr=False, compare=False)

    @property
    def gguf(self) -> bool:
        return self.path.endswith(".gguf")

    def problems(self) -> tuple[Problem, ...]:
        """Return the problems that prevent loading. Tensors whose names differ only in numbers share one problem."""
        names = [tensor.weight.name for tensor in self.surplus]
        wrapped = [name for name in names if _how_to_save(name)]
        if self.missing and (wrapped or not self.weights.sources):
            expected = f"weights of {self.model}: {listed(self.missing, 2)}"
            fix = _how_to_save(wrapped[0]) if wrapped else _SAME_PLACE
            return (
                Problem(f"{self.path} holds {listed(wrapped or names or ['nothing'], 2)}", expected, fix),
            )
        return (
            *_unread_problems(self),
            *_missing_problems(self),
            *_shape_problems(self),
            *_doubled_problems(self),
            *_unused_problems(self),
        )

    def require_complete(self) -> None:
        """Raise one CheckpointError with the `problems`, if there are any."""
        problems = self.problems()
        if problems:
            kinds = [
                (_unread_problems, ": quantized weights that cannot be read"),
                (_unused_problems, f" holds tensors that {self.model} does not have"),
                *([] if self.gguf else [(_shape_problems, ": config.json contradicts the weights")]),
            ]
            default = f" does not hold the weights of {self.model}"
            alike = (words for kind, words in kinds if len(list(kind(self))) == len(problems))
            what = default if self.missing else next(alike, default)
            raise CheckpointError.first_of(f"{self.path}{what}", problems)


def match(model: Any, headers: CheckpointHeaders) -> Match:
    """Compare a model, which may be on the meta device, with a checkpoint by names and shapes.

    A missing tensor is `initialised` if the model's author allows this (`_keys_to_ignore_on_load_missing`). The same
    applies to a head that the class in the checkpoint's config does not have.
    """
    weights = weight_map(model, headers)
    state = {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    tied_names = aliases(model)
    missing: dict[str, tuple[int, ...]] = {}
    initialised: dict[str, str] = {}
    tied: dict[str, str] = {}
    for name, value in state.items():
        stored = [alias for alias in tied_names.get(name, ()) if alias in weights.sources]
        if stored and (name not in weights.sources or name > stored[0]):
            tied[name] = stored[0]
        if name in weights.sources or stored:
            continue
        reason = _may_be_initialised(model, name)
        if reason:
            initialised[name] = reason
        else:
            missing[name] = () if is_lazy(value) else tuple(value.shape)
    surplus = tuple(tensor for tensor in weights.surplus if not _ignored(model, tensor, state))
    unread = tuple(_unread(state, weights))
    broken = {id(tensor) for tensor, _ in unread}
    return Match(
        type(model).__name__,
        str(headers.path),
        missing,
        initialised,
        tied,
        surplus,
        _unused(model, surplus, headers.quantization),
        unread,
        tuple(wrong for wrong in _wrong(model, state, weights) if broken.isdisjoint(map(id, wrong.sources))),
        tuple(name for name, _ in model.named_buffers() if name not in state),
        weights,
    )


def aliases(model: Any) -> dict[str, list[str]]:
    """Return name -> the other names of the same tensor, for each tensor that is tied or that transformers will tie."""
    named = chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    shared = grouped(named, lambda pair: id(pair[1])).values()
    # transformers ties these after loading.
    tied = grouped(getattr(model, "all_tied_weights_keys", {}).items(), lambda pair: pair[1])
    groups = [{name for name, _ in pairs} for pairs in shared if len(pairs) > 1]
    groups += [{source, *(target for target, _ in pairs)} for source, pairs in tied.items()]
    other: dict[str, set[str]] = {}
    for group in groups:
        for name in group:
            other.setdefault(name, set()).update(group - {name})
    return {name: sorted(others) for name, others in other.items()}


def _may_be_initialised(model: Any, name: str) -> str:
    if name.endswith(_COUNTERS):
        return "a counter, which starts at 0"
    if any(re.search(pattern, name) for pattern in may_be_missing(model)):
        return f"{type(model).__name__} may initialise it (_keys_to_ignore_on_load_missing)"
    saved = getattr(getattr(model, "config", None), "architectures", None) or ()
    prefix = getattr(model, "base_model_prefix", "")
    if prefix and saved and type(model).__name__ not in saved and not name.startswith(f"{prefix}."):
        return f"the checkpoint is a {saved[0]}, so {type(model).__name__} initialises this part with random values"
    return ""


def _ignored(model: Any, tensor: StoredTensor, state: Mapping[str, torch.Tensor]) -> bool:
    """Return True if the model ignores a surplus tensor because of its name, or computes the tensor as a buffer."""
    if _MASKS.search(tensor.name) and len(tensor.weight.shape) in (0, 4):
        return True
    computed = {name for name, _ in model.named_buffers()} - state.keys()
    patterns = [_KNOWN, *may_be_surplus(model)]
    return tensor.name in computed or any(re.search(pattern, tensor.name) for pattern in patterns)


def _unused(
    model: Any, surplus: Sequence[StoredTensor], quantization: Mapping[str, Any]
) -> tuple[StoredTensor, ...]:
    """Return the surplus tensors that no transformers class for the model's config uses.

    If the config names another class than the class of the model, this other class may use surplus tensors. In this
    case, only tensors of the model's modules, and of layers after its last layer, count as unused.
    """
    caches = any(str(key).startswith("kv_cache") and value for key, value in quantization.items())
    unused = [tensor for tensor in surplus if not (caches and _CACHE.search(tensor.name))]
    if unused and hasattr(model, "base_model_prefix"):
        saved = getattr(model.config, "architectures", None) or ()
        if saved and type(model).__name__ not in saved:
            return tuple(tensor for tensor in unused if _has_place_for(model, tensor.name))
        others = names_in_other_classes(model)
        return tuple(tensor for tensor in unused if without_prefix(model, tensor.name) not in others)
    return tuple(unused)


def _has_place_for(model: Any, name: str) -> bool:
    """Return True if the name of a tensor fits the model: it names a module, or another layer in a list of layers."""
    prefix = f"{model.base_model_prefix}."
    modules = dict(model.named_modules())
    depth, rest = 0, [""]
    for candidate in (name, f"{prefix}{name}", name.removeprefix(prefix)):
        parts = candidate.split(".")
        existing = next(at for at in range(len(parts) - 1, -1, -1) if ".".join(parts[:at]) in modules)
        if existing > depth:
            depth, rest = existing, parts[existing:]
    return depth > 0 and (len(rest) == 1 or rest[0].isdigit())


def _unread(state: Mapping[str, torch.Tensor], weights: WeightMap) -> Iterator[tuple[StoredTensor, Problem]]:
    for source in {id(source): source for source in weights.sources.values()}.values():
        value = state.get(source.target)
        real = value is not None and value.is_floating_point()
        for tensor, _ in source.tensors:
            stored = STORED.get(tensor.weight.dtype_name, "float")
            what = f"{stored} codes without a scale"
            if stored == "bool":
                what = "stored as bool, which is not a dtype of weights"
            if tensor.problem is not None:
                yield tensor, tensor.problem
            elif real and "float" not in stored and not tensor.quantized:
                yield tensor, Problem(f"{tensor.weight.name}: {what}", *EXPECTED)


def _wrong(model: Any, state: Mapping[str, torch.Tensor], weights: WeightMap) -> Iterator[WrongShape]:
    for name, source in weights.sources.items():
        if name not in state or is_lazy(state[name]):
            continue
        wanted = tuple(state[name].shape)
        shape = source.shapes.get(name, ())
        stored = tuple(tensor for tensor, _ in source.tensors)
        if source.failure:
            yield WrongShape(name, wanted, (), stored, source.failure)
        elif shape is None:
            values = sum(tensor.values for tensor in stored)
            if values != math.prod(wanted) and "packed" not in {tensor.form for tensor in stored}:
                yield WrongShape(name, wanted, (values,), stored)
        elif shape != wanted:
            # bitsandbytes transposes the weights of GPT-2's Conv1D layers: in int8 files, and in the model's layers.
            transposed = any(tensor.form == "int8" and tensor.scheme is None for tensor in stored)
            transposed |= replaces_conv1d(model.get_submodule(name.rpartition(".")[0]))
            if not (transposed and shape == wanted[::-1]):
                yield WrongShape(name, wanted, shape, stored)


def _unread_problems(match: Match) -> Iterator[Problem]:
    def reason(unread: tuple[StoredTensor, Problem]) -> tuple[str, str]:
        tensor, problem = unread
        module = tensor.weight.name.rpartition(".")[0]
        beside = [unused.weight for unused in match.unused if unused.weight.name.rpartition(".")[0] == module]
        scales = ", ".join(f"{scale.name.rpartition('.')[2]} {list(scale.shape)}" for scale in beside)
        return problem.given.removeprefix(tensor.weight.name), scales

    for (why, scales), tensors in grouped(match.unread, reason).items():
        names = [tensor.weight.name for tensor, _ in tensors]
        count = f" ({plural(len(names), 'tensor')})" if len(names) > 1 else ""
        some = names[0] if len(names) == 1 else listed(distinct_names(names), 2)
        yield Problem(f"{some}{count}{why}{f'; its module also has {scales}' if scales else ''}", *EXPECTED)


def _unused_problems(match: Match) -> Iterator[Problem]:
    reported = {tensor.weight.name.rpartition(".")[0] for tensor, _ in match.unread}
    renamed = (_near(name, shape, match.surplus) for name, shape in match.missing.items())
    reported |= {starred(tensor.weight.name) for tensor in renamed if tensor is not None}
    by_name = {tensor.weight.name: tensor.weight for tensor in match.unused}
    others = [name for name in by_name if reported.isdisjoint((name.rpartition(".")[0], starred(name)))]
    for names in _grouped_by_pattern(others, lambda name: by_name[name].shape):
        first = by_name[names[0]]
        yield Problem(
            f"{_some(names)} of shape {list(first.shape)} in {first.file.name}, which {match.model} does not use",
            "only tensors that the model uses, because its outputs are different if it leaves tensors out",
            f"{_SAME_PLACE}, or remove them from the file",
        )


def _missing_problems(match: Match) -> Iterator[Problem]:
    for names in _grouped_by_pattern(match.missing, match.missing.__getitem__):
        shape = match.missing[names[0]]
        near = _near(names[0], shape, match.surplus)
        again = "download or save the checkpoint again"
        if near is not None:
            rename = "rename this tensor" if len(names) == 1 else "rename this tensor and similar tensors"
            fix = f"{near.weight.file.name} has {near.weight.name} of this shape: {rename}, or {again}"
        else:
            fix = (
                f"{again}; to start this tensor from random values, load the model with transformers and "
                "save_pretrained() it"
            )
        noun = "a tensor" if len(names) == 1 else "tensors"
        expected = f"{noun} of shape {list(shape)} under this name in {match.path}"
        yield Problem(f"{_named(names)} in no file", expected, fix)


def _shape_problems(match: Match) -> Iterator[Problem]:
    by_name = {wrong.name: wrong for wrong in match.wrong}
    for names in _grouped_by_pattern(by_name, lambda name: (by_name[name].wanted, by_name[name].stored)):
        wrong = by_name[names[0]]
        files = listed(dict.fromkeys(tensor.weight.file.name for tensor in wrong.sources), 2)
        sources = listed([tensor.weight.name for tensor in wrong.sources], 2)
        of = f"made of {sources} in {files}" if sources != wrong.name else f"in {files}"
        if wrong.failure:
            what = f"{_named(names)} {of}: {wrong.failure}"
        elif match.weights.sources[wrong.name].shapes.get(wrong.name) is None:
            what = f"{_named(names)} of {wrong.stored[0]:,} values, {of}"
        else:
            what = f"{_named(names)} of shape {list(wrong.stored)}, {of}"
        near = _near(wrong.sources[0].name, wrong.sources[0].dense_shape, match.surplus)
        if len(wrong.sources) > 1 and near is not None:
            fix = f"{near.weight.file.name} has {near.weight.name}, which the model does not use: rename it"
        else:
            fix = _SAME_PLACE
        source = "its metadata" if match.gguf else "config.json"
        yield Problem(what, f"shape {list(wrong.wanted)}, according to {source}", fix)


def _doubled_problems(match: Match) -> Iterator[Problem]:
    for name, tensor in match.weights.doubled:
        first, second = match.weights.sources[name].tensors[0][0].weight, tensor.weight
        what = f"{name} twice: {first.name} in {first.file.name} and {second.name} in {second.file.name}"
        fix = "remove the tensor that does not belong to the model, or save the model again"
        yield Problem(what, "one tensor per name in the model", fix)


def _some(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{starred(names[0])} ({len(names)} tensors)"


def _named(names: Sequence[str]) -> str:
    return f"{_some(names)} {'is' if len(names) == 1 else 'are'}"


def _grouped_by_pattern(names: Iterable[str], alike: Any) -> Iterable[list[str]]:
    return grouped(names, lambda name: (starred(name), alike(name))).values()


def _near(name: str, shape: tuple[int, ...] | None, surplus: Sequence[StoredTensor]) -> StoredTensor | None:
    """Return the surplus tensor of this shape with a similar name, or the only tensor of this shape; None without one."""
    alike = {tensor.name: tensor for tensor in surplus if tensor.dense_shape == shape}
    close = difflib.get_close_matches(name, alike, n=1, cutoff=0.6)
    if close:
        return alike[close[0]]
    return next(iter(alike.values())) if len(alike) == 1 else None

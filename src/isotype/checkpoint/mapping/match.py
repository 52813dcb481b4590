"""A model compared with a checkpoint before a weight is read: what is missing, surplus, of another shape, or twice there."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from isotype.checkpoint.formats.headers import CheckpointHeaders
from isotype.checkpoint.mapping.stored import StoredTensor, dense_shape
from isotype.checkpoint.mapping.weight_map import WeightMap, weight_map
from isotype.compat.transformers import may_be_missing, may_be_surplus
from isotype.core.errors import CheckpointError, Problem
from isotype.core.names import listed, plural, starred
from isotype.precision.facts import QuantizationFacts

_SHOWN = 12  # patterns of names in one error
_SAME_PLACE = "take config.json and the weights from the same save of the model"
# Buffers that nothing is computed from in training, and that older checkpoints lack.
_COUNTERS = (".num_batches_tracked",)
_NOT_REAL = ("BOOL", "C", "complex")
# Quantization methods whose tensors `stored_tensors` puts together.
_KNOWN_QUANTIZATIONS = frozenset({"bitsandbytes", "mxfp4", "fp8", "compressed-tensors", "gptq", "awq"})


def unknown_quantization(quantization: QuantizationFacts | None) -> bool:
    """Whether the tensors of a quantized checkpoint cannot be told by their names."""
    return quantization is not None and quantization.method not in _KNOWN_QUANTIZATIONS


@dataclass(frozen=True)
class WrongShape:
    """A tensor whose shape in the checkpoint is not the model's; `failure` says why it cannot be made at all."""

    name: str
    wanted: tuple[int, ...]
    found: tuple[int, ...]
    sources: tuple[StoredTensor, ...]
    failure: str = ""


@dataclass(frozen=True)
class Match:
    """A model's tensors beside those of a checkpoint.

    Attributes:
        model: the model's class.
        path: the checkpoint.
        missing: names and shapes that the checkpoint lacks.
        initialised: names that it lacks and may lack, with the reason.
        tied: names that share the values of another name, which the checkpoint has.
        surplus: what the model has no name for.
        wrong: those of another shape than the model's.
        doubled: names in the model for which the checkpoint has more than one tensor, with the one left over.
        buffers: buffers that are in no file: the model computes them.
        weights: what each name is made of.
    """

    model: str
    path: str
    missing: Mapping[str, tuple[int, ...]]
    initialised: Mapping[str, str]
    tied: Mapping[str, str]
    surplus: tuple[StoredTensor, ...]
    wrong: tuple[WrongShape, ...]
    doubled: tuple[tuple[str, StoredTensor], ...]
    buffers: tuple[str, ...]
    weights: WeightMap = field(repr=False, compare=False)

    @property
    def gguf(self) -> bool:
        """Whether the file has no config.json, but metadata."""
        return self.path.endswith(".gguf")

    def problems(self) -> tuple[Problem, ...]:
        """What keeps the checkpoint from being loaded: one problem for each pattern of names."""
        if self.missing and not self.weights.sources:
            return (_of_another_model(self),)
        return (*_missing_problems(self), *_shape_problems(self), *_doubled_problems(self))

    def require_complete(self) -> None:
        """Raise one error for everything that keeps the checkpoint from being loaded.

        Raises:
            CheckpointError: a tensor is missing, of another shape than the model's, or there twice.
        """
        problems = self.problems()
        if problems:
            left_out = len(problems) - _SHOWN
            hint = f"and {plural(left_out, 'more problem')} like these" if left_out > 0 else None
            only_shapes = len(problems) == len(list(_shape_problems(self)))
            what = ": config.json contradicts the weights" if only_shapes and not self.gguf else ""
            headline = f"{self.path}{what or f' does not hold the weights of {self.model}'}"
            raise CheckpointError(headline, problems[:_SHOWN], hint)


def match(model: Any, headers: CheckpointHeaders) -> Match:
    """Compare a model with a checkpoint by names and shapes.

    A missing tensor may be initialised where the model's author says so (`_keys_to_ignore_on_load_missing`), or where
    it is part of the head of another class than the checkpoint was saved from.

    Args:
        model: dense; it may lie on the meta device.
        headers: of the checkpoint.
    """
    weights = weight_map(model, headers)
    state = {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    aliases = _aliases(model)
    missing: dict[str, tuple[int, ...]] = {}
    initialised: dict[str, str] = {}
    tied: dict[str, str] = {}
    for name, value in state.items():
        stored = [alias for alias in aliases.get(name, ()) if alias in weights.sources]
        if stored and (name not in weights.sources or name > stored[0]):
            tied[name] = stored[0]
        if name in weights.sources or stored:
            continue
        reason = _may_be_initialised(model, name)
        if reason:
            initialised[name] = reason
        else:
            missing[name] = () if is_lazy(value) else tuple(value.shape)
    return Match(
        type(model).__name__,
        str(headers.path),
        missing,
        initialised,
        tied,
        tuple(tensor for tensor in weights.surplus if not _ignored(model, tensor.name)),
        tuple(_wrong(state, weights)),
        weights.doubled,
        tuple(name for name, _ in model.named_buffers() if name not in state),
        weights,
    )


def _aliases(model: Any) -> dict[str, list[str]]:
    """The other names of tensors that have several."""
    names: dict[int, set[str]] = {}
    for each in (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ):
        names.setdefault(id(each[1]), set()).add(each[0])
    groups = [group for group in names.values() if len(group) > 1]
    # Those that transformers ties once they are loaded.
    sources: dict[str, set[str]] = {}
    for target, source in getattr(model, "all_tied_weights_keys", {}).items():
        sources.setdefault(source, {source}).add(target)
    aliases: dict[str, set[str]] = {}
    for group in (*groups, *sources.values()):
        for name in group:
            aliases.setdefault(name, set()).update(group - {name})
    return {name: sorted(others) for name, others in aliases.items()}


def _may_be_initialised(model: Any, name: str) -> str:
    if name.endswith(_COUNTERS):
        return "a counter, which starts at 0"
    if any(re.search(pattern, name) for pattern in may_be_missing(model)):
        return f"{type(model).__name__} may initialise it (_keys_to_ignore_on_load_missing)"
    saved = getattr(getattr(model, "config", None), "architectures", None) or ()
    prefix = getattr(model, "base_model_prefix", "")
    if prefix and saved and type(model).__name__ not in saved and not name.startswith(f"{prefix}."):
        return f"the checkpoint is a {saved[0]}: {type(model).__name__} starts this part from fresh values"
    return ""


def _ignored(model: Any, name: str) -> bool:
    """Whether transformers ignores a surplus tensor without a word."""
    patterns = list(may_be_surplus(model))
    # Saved by older versions; models compute them now (`_adjust_missing_and_unexpected_keys`).
    patterns += [r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$"]
    return any(re.search(pattern, name) for pattern in patterns)


def _wrong(state: Mapping[str, torch.Tensor], weights: WeightMap) -> Iterator[WrongShape]:
    for name, source in weights.sources.items():
        if name not in state or is_lazy(state[name]):
            continue
        wanted = tuple(state[name].shape)
        shape = source.shapes.get(name, ())
        stored = tuple(tensor for tensor, _ in source.tensors)
        kinds = [t.weight.dtype_name for t in stored if t.weight.dtype_name.startswith(_NOT_REAL)]
        if source.failure or (kinds and state[name].is_floating_point()):
            failure = source.failure or f"stored as {kinds[0]}, which is no dtype of weights"
            yield WrongShape(name, wanted, (), stored, failure)
        elif shape is None:
            values = sum(tensor.values for tensor in stored)
            if values != math.prod(wanted) and "packed" not in {tensor.form for tensor in stored}:
                yield WrongShape(name, wanted, (values,), stored)
        elif shape != wanted and not (_turned(stored) and shape == wanted[::-1]):
            yield WrongShape(name, wanted, shape, stored)


def _turned(stored: Sequence[StoredTensor]) -> bool:
    """Whether bitsandbytes may have turned the weight, as it does with those of GPT-2's layers."""
    return any(tensor.form == "int8" for tensor in stored)


# In words


def _missing_problems(match: Match) -> Iterator[Problem]:
    for names in _by_pattern(match.missing, match.missing.__getitem__):
        shape = match.missing[names[0]]
        near = _near(names[0], shape, match.surplus)
        again = "download or save the checkpoint again"
        if near is not None:
            rename = "rename it there" if len(names) == 1 else "rename it and its like there"
            fix = f"{near.weight.file.name} has {near.weight.name} of this shape: {rename}, or {again}"
        else:
            fix = (
                f"{again}; if it is meant to start from fresh values, load the model with transformers and "
                "save_pretrained() it"
            )
        yield Problem(
            f"{_named(names)} in no file",
            f"{'a tensor' if len(names) == 1 else 'tensors'} of shape {list(shape)} under this name in {match.path}",
            fix,
        )


def _shape_problems(match: Match) -> Iterator[Problem]:
    by_name = {wrong.name: wrong for wrong in match.wrong}
    for names in _by_pattern(by_name, lambda name: (by_name[name].wanted, by_name[name].found)):
        wrong = by_name[names[0]]
        files = listed(dict.fromkeys(tensor.weight.file.name for tensor in wrong.sources), 2)
        sources = listed([tensor.weight.name for tensor in wrong.sources], 2)
        of = f"made of {sources} in {files}" if sources != wrong.name else f"in {files}"
        if wrong.failure:
            what = f"{_named(names)} {of}: {wrong.failure}"
        elif match.weights.sources[wrong.name].shapes.get(wrong.name) is None:
            what = f"{_named(names)} of {wrong.found[0]:,} values, {of}"
        else:
            what = f"{_named(names)} of shape {list(wrong.found)}, {of}"
        near = _near(wrong.sources[0].name, dense_shape(wrong.sources[0]), match.surplus)
        if len(wrong.sources) > 1 and near is not None:
            fix = f"{near.weight.file.name} has {near.weight.name}, which no tensor of the model is made of: rename it"
        else:
            fix = _SAME_PLACE
        yield Problem(
            what,
            f"shape {list(wrong.wanted)}, as {'its metadata say' if match.gguf else 'config.json says'}",
            fix,
        )


def _doubled_problems(match: Match) -> Iterator[Problem]:
    for name, tensor in match.doubled:
        ((taken, _), *_) = match.weights.sources[name].tensors
        yield Problem(
            f"{name} twice: {taken.weight.name} in {taken.weight.file.name} and {tensor.weight.name} in "
            f"{tensor.weight.file.name}",
            "one tensor for each name of the model",
            "remove the one that is not the model's, or save the model again",
        )


def _of_another_model(match: Match) -> Problem:
    names = [tensor.weight.name for tensor in match.surplus] or ["nothing"]
    return Problem(
        f"{match.path} holds {listed(names, 2)}",
        f"weights of {match.model}: {listed(match.missing, 2)}",
        _SAME_PLACE,
    )


def _named(names: Sequence[str]) -> str:
    return f"{names[0]} is" if len(names) == 1 else f"{starred(names[0])} ({len(names)} tensors) are"


def _by_pattern(names: Iterable[str], alike: Any) -> Iterator[list[str]]:
    """Names that differ by the numbers of layers only and are `alike`."""
    groups: dict[tuple[str, Any], list[str]] = {}
    for name in names:
        groups.setdefault((starred(name), alike(name)), []).append(name)
    yield from groups.values()


def _near(name: str, shape: tuple[int, ...] | None, surplus: Sequence[StoredTensor]) -> StoredTensor | None:
    """The surplus tensor of this shape whose name is nearest; a name that is the only one of its shape may be any."""
    alike = {tensor.name: tensor for tensor in surplus if dense_shape(tensor) == shape}
    close = difflib.get_close_matches(name, alike, n=1, cutoff=0.6)
    if close:
        return alike[close[0]]
    return next(iter(alike.values())) if len(alike) == 1 else None

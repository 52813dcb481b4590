"""Batches without their padding: the rows behind one another in one, where each attends to itself alone.

Padding that is left out costs nothing in linear layers, norms and attention. Sound for a model in which tokens meet in
attention only, and whose attention follows the sequences that positions tell (transformers' packed sequences). Whether a
model is one is found by running it, not by its name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from isotype.compat.torch import FakeTensor, forward_hooks
from isotype.core.errors import first_line
from isotype.lora.sequences import Sequences, saying
from isotype.model.modes import in_evaluation

_KNOWN = frozenset({"input_ids", "attention_mask", "use_cache", "output_router_logits"})
_LEAST_SHARE = 0.05
MOST_TOKENS = 8192
"""The mask of packed sequences has a byte for every pair of tokens; where attention goes by lengths there is none."""
_TOLERANCES = {"right": 0.05, "left": 0.25}
"""Of the change that is seen when rows are not kept apart. Left padding shifts rotary positions, which 16 bits round otherwise."""
_NEIGHBOURS = 1e-4
"""Of a document's states: what they may change by where its neighbour in the row is another; none of it, but for roundings of a mixture's products."""
_LENGTH, _SHORT = 16, 3
"""Tokens of the rows that a model is tried with: the short ones lie so far from the begin that absolute positions would tell."""


@dataclass(frozen=True)
class Unpadded:
    """A batch without its padding.

    Attributes:
        inputs: arguments of the model's forward: `input_ids` and `position_ids` `[1, tokens]`, and what else it was given.
        place: where each token of the batch is among them, int64 `[rows, length]`; of no meaning for padding.
        sequences: the rows among them.
        tokens: which places of the batch they are, int64 `[tokens]`, rows behind one another.
        reads: at how many places results are read.
        lengths: tokens of each row that has some.
    """

    inputs: Mapping[str, Any]
    place: torch.Tensor
    sequences: Sequences
    tokens: torch.Tensor
    reads: int
    lengths: tuple[int, ...]


_traced: ContextVar[Unpadded | None] = ContextVar("traced", default=None)


@contextmanager
def traced_as(bare: Unpadded | None) -> Iterator[None]:
    """Within it fakes of a batch's shape are taken without the padding that the batch itself is without; with None, as they are."""
    token = _traced.set(bare)
    try:
        yield
    finally:
        _traced.reset(token)


def unpadded(
    batch: Mapping[str, Any], sides: frozenset[str], read: torch.Tensor, most: int | None = MOST_TOKENS
) -> Unpadded | None:
    """Return a batch without its padding, where that saves something and nobody reads what is computed there.

    The device is waited for once, for the lengths of the rows.

    Args:
        batch: arguments of a model's forward, `input_ids` and `attention_mask` `[rows, length]` among them.
        sides: where padding may be left out, see `unpadded_sides`.
        read: at which places results are read, bool `[rows, length]`: known to who knows the labels, and to nobody else.
        most: tokens that are left without it; None for any number.

    Returns:
        None for a batch with next to no padding, with padding between tokens or on another side, with more than text, or of
        which results at padding are read. For fakes, whose lengths nobody knows, but within `traced_as`.
    """
    ids, mask = batch.get("input_ids"), batch.get("attention_mask")
    if ids is None or mask is None or {key for key, value in batch.items() if value is not None} - _KNOWN:
        return None
    if ids.dim() != 2 or mask.shape != ids.shape or not ids.numel():
        return None
    if isinstance(ids, FakeTensor):
        known = _traced.get()
        if known is None or known.place.shape != ids.shape:
            return None
        return _without(batch, mask.bool(), known.lengths, known.reads)
    if not sides:
        return None
    present = mask.bool()
    facts = _facts(present, read)
    tokens = sum(facts.lengths)
    enough = 0 < tokens <= (1 - _LEAST_SHARE) * ids.numel() and (most is None or tokens <= most)
    if not enough or facts.unsound or facts.padded - sides:
        return None
    return _without(batch, present, tuple(length for length in facts.lengths if length), facts.reads)


def _without(
    batch: Mapping[str, Any], present: torch.Tensor, lengths: tuple[int, ...], reads: int
) -> Unpadded:
    ids = batch["input_ids"]
    index = torch.nonzero_static(present.flatten(), size=sum(lengths)).squeeze(1)
    positions = present.cumsum(1) - 1
    inputs = {
        **batch,
        "input_ids": ids.flatten()[index][None],
        "position_ids": positions.flatten()[index][None],
        "attention_mask": None,
    }
    ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32).to(ids.device, non_blocking=True)
    place = (present.flatten().cumsum(0) - 1).clamp(min=0).view(ids.shape)
    return Unpadded(inputs, place, Sequences(ends, max(lengths)), index, reads, lengths)


@contextmanager
def in_one_row(model: Any, bare: Unpadded) -> Iterator[None]:
    """Within it a model is called with `bare.inputs`: attention knows the sequences, and hooks of the embeddings see the padded batch.

    NEFTune's divides its noise by the length of the rows and draws it for padding, too: of one long row it would be
    smaller, and differ from batch to batch.
    """
    with saying(bare.sequences), _seen_as(model, bare.place, bare.tokens[None]):
        yield


def hooks_see_one_row(model: Any, present: torch.Tensor) -> AbstractContextManager[None]:
    """Within it hooks of a model's embeddings see the tokens of a batch behind one another in one row, without its padding.

    Args:
        present: `[rows, length]`, of any dtype: not zero where there is no padding. Hooks see a batch of fakes, which do not tell, as it is.
    """
    if isinstance(present, FakeTensor) or not _is_hooked(model):
        return nullcontext()
    flat = present.flatten().bool()
    return _seen_as(model, flat.nonzero().T, (flat.cumsum(0) - 1).clamp(min=0).view(present.shape))


@contextmanager
def _seen_as(model: Any, into: torch.Tensor, back: torch.Tensor) -> Iterator[None]:
    """Inside the context, ids of the shape of `back` are embedded through `into`, and `back` picks from the embeddings."""
    if not _is_hooked(model):
        yield
        return
    embeddings = model.get_input_embeddings()

    def pick(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        return (args[0].flatten()[into], *args[1:]) if args and args[0].shape == back.shape else None

    def put_back(module: nn.Module, args: Any, states: torch.Tensor) -> torch.Tensor:
        return states.flatten(0, 1)[back.to(states.device)] if states.shape[:2] == into.shape else states

    before = embeddings.register_forward_pre_hook(pick, prepend=True)
    after = embeddings.register_forward_hook(put_back)
    try:
        yield
    finally:
        before.remove()
        after.remove()


def _is_hooked(model: Any) -> bool:
    return any(_is_foreign(hook) for hook in forward_hooks(model.get_input_embeddings()).values())


def _is_foreign(hook: Any) -> bool:
    """Return a hook is neither of isotype nor of torch, both of which take a batch of any shape."""
    return str(getattr(hook, "__module__", None)).partition(".")[0] not in ("isotype", "torch")


@dataclass(frozen=True)
class _Facts:
    """What is asked of a batch before its padding is left out.

    Attributes:
        lengths: tokens of each row.
        reads: at how many places results are read.
        unsound: whether results are read at padding, or padding lies between tokens.
        padded: sides of rows with tokens that padding lies on.
    """

    lengths: list[int]
    reads: int
    unsound: bool
    padded: frozenset[str]


def _facts(present: torch.Tensor, read: torch.Tensor) -> _Facts:
    lengths, some = present.sum(1), present.any(1)
    begins = present.int().diff(dim=1, prepend=present.new_zeros(len(present), 1).int()) == 1
    flags = [
        (read & ~present).any() | (begins.sum(1) > 1).any(),
        (~present[:, 0] & some).any(),
        (~present[:, -1] & some).any(),
    ]
    reads, unsound, left, right, *counts = torch.cat(
        [torch.stack([read.sum(), *(flag.long() for flag in flags)]), lengths]
    ).tolist()
    padded = {side for side, is_there in (("left", left), ("right", right)) if is_there}
    return _Facts(counts, reads, bool(unsound), frozenset(padded))


@dataclass(frozen=True)
class Trial:
    """What was seen of a model without padding.

    Attributes:
        sides: on which sides of a row (`"left"`, `"right"`) its padding may be left out without another result.
        reason: why on none, as a clause; "" where on some.
    """

    sides: frozenset[str] = frozenset()
    reason: str = ""


def unpadded_sides(model: Any) -> frozenset[str]:
    """Return the sides of `tried`."""
    return tried(model).sides


def tried(model: Any) -> Trial:
    """On which sides of a row a model's padding may be left out without another result.

    A few rows are run padded, and behind one another without padding: the difference may be a small share of what changes
    when a row sees those before it.

    Args:
        model: a transformers model; run a few times in evaluation, without gradients. Its modes and random states stay.
    """
    from transformers import PreTrainedModel

    backbone = getattr(model, "base_model", None)
    if not isinstance(model, PreTrainedModel) or not isinstance(backbone, nn.Module):
        return Trial(reason="it is no model of transformers with a backbone")
    if _is_encoder_decoder(model):
        return Trial(reason="it has an encoder and a decoder")
    try:
        with in_evaluation(model):
            sides = _sound_sides(backbone)
    except Exception as error:  # noqa: BLE001 - whatever a model raises that takes something else than tokens and positions
        return Trial(
            reason=f"a trial without padding failed ({type(error).__name__}: {first_line(error)[:200]})"
        )
    return Trial(sides, "" if sides else "it computes otherwise where rows lie behind one another")


def mixes_documents(model: Any) -> str:
    """Why documents in one row, told apart by their positions, are not computed as each by itself, as a clause; "" where they are.

    Args:
        model: as `tried` takes it.
    """
    try:
        with in_evaluation(model):
            mixes = _mixes(model.base_model)
    except Exception as error:  # noqa: BLE001 - whatever a model raises that takes something else than tokens and positions
        return f"a trial of documents in one row failed ({type(error).__name__}: {first_line(error)[:200]})"
    return f"in {type(model).__name__} documents in one row would see each other" if mixes else ""


def _mixes(backbone: Any) -> bool:
    """Return the second documents of two rows hang by the first ones, or are not what they are alone."""
    device = next(backbone.parameters()).device
    ids = torch.arange(1, 1 + 2 * _LENGTH, device=device).view(2, _LENGTH)
    order, begin = torch.arange(_LENGTH, device=device).expand(2, -1), _LENGTH - 2 * _SHORT
    places = torch.where(order < begin, order, order - begin)
    others = torch.where(order < begin, ids.flip(0), ids)

    def second(ids: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        inputs = {"input_ids": ids, "position_ids": places, "use_cache": False}
        return _states(backbone, inputs)[:, -2 * _SHORT :]

    apart, alone = second(ids, places), second(ids[:, begin:], places[:, begin:])
    neighbours = (second(others, places) - apart).norm() / apart.norm()
    change = (second(ids, order) - alone).norm()
    return bool(neighbours > _NEIGHBOURS or (apart - alone).norm() > _TOLERANCES["right"] * change)


def _is_encoder_decoder(model: Any) -> bool:
    return bool(getattr(model.config, "is_encoder_decoder", False))


def _sound_sides(backbone: Any) -> frozenset[str]:
    device = next(backbone.parameters()).device
    ids = torch.arange(1, 1 + 3 * _LENGTH, device=device).view(3, _LENGTH)
    mask = torch.ones_like(ids)
    mask[1, :-_SHORT] = 0
    mask[2, _SHORT:] = 0
    inputs = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
    packed = unpadded(inputs, frozenset(_TOLERANCES), mask.bool())
    assert packed is not None, "two of three rows are padded"
    wanted = _states(backbone, inputs)[mask.bool()]
    with saying(packed.sequences):
        states = _states(backbone, packed.inputs)[0]
    order = torch.arange(len(states), device=device)[None]
    seen = _states(backbone, {**packed.inputs, "position_ids": order})[0]
    rows = {
        "left": slice(_LENGTH, _LENGTH + _SHORT),
        "right": slice(_LENGTH + _SHORT, _LENGTH + 2 * _SHORT),
    }
    return frozenset(
        side
        for side, row in rows.items()
        if (states - wanted)[row].norm() <= _TOLERANCES[side] * (seen - wanted)[row].norm()
    )


def _states(backbone: Any, inputs: Mapping[str, Any]) -> torch.Tensor:
    states: torch.Tensor = backbone(**inputs).last_hidden_state
    return states.double()

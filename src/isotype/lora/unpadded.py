"""Removes padding from batches: all rows are concatenated to one row, and the tokens attend only to their own row.

The results stay the same under two conditions. First, tokens influence each other only by attention. Second,
attention uses positions to separate sequences, as transformers does for packed sequences. `tried` tests both
conditions.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeVar

import torch
from torch import nn

from isotype.compat.peft import why_whole_rows, without_peft
from isotype.compat.torch import FakeTensor, forward_hooks
from isotype.compat.transformers import backbone_of
from isotype.core.errors import first_line
from isotype.model.modes import in_evaluation
from isotype.model.small import small_copy

T = TypeVar("T")


@dataclass(frozen=True)
class Sequences:
    """The bounds of the sequences that are concatenated in a row `[1, tokens]`.

    Attributes:
        ends: 0, and then the index after the last token of each sequence; int32 `[sequences + 1]` on the device of the tokens.
        window: number of keys, up to its own position, to which a query attends; None means all keys of its sequence.
    """

    ends: torch.Tensor
    longest: int
    window: int | None = None

    def owners(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (indices of the tokens, index of each token's sequence), int64 `[tokens]`."""
        places = torch.arange(tokens, device=self.ends.device)
        return places, torch.bucketize(places, self.ends[1:].long(), right=True)

    def mask(self, tokens: int, *, causal: bool) -> torch.Tensor:
        """Return the sequences as a mask: bool `[1, 1, tokens, tokens]`, True where a query attends to a key."""
        places, owners = self.owners(tokens)
        mask = owners[:, None] == owners
        behind = places[:, None] - places
        if causal:
            mask = mask & (behind >= 0)
        if self.window is not None:
            mask = mask & (behind < self.window)
        return mask[None, None]


def packed(inputs: Mapping[str, Any]) -> Sequences | None:
    """Return the sequences of a packed batch, from the collator's `cu_seq_lens_q`; None for another batch."""
    ends, longest = inputs.get("cu_seq_lens_q"), inputs.get("max_length_q")
    if ends is None or not isinstance(longest, int) or inputs.get("attention_mask") is not None:
        return None
    return Sequences(ends, longest)


_sequences: ContextVar[Sequences | None] = ContextVar("sequences", default=None)


def current() -> Sequences | None:
    """Return the sequences that `with_sequences` has set for the current call of a model; None outside of this context."""
    return _sequences.get()


@contextmanager
def _holding(variable: ContextVar[Any], value: Any) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def with_sequences(sequences: Sequences | None) -> AbstractContextManager[None]:
    """In the `with` block, attention separates a row into `sequences`, or uses masks if `sequences` is None."""
    return _holding(_sequences, sequences)


_ARGUMENTS = frozenset({"input_ids", "attention_mask", "use_cache", "output_router_logits"})
LEAST_PADDING = 0.05
"""Smallest share of padding among a batch's tokens for which the padding is removed."""
MOST_TOKENS = 8192
"""Maximum tokens of a batch without padding if attention needs a mask, because the mask has a byte for each pair of tokens."""
_TOLERANCES = {"right": 0.05, "left": 0.25}
"""Maps the side of padding to the largest tolerated difference of the results with and without padding.

The unit is the difference that arises if rows attend to earlier rows. Left padding shifts rotary positions, and so
changes rounding.
"""
_NEIGHBOURS = 1e-4
"""Tolerated relative change of a sequence's states if the sequence before it changes. The states change because experts round differently."""
_LENGTH, _SHORT = 16, 3
"""Lengths of the trial's rows. Left padding shifts the short row far enough to reveal absolute positions."""


@dataclass(frozen=True)
class Unpadded:
    """A batch without its padding.

    Attributes:
        inputs: arguments of the model's forward, with `input_ids` and `position_ids` `[1, tokens]`.
        place: for each token of the padded batch, its index in the concatenated row, int64 `[rows, length]`. It is undefined
            for padding.
        tokens: for each token of the concatenated row, its index in the flattened padded batch, int64 `[tokens]`.
    """

    inputs: Mapping[str, Any]
    place: torch.Tensor
    sequences: Sequences
    tokens: torch.Tensor
    reads: int
    lengths: tuple[int, ...]


_traced: ContextVar[Unpadded | None] = ContextVar("traced", default=None)


def traced_as(bare: Unpadded | None) -> AbstractContextManager[None]:
    """In the `with` block, `unpadded` makes fake tensors as short as `bare`; if `bare` is None, padding is kept."""
    return _holding(_traced, bare)


def unpadded(
    batch: Mapping[str, Any], sides: frozenset[str], read: torch.Tensor, most: int | None = MOST_TOKENS
) -> Unpadded | None:
    """Return a batch without its padding; None if this saves no time or is impossible. This function synchronizes with
    the device once.

    Args:
        batch: arguments of a model's forward, including `input_ids` and `attention_mask` `[rows, length]`.
        sides: the sides (`left`, `right`) from which padding may be removed (see `tried`).
        read: True at the positions whose results the caller needs, bool `[rows, length]`.
        most: largest number of tokens in the batch without padding; None for any number.

    Returns:
        None if the batch has almost no padding, if padding is between tokens or on a side that is not in `sides`, if
        the inputs are not only text, or if `read` is True at padding. Fake tensors also give None outside of
        `traced_as(…)`.
    """
    ids, mask = batch.get("input_ids"), batch.get("attention_mask")
    if ids is None or mask is None or {key for key, value in batch.items() if value is not None} - _ARGUMENTS:
        return None
    if ids.dim() != 2 or mask.shape != ids.shape or not ids.numel():
        return None
    if isinstance(ids, FakeTensor):
        bare = _traced.get()
        if bare is None or bare.place.shape != ids.shape:
            return None
        return _without(batch, mask.bool(), bare.lengths, bare.reads)
    if not sides:
        return None
    present = mask.bool()
    lengths, reads, unsound, padded = _facts(present, read)
    tokens = sum(lengths)
    enough = 0 < tokens <= (1 - LEAST_PADDING) * ids.numel() and (most is None or tokens <= most)
    if not enough or unsound or padded - sides:
        return None
    return _without(batch, present, tuple(filter(None, lengths)), reads)


def _without(
    batch: Mapping[str, Any], present: torch.Tensor, lengths: tuple[int, ...], reads: int
) -> Unpadded:
    ids = batch["input_ids"]
    index = torch.nonzero_static(present.flatten(), size=sum(lengths)).squeeze(1)
    ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32).to(ids.device, non_blocking=True)
    sequences = Sequences(ends, max(lengths))
    places, owners = sequences.owners(sum(lengths))
    # Positions follow from the lengths, which a trace knows, too, if the attention mask is too large for it.
    tokens, positions = ids.flatten()[index][None], (places - ends[owners])[None]
    inputs = {**batch, "input_ids": tokens, "position_ids": positions, "attention_mask": None}
    place = (present.flatten().cumsum(0) - 1).clamp(min=0).view(ids.shape)
    return Unpadded(inputs, place, sequences, index, reads, lengths)


@contextmanager
def in_one_row(model: Any, bare: Unpadded) -> Iterator[None]:
    """In the `with` block, the model can run on `bare.inputs`. Hooks of the embeddings get the padded batch."""
    with with_sequences(bare.sequences), _embedding_as(model, bare.place, bare.tokens[None]):
        yield


def hooks_see_one_row(model: Any, present: torch.Tensor) -> AbstractContextManager[None]:
    """Give the hooks of a model's embeddings all tokens as one row. `present` `[rows, length]` is zero for padding."""
    if isinstance(present, FakeTensor) or not _is_hooked(model):
        return nullcontext()
    flat = present.flatten().bool()
    return _embedding_as(model, flat.nonzero().T, (flat.cumsum(0) - 1).clamp(min=0).view(present.shape))


@contextmanager
def _embedding_as(model: Any, into: torch.Tensor, back: torch.Tensor) -> Iterator[None]:
    """Pass `ids.flatten()[into]` to embeddings and their hooks, and restore the order of the results by `back`."""
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
    """Return True if the embeddings have a hook of another library. Hooks of isotype and torch accept any shape."""
    hooks = forward_hooks(model.get_input_embeddings()).values()
    homes = {str(getattr(hook, "__module__", None)).partition(".")[0] for hook in hooks}
    return bool(homes - {"isotype", "torch"})


def _facts(present: torch.Tensor, read: torch.Tensor) -> tuple[list[int], int, bool, set[str]]:
    """Return (tokens per row, positions in `read`, True if padding is in `read` or between tokens, padded sides)."""
    lengths, some = present.sum(1), present.any(1)
    begins = present.int().diff(dim=1, prepend=present.new_zeros(len(present), 1).int()) == 1
    flags = [
        (read & ~present).any() | (begins.sum(1) > 1).any(),  # padding is read, or is between tokens
        (~present[:, 0] & some).any(),
        (~present[:, -1] & some).any(),
    ]
    numbers = torch.stack([read.sum(), *(flag.long() for flag in flags)])
    reads, unsound, left, right, *counts = torch.cat([numbers, lengths]).tolist()
    padded = {side for side, count in (("left", left), ("right", right)) if count}
    return counts, reads, bool(unsound), padded


@dataclass(frozen=True)
class Trial:
    """Result of a trial: the sides (`"left"`, `"right"`) from which padding can be removed, or the reason why padding must stay."""

    sides: frozenset[str] = frozenset()
    reason: str = ""


def tried(model: Any) -> Trial:
    """Return the sides of a row from which padding can be removed without changing the results of a model.

    The trial runs the model on a few padded rows, and again on these rows concatenated without padding. In a third run, rows
    attend to earlier rows. The tolerance is a share (`_TOLERANCES`) of the difference in that run. In a fourth run, other
    rows precede the last row, because recurrent states and convolutions may have a smaller effect than the tolerance.
    """
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        return Trial(reason="the model is no transformers model with a backbone")
    if why := why_whole_rows(model):
        return Trial(reason=why)
    if getattr(model.config, "is_encoder_decoder", False):
        return Trial(reason="the model has an encoder and a decoder")
    sides = _of_trial(model, _sound_sides, "without padding")
    if isinstance(sides, str):
        return Trial(reason=sides)
    return Trial(sides, "" if sides else "the model's results change if rows are concatenated")


def mixes_documents(model: Any) -> str:
    """Return the reason why an earlier document in the row would change the results of a document; "" if it would not."""
    if why := why_whole_rows(model):
        return why
    mixes = _of_trial(model, _mixes, "of documents in one row")
    if isinstance(mixes, str):
        return mixes
    return f"in {type(model).__name__} documents in one row would attend to each other" if mixes else ""


def _of_trial(model: Any, trial: Callable[[nn.Module], T], what: str) -> T | str:
    """Return the result of a trial of the backbone (of a small copy if the model has no weights), or the reason why the trial failed."""
    try:
        if next(model.parameters()).is_meta:
            model = without_peft(small_copy(model, torch.arange(1, 1 + 3 * _LENGTH)).model)
        with in_evaluation(model):
            return trial(backbone_of(model))
    except Exception as error:  # noqa: BLE001 - a model with other inputs may raise anything
        return f"a trial {what} failed ({type(error).__name__}: {first_line(error)[:200]})"


def _mixes(backbone: Any) -> bool:
    """Return True if the results of the second document in a row change when the first document is replaced or removed."""
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


def _sound_sides(backbone: Any) -> frozenset[str]:
    device = next(backbone.parameters()).device
    ids = torch.arange(1, 1 + 3 * _LENGTH, device=device).view(3, _LENGTH)
    mask = torch.ones_like(ids)
    mask[1, :-_SHORT] = 0
    mask[2, _SHORT:] = 0
    inputs = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
    bare = unpadded(inputs, frozenset(_TOLERANCES), mask.bool())
    assert bare is not None, "two of three rows are padded"
    padded = _states(backbone, inputs)[mask.bool()]
    tokens, order = bare.inputs["input_ids"], torch.arange(len(padded), device=device)[None]
    others = tokens.flip(1).where(order < len(padded) - _SHORT, tokens)
    with with_sequences(bare.sequences):
        states = _states(backbone, bare.inputs)[0]
        apart = _states(backbone, {**bare.inputs, "input_ids": others})[0]
    mixed = _states(backbone, {**bare.inputs, "position_ids": order})[0]
    after, change = (states - padded)[_LENGTH:], (mixed - padded)[_LENGTH:]
    if (apart - states)[-_SHORT:].norm() > _NEIGHBOURS * states[-_SHORT:].norm():
        return frozenset()
    rows = {"left": slice(0, _SHORT), "right": slice(_SHORT, 2 * _SHORT)}
    sound = {side: after[row].norm() <= _TOLERANCES[side] * change[row].norm() for side, row in rows.items()}
    return frozenset(side for side, is_sound in sound.items() if is_sound)


def _states(backbone: Any, inputs: Mapping[str, Any]) -> torch.Tensor:
    states: torch.Tensor = backbone(**inputs).last_hidden_state
    return states.double()

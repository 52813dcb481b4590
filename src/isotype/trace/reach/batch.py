"""Selects the tokens for the measurement of leaks: tokens near the borders of sequences and of padding."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import torch

from isotype.compat.torch import has_values

MOST_ROWS = 4
FEW_TOKENS = 64
"""Rows are cut to this number of tokens. Shorter rows show the same leaks in less time."""
MOST_TOKENS = 512
_AROUND = 16
_BORDERS = 64
_SEGMENTS = ("seq_idx", "segment_ids", "sequence_ids", "document_ids", "doc_ids")
_STARTS = ("cu_seq_lens_q", "cu_seqlens", "cu_seqlens_q")
_PIECES = ("pixel_values", "input_features", "image", "grid", "audio", "video")
_LEARNED = ("completion_mask", "loss_mask", "assistant_masks")
_BESIDE_THE_MODEL = (*_LEARNED, "ref_chosen_logps", "ref_rejected_logps")
IGNORED = -100


@dataclass(frozen=True)
class Batch:
    """A batch for the measurement of leaks.

    Attributes:
        inputs: keyword arguments of the model, on the CPU.
        ids: token ids, `[rows, tokens]`.
        padding: mask of the tokens with an attention mask of 0, `[rows, tokens]`.
        sequences: index of each token's sequence in its row, `[rows, tokens]`; 0 in unpacked rows, -1 for padding.
        packed_by: name of the input that separates the sequences; "" if there is none.
        labelled: True if the model takes labels. Otherwise code outside of the model computes the loss, and
            `inputs["labels"]` only marks the tokens that count in this loss.
    """

    inputs: Mapping[str, Any]
    ids: torch.Tensor
    padding: torch.Tensor
    sequences: torch.Tensor
    packed_by: str = ""
    labelled: bool = True

    @property
    def packed(self) -> bool:
        """True if a row has several sequences."""
        return bool((self.sequences > 0).any())

    @property
    def tokens(self) -> dict[str, torch.Tensor]:
        """The inputs that contain token ids, `[rows, tokens]`, by name."""
        named = ((name, self.inputs.get(name)) for name in ("input_ids", "labels", "decoder_input_ids"))
        return {name: ids for name, ids in named if isinstance(ids, torch.Tensor) and ids.dim() == 2}

    def but(self, **changes: Any) -> dict[str, Any]:
        """Return the inputs with the changed values; the value None removes an input."""
        return {name: value for name, value in {**self.inputs, **changes}.items() if value is not None}

    def arguments(self, inputs: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return `inputs` (default: the batch's) as arguments of the model; without labels if the model takes none."""
        values = self.inputs if inputs is None else inputs
        return {name: value for name, value in values.items() if self.labelled or name != "labels"}

    def to(self, dtype: torch.dtype) -> Self:
        cast = {
            name: value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
            for name, value in self.inputs.items()
        }
        return replace(self, inputs=cast)


def batch_of(inputs: Mapping[str, Any]) -> Batch | None:
    """Return the batch to measure; None if the inputs have no token ids, or tensors without values."""
    ids = inputs.get("input_ids")
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2:
        return None
    tensors = {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)}
    if not all(map(has_values, tensors.values())) or ids.numel() < 2:
        return None
    copies = {**inputs, **{name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}}
    labelled = isinstance(copies.get("labels"), torch.Tensor)
    if not labelled:
        copies = _with_labels(copies)
    # The shape of an image or audio input does not show which row an image or audio clip belongs to.
    if ids.shape[0] > MOST_ROWS and not _in_pieces(copies):
        copies = _rows_at(copies, ids.shape[0], slice(MOST_ROWS))
    return replace(_read(_window(_read(copies))), labelled=labelled)


def _with_labels(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inputs with `labels` for the tokens that a loss outside of the model uses (DPO, GRPO, a reward)."""
    labels = inputs["input_ids"]
    for name in ("attention_mask", *_LEARNED):
        if (mask := by_token(inputs, name)) is not None:
            labels = labels.masked_fill(mask == 0, IGNORED)
    for_model = {name: value for name, value in inputs.items() if name not in _BESIDE_THE_MODEL}
    return {**for_model, "labels": labels}


def _rows_at(inputs: Mapping[str, Any], rows: int, index: Any) -> dict[str, Any]:
    """Return the inputs with only the rows at `index`. Tensors that do not have `rows` rows stay whole."""
    tensors = ((name, value) for name, value in inputs.items() if isinstance(value, torch.Tensor))
    return {**inputs, **{name: tensor[index] for name, tensor in tensors if tensor.shape[:1] == (rows,)}}


def _in_pieces(inputs: Mapping[str, Any]) -> bool:
    return any(piece in name for name in inputs for piece in _PIECES)


def _read(inputs: dict[str, Any]) -> Batch:
    ids, mask = inputs["input_ids"], by_token(inputs, "attention_mask")
    padding = torch.zeros_like(ids, dtype=torch.bool) if mask is None else mask == 0
    sequences, by = _sequences(inputs, ids)
    return Batch(inputs, ids, padding, sequences.masked_fill(padding, -1), by)


def by_token(inputs: Mapping[str, Any], name: str) -> torch.Tensor | None:
    """Return the input `name` if it has a value for each token, `[rows, tokens]`; else None."""
    value = inputs.get(name)
    fits = isinstance(value, torch.Tensor) and value.shape == inputs["input_ids"].shape
    return value if fits else None


def _sequences(inputs: Mapping[str, Any], ids: torch.Tensor) -> tuple[torch.Tensor, str]:
    for name in _SEGMENTS:
        if (value := by_token(inputs, name)) is not None:
            return _numbered(value), name
    mask, positions = by_token(inputs, "attention_mask"), inputs.get("position_ids")
    if mask is not None and int(mask.max()) > 1:
        return _numbered(mask), "attention_mask"
    if isinstance(positions, torch.Tensor) and positions.dim() == 2 and positions.shape[-1] == ids.shape[1]:
        starts = (positions == 0) & (positions.roll(1, -1) != 0)
        starts[:, 0] = False
        if starts.any():
            return starts.long().cumsum(-1).expand(ids.shape), "position_ids"
    for name in _STARTS:
        value = inputs.get(name)
        if isinstance(value, torch.Tensor) and ids.shape[0] == 1:
            ends = value.flatten()[1:]
            return torch.searchsorted(ends, torch.arange(ids.shape[1]), right=True)[None].long(), name
    return torch.zeros_like(ids), ""


def _numbered(values: torch.Tensor) -> torch.Tensor:
    """Number the runs of equal values in each row (0, 1, 2, …). Return for each value the number of its run."""
    changes = torch.diff(values, prepend=values[:, :1], dim=-1) != 0
    return changes.long().cumsum(-1)


def _window(batch: Batch) -> dict[str, Any]:
    """Return the inputs of a few tokens: from before a border of sequences or padding, to after the next label."""
    rows, tokens = batch.ids.shape
    inputs = dict(batch.inputs)
    if tokens <= FEW_TOKENS or _in_pieces(inputs) or any(name in inputs for name in _STARTS):
        return inputs
    row, first, last = _border(batch)
    size = min(max(last + _AROUND - first, FEW_TOKENS), MOST_TOKENS, tokens)
    first = max(min(first, tokens - size), 0)
    for name, value in inputs.items():
        for axis in range(1, value.dim()) if isinstance(value, torch.Tensor) else ():
            if value.shape[axis] == tokens:
                inputs[name] = inputs[name].narrow(axis, first, size)
    # The rows have their borders in different columns: one row is enough.
    return inputs if rows <= 2 else _rows_at(inputs, rows, torch.tensor([row, (row + 1) % rows]))


def _border(batch: Batch) -> tuple[int, int, int]:
    """Find the border after which a label follows soonest. Return its row, and the first and last column around it."""
    labels = batch.inputs["labels"]
    if labels.shape != batch.ids.shape:
        labels = batch.ids
    learned = labels != IGNORED
    best: tuple[int, int, int] | None = None
    for kinds in (batch.sequences.clamp_min(0), batch.padding.long()):
        for row, column in (torch.diff(kinds, dim=-1) != 0).nonzero()[:_BORDERS].tolist():
            behind = learned[row, column + 1 :].nonzero()
            last = column + 1 + int(behind[0]) if len(behind) else column
            if len(behind) and (best is None or last - column < best[2] - best[1] - _AROUND):
                best = row, max(column + 1 - _AROUND, 0), last
        if best is not None:
            return best
    places = learned.nonzero()
    row, column = places[0].tolist() if len(places) else (0, 0)
    return row, max(column - FEW_TOKENS // 2, 0), column


def renumbered(batch: Batch, tokens: Mapping[int, int] | None) -> Batch:
    """Return the batch with a smaller model's token ids. `tokens` maps the model's ids to them; None if they are equal."""
    if tokens is None:
        return batch
    inputs = batch.but(**{name: _mapped(ids, tokens) for name, ids in batch.tokens.items()})
    return replace(batch, inputs=inputs, ids=inputs["input_ids"])


def _mapped(ids: torch.Tensor, tokens: Mapping[int, int]) -> torch.Tensor:
    flat = [tokens.get(token, token) for token in ids.flatten().tolist()]
    return torch.tensor(flat, dtype=ids.dtype).view(ids.shape)

"""The predictions of a small copy on a batch, and their changes with other inputs."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from isotype.model.loss import find_loss
from isotype.trace.reach.batch import IGNORED, Batch
from isotype.trace.reach.place import logits_of
from isotype.trace.reach.small import Copy

SEEN = {torch.float64: 1e-5, torch.float32: 1e-4}
"""Smallest change of a logit that counts, relative to the largest logit; float32 parts of a model round at 1e-7."""

_PICTURES = ("image_token_id", "image_token_index", "audio_token_id", "video_token_id")


class UndecidedError(Exception):
    """The measurement is impossible; the message is a clause with the reason."""


@dataclass(frozen=True)
class Predictions:
    """Predictions that the loss depends on.

    Attributes:
        rows, columns: their indices, `[predictions]`.
        targets: the target tokens, `[predictions]`.
    """

    rows: torch.Tensor
    columns: torch.Tensor
    targets: torch.Tensor

    def __len__(self) -> int:
        return len(self.rows)


class Probe:
    """A small copy and its batch.

    Args:
        copy: the small copy.
        batch: with the copy's token ids and floats in `dtype`.
        deadline: time of the last start of a probe, by `time.thread_time`.
        dtype: the copy's dtype.

    Raises:
        UndecidedError: the copy's predictions cannot be compared.
    """

    def __init__(self, copy: Copy, batch: Batch, deadline: float, dtype: torch.dtype) -> None:
        self.copy, self.batch, self.seen = copy, batch, SEEN[dtype]
        self._deadline = deadline
        self._draw = torch.Generator().manual_seed(0)
        output = self.run(batch.inputs)
        logits, loss = logits_of(output, batch.ids), find_loss(output)
        if logits is None:
            raise UndecidedError("the model returns no logits of the batch's rows and tokens")
        if loss is None and batch.labelled:
            raise UndecidedError("the model returns no loss")
        if logits.dim() == 2 and batch.labelled and batch.inputs["labels"].shape == batch.ids.shape:
            raise UndecidedError("the model returns no logits of its tokens")
        self.learned = (
            _learned(logits, loss, batch)
            if loss is not None and batch.labelled
            else _next_tokens(logits, batch)
        )
        self.base = self.logits(batch.inputs)  # without gradients, as later: gradients select other kernels
        if not bool(self.base.isfinite().all()):
            raise UndecidedError("the copy's logits are not finite")
        if not torch.equal(self.base, self.logits(batch.inputs)):
            raise UndecidedError("the model does not compute the same twice")
        if not len(self.learned):
            raise UndecidedError("no label of the batch counts in the loss")

    @property
    def of_rows(self) -> bool:
        """True if the model makes one prediction per row, as a classifier does."""
        return self.base.dim() == 2

    @property
    def late(self) -> bool:
        """True if no time is left."""
        return time.thread_time() > self._deadline

    def run(self, inputs: Mapping[str, Any]) -> Any:
        """Call the copy with the same random numbers each time."""
        torch.manual_seed(0)
        return self.copy.model(**self.batch.arguments(inputs))

    def loss(self) -> torch.Tensor | None:
        """Return the model's loss; if the loss is computed outside of the model, the loss of the next tokens."""
        output = self.run(self.batch.inputs)
        if self.batch.labelled:
            return find_loss(output)
        logits = logits_of(output, self.batch.ids)
        assert logits is not None
        if self.of_rows:
            return logits.square().sum()
        learned = self.learned
        return -logits.log_softmax(-1)[learned.rows, learned.columns, learned.targets].sum()

    def logits(self, inputs: Mapping[str, Any]) -> torch.Tensor:
        """Return the copy's logits, computed without gradients."""
        with torch.no_grad():
            logits = logits_of(self.run(inputs), inputs["input_ids"])
        assert logits is not None
        return logits

    def changes(
        self, inputs: Mapping[str, Any], at: torch.Tensor, base: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the change of each learned prediction in `at`, relative to the largest logit.

        Args:
            inputs: replace those of the batch.
            at: mask of the learned predictions, `[learned]`.
            base: logits to compare with; None for the batch's.
        """
        before = self.base if base is None else base
        after, rows, columns = self.logits(inputs), self.learned.rows[at], self.learned.columns[at]
        if after.shape != before.shape or not len(rows):
            return torch.zeros(0)
        where = (rows,) if self.of_rows else (rows, columns)
        change = (after[where] - before[where]).abs().amax(-1)
        return torch.nan_to_num(change, nan=float("inf")) / before.abs().max()

    def other_tokens(self, where: torch.Tensor, kept: torch.Tensor | None = None) -> torch.Tensor:
        """Return the token ids with random plain tokens at `where`.

        Args:
            where: `[rows, tokens]`.
            kept: ids to replace instead of the batch's, in the batch's shape, such as labels.
        """
        ids, plain = self.batch.ids if kept is None else kept, torch.tensor(self.copy.plain)
        drawn = plain[torch.randint(len(plain), ids.shape, generator=self._draw)]
        again = plain[(torch.searchsorted(plain, drawn) + 1) % len(plain)]
        return torch.where(where, torch.where(drawn == ids, again, drawn), ids)

    def meaningless(self) -> torch.Tensor:
        """Return a mask of the tokens without a special meaning in the config, `[rows, tokens]`."""
        return torch.isin(self.batch.ids, torch.tensor(self.copy.plain))

    @cached_property
    def of_pictures(self) -> torch.Tensor:
        """Mask of the tokens that represent pictures and sounds, by the config, `[rows, tokens]`."""
        config = getattr(self.copy.model, "config", None)
        tokens = [token for name in _PICTURES if isinstance(token := getattr(config, name, None), int)]
        return torch.isin(self.batch.ids, torch.tensor(tokens, dtype=torch.long))

    def noise(self, like: torch.Tensor) -> torch.Tensor:
        """Return normally distributed values of the same shape and dtype."""
        return torch.randn(like.shape, generator=self._draw, dtype=torch.float64).to(like.dtype)

    @cached_property
    def shift(self) -> int | None:
        """Offset of the targets to the predictions in tokens; None if the targets do not repeat the inputs."""
        learned, ids = self.learned, self.batch.ids
        config = getattr(self.copy.model, "config", None)
        if self.of_rows or self.base.shape[1] != ids.shape[1] or getattr(config, "is_encoder_decoder", False):
            return None
        if not self.batch.labelled:
            return 1 if _predicts_the_next(self.copy.model) else None
        shares: dict[int, float] = {}
        for shift in (1, 0, 2, -1):
            columns = learned.columns + shift
            within = (columns >= 0) & (columns < ids.shape[1])
            if within.any():
                equal = ids[learned.rows[within], columns[within]] == learned.targets[within]
                shares[shift] = float(equal.double().mean())
        best = max(shares, key=shares.__getitem__)
        return best if shares[best] > 0.6 else None


def _next_tokens(logits: torch.Tensor, batch: Batch) -> Predictions:
    """Return the predictions that a loss outside of the model learns; all rows' predictions for a classifier."""
    if logits.dim() == 2:
        rows = torch.arange(len(logits))
        return Predictions(rows, torch.zeros_like(rows), torch.zeros_like(rows))
    labels = batch.inputs["labels"]
    if logits.shape[1] != labels.shape[1] or int(labels.max()) >= logits.shape[-1]:
        raise UndecidedError("the model returns no logits of its tokens")
    rows, columns = (labels[:, 1:] != IGNORED).nonzero(as_tuple=True)
    return Predictions(rows, columns, labels[rows, columns + 1])


def _predicts_the_next(model: nn.Module) -> bool:
    """Return whether the name of a transformers class shows next-token prediction, for batches without labels."""
    names = {type(module).__name__ for module in model.modules()}
    return any(name.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")) for name in names)


def spread(first: int, last: int, most: int) -> list[int]:
    """Return at most `most` evenly spaced integers from `first` to `last`."""
    return sorted(set(torch.linspace(first, last, most).long().tolist()))


def _learned(logits: torch.Tensor, loss: torch.Tensor, batch: Batch) -> Predictions:
    """Return the predictions whose logits have a gradient: all others do not affect the loss."""
    gradient = None
    if loss.requires_grad and logits.requires_grad:
        (gradient,) = torch.autograd.grad(loss.sum(), logits, allow_unused=True)
    if gradient is not None and gradient.dim() == 2:
        rows = gradient.abs().amax(-1).nonzero()[:, 0]
        return Predictions(rows, torch.zeros_like(rows), gradient[rows].argmin(-1))
    if gradient is not None:
        rows, columns = gradient.abs().amax(-1).nonzero(as_tuple=True)
        return Predictions(rows, columns, gradient[rows, columns].argmin(-1))
    if batch.inputs["labels"].shape != batch.ids.shape:
        raise UndecidedError("the loss does not depend on the logits")
    return _next_tokens(logits, batch)  # of a loss that is computed without the logits

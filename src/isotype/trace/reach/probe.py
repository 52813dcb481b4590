"""The predictions of a small copy for a batch, and how other inputs change these predictions."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from isotype.core.operators import tensors_of
from isotype.model.loss import find_loss
from isotype.model.small import Copy
from isotype.trace.reach.batch import IGNORED, Batch

LEAST_CHANGE = {torch.float64: 1e-5, torch.float32: 1e-4}
"""Smallest change of a logit that counts, relative to the largest logit. Rounding in float32 changes logits by 1e-7."""

_PICTURES = ("image_token_id", "image_token_index", "audio_token_id", "video_token_id")


class UndecidedError(Exception):
    """Raised if the measurement is impossible. The message says why."""


@dataclass(frozen=True)
class Predictions:
    """The predictions on which the loss depends.

    Attributes:
        rows, columns: where each prediction is in the logits, `[predictions]`.
        targets: target token of each prediction, `[predictions]`.
    """

    rows: torch.Tensor
    columns: torch.Tensor
    targets: torch.Tensor

    def __len__(self) -> int:
        return len(self.rows)


class Probe:
    """A small copy of a model and its batch.

    Args:
        copy: the small copy of the model. Its floats have the dtype `dtype`.
        batch: the batch, with the copy's token ids, and floats in `dtype`.
        deadline: value of `time.thread_time` in seconds. No test of an input starts after the deadline.
        dtype: dtype of the copy, a key of `LEAST_CHANGE`.

    Raises:
        UndecidedError: the copy's predictions cannot be compared.
    """

    def __init__(self, copy: Copy, batch: Batch, deadline: float, dtype: torch.dtype) -> None:
        self.copy, self.batch, self.least = copy, batch, LEAST_CHANGE[dtype]
        self._deadline = deadline
        self._draw = torch.Generator().manual_seed(0)
        output = self.run(batch.inputs)
        logits, loss = logits_of(output, batch.ids), find_loss(output) if batch.labelled else None
        if logits is None:
            raise UndecidedError(
                "the model returns no logits, or logits of another shape than the batch's rows and tokens"
            )
        if loss is None and batch.labelled:
            raise UndecidedError("the model returns no loss")
        if logits.dim() == 2 and batch.labelled and batch.inputs["labels"].shape == batch.ids.shape:
            raise UndecidedError("the model returns no logits of its tokens")
        self.of_rows = logits.dim() == 2  # one prediction per row, as of a classifier
        self.learned = _next_tokens(logits, batch) if loss is None else _learned(logits, loss, batch)
        self.base = self.logits(batch.inputs)  # without gradients, as in `changes`: the same kernels run
        if not bool(self.base.isfinite().all()):
            raise UndecidedError("the copy's logits are not finite")
        if not torch.equal(self.base, self.logits(batch.inputs)):
            raise UndecidedError("two runs of the model with the same inputs give different logits")
        if not len(self.learned):
            raise UndecidedError("no label of the batch counts in the loss")

    @property
    def late(self) -> bool:
        return time.thread_time() > self._deadline

    def run(self, inputs: Mapping[str, Any]) -> Any:
        """Return the output of the copy; every call uses the same random numbers."""
        torch.manual_seed(0)
        return self.copy.model(**self.batch.arguments(inputs))

    def loss(self) -> torch.Tensor | None:
        """Return the copy's loss; if it is computed outside of the model, another loss of the same predictions."""
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
        """Return the copy's logits, `[rows, predictions, …]`."""
        with torch.no_grad():
            logits = logits_of(self.run(inputs), inputs["input_ids"])
        assert logits is not None
        return logits[:, None] if self.of_rows else logits

    def changes(
        self, inputs: Mapping[str, Any], at: torch.Tensor | None = None, base: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return how much `inputs` change each prediction that has a label, relative to the largest logit.

        `at`: mask of the predictions to compare, `[learned]` (default: all). `base`: logits before the change.
        """
        before, after = self.base if base is None else base, self.logits(inputs)
        index: Any = slice(None) if at is None else at
        rows, columns = self.learned.rows[index], self.learned.columns[index]
        if after.shape != before.shape or not len(rows):
            return torch.zeros(0)
        change = (after[rows, columns] - before[rows, columns]).abs().amax(-1)
        return torch.nan_to_num(change, nan=float("inf")) / before.abs().max()

    def other_tokens(self, where: torch.Tensor, tokens: torch.Tensor | None = None) -> torch.Tensor:
        """Return a copy of `tokens` (default: the batch's ids), with other random tokens where the mask `where` is True.

        `tokens` and `where` have the shape `[rows, tokens]`. The new tokens have no special meaning.
        """
        ids, plain = self.batch.ids if tokens is None else tokens, torch.tensor(self.copy.plain)
        drawn = plain[torch.randint(len(plain), ids.shape, generator=self._draw)]
        following = plain[(torch.searchsorted(plain, drawn) + 1) % len(plain)]
        return torch.where(where, torch.where(drawn == ids, following, drawn), ids)

    @cached_property
    def meaningless(self) -> torch.Tensor:
        """Mask of the tokens that have no special meaning in the config and are no padding, `[rows, tokens]`."""
        return torch.isin(self.batch.ids, torch.tensor(self.copy.plain)) & ~self.batch.padding

    @cached_property
    def of_pictures(self) -> torch.Tensor:
        """Mask of the tokens whose ids represent images or audio in the config, `[rows, tokens]`."""
        config = getattr(self.copy.model, "config", None)
        tokens = [token for name in _PICTURES if isinstance(token := getattr(config, name, None), int)]
        return torch.isin(self.batch.ids, torch.tensor(tokens, dtype=torch.long))

    def noise(self, like: torch.Tensor) -> torch.Tensor:
        """Return normally distributed values in the shape and dtype of `like`."""
        return torch.randn(like.shape, generator=self._draw, dtype=torch.float64).to(like.dtype)

    @cached_property
    def shift(self) -> int | None:
        """Distance in tokens from a prediction to its target in the input; None if the targets are not input tokens."""
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


def logits_of(output: Any, ids: torch.Tensor) -> torch.Tensor | None:
    """Return the logits in a model's output, `[rows, tokens, …]` or `[rows, …]`; None if there are none."""
    named = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    for logits in [named] if isinstance(named, torch.Tensor) else tensors_of(output):
        if logits.is_floating_point() and logits.dim() in (2, 3) and logits.shape[0] == ids.shape[0]:
            return logits
    return None


def gradients_of(model: nn.Module, loss: torch.Tensor | None) -> dict[str, torch.Tensor | None]:
    """Return the gradient of each trainable parameter; None if the loss does not use it. Return {} if the loss has no graph."""
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    if not trained or loss is None or not loss.requires_grad:
        return {}
    gradients = torch.autograd.grad(loss.sum(), list(trained.values()), allow_unused=True)
    return dict(zip(trained, gradients, strict=True))


def _next_tokens(logits: torch.Tensor, batch: Batch) -> Predictions:
    """Return each label's prediction, from the token before the label; for a classifier, each row's prediction."""
    if logits.dim() == 2:
        rows = torch.arange(len(logits))
        return Predictions(rows, torch.zeros_like(rows), torch.zeros_like(rows))
    labels = batch.inputs["labels"]
    if logits.shape[1] != labels.shape[1] or int(labels.max()) >= logits.shape[-1]:
        raise UndecidedError("the model returns no logits of its tokens")
    rows, columns = (labels[:, 1:] != IGNORED).nonzero(as_tuple=True)
    return Predictions(rows, columns, labels[rows, columns + 1])


def _predicts_the_next(model: nn.Module) -> bool:
    """Return whether a model predicts the next token, by the name of its transformers class."""
    names = {type(module).__name__ for module in model.modules()}
    return any(name.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")) for name in names)


def spread(first: int, last: int, most: int) -> list[int]:
    """Return at most `most` evenly spaced integers from `first` to `last`."""
    return sorted(set(torch.linspace(first, last, most).long().tolist()))


def _learned(logits: torch.Tensor, loss: torch.Tensor, batch: Batch) -> Predictions:
    """Return the predictions whose logits have a gradient. The loss depends on no other prediction."""
    gradient = None
    if loss.requires_grad and logits.requires_grad:
        (gradient,) = torch.autograd.grad(loss.sum(), logits, allow_unused=True)
    if gradient is not None:
        gradient = gradient[:, None] if gradient.dim() == 2 else gradient
        rows, columns = gradient.abs().amax(-1).nonzero(as_tuple=True)
        return Predictions(rows, columns, gradient[rows, columns].argmin(-1))
    if batch.inputs["labels"].shape != batch.ids.shape:
        raise UndecidedError("the loss does not depend on the logits")
    return _next_tokens(logits, batch)  # the loss is computed without the logits

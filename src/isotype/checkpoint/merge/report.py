"""A merge and its rounding errors, as data."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

from isotype.core.dtypes import GGUF_TYPES, dtype_name

ENOUGH = 0.98
"""Minimum part of the learning that a merged model has to keep."""

VANISHED_LIMIT = 0.99
"""Share of changed entries with the base's codes above which the report states that the result is the base."""

_CHUNK = 1 << 18
"""Entries compared at a time: they stay in the caches, and no further copy of a weight is needed."""


@dataclass(frozen=True)
class WeightLoss:
    """Rounding loss of one merged weight W + D, with W the base's weight and D the adapter's update.

    Attributes:
        name: the parameter's name in the merged model.
        relative_error: ||S - (W + D)|| / ||D|| in Frobenius norms, as a fraction; S is the stored weight.
        entries: number of nonzero entries of D.
        vanished: entries stored like W's, in the same value or code; None if unknown.
    """

    name: str
    relative_error: float
    entries: int
    vanished: int | None


@dataclass(frozen=True)
class LogitsDifference:
    """Distance of a merged model from the trained one (the adapter on its own base), in float32.

    Attributes:
        tokens: number of compared tokens.
        max_abs: largest absolute difference of two logits.
        mean_kl: mean over the tokens of KL(trained || merged), in nats.
        base_kl: that of KL(trained || base).
        losses: of the base, the trained and the merged model on rows of the training's data; None on other texts.
        source: name of the rows; None for the package's texts.
        pictured: those of the tokens that follow a picture.
    """

    tokens: int
    max_abs: float
    mean_kl: float
    base_kl: float = 0.0
    losses: tuple[float, float, float] | None = None
    source: str | None = None
    pictured: int = 0

    @property
    def kept(self) -> float | None:
        """1 - KL(trained || merged) / KL(trained || base); None if the adapter changes nothing."""
        return 1 - self.mean_kl / self.base_kl if self.base_kl > 0 else None

    @property
    def fall(self) -> float | None:
        """Remaining part of the training's decrease of the loss; None if it did not decrease."""
        if self.losses is None or self.losses[0] <= self.losses[1]:
            return None
        base, trained, merged = self.losses
        return (base - merged) / (base - trained)


@dataclass(frozen=True)
class Form:
    """A storage of a merged model, tried without writing it.

    Attributes:
        arguments: of `isotype merge`.
        bits: of a weight, its constants included.
        kept: as `LogitsDifference.kept`.
    """

    arguments: str
    bits: float
    kept: float

    def __str__(self) -> str:
        return f"{self.arguments} ({self.bits:g} bits a weight, keeps {share(self.kept)})"


@dataclass(frozen=True)
class MergeReport:
    """A completed merge.

    Attributes:
        output: directory of the merged model, or its GGUF file.
        storage: of the base: `"nf4"`, `"fp4"` and `"int8"` were dequantized first.
        dtype: of the merged weights before they are stored as `stored`, and why this one.
        weights: every weight that the adapter changed, with its rounding loss; measured on the written files if
            quantized or GGUF.
        logits: the adapter on its own base compared with the merged model, or None (`notes` tell why).
        bytes: size of the files written.
        notes: additional or omitted actions, and why.
        stored: format of bitsandbytes or type of GGUF, None for dense safetensors.
        passed: known values beyond the range of `dtype`, in sentences.
        model: what to open: `output`, or the GGUF file in it.
        cheapest: the form of fewest bits that keeps `ENOUGH`; None if none was tried.
        answers: the merged model generates text.
        exportable: it is a dense model that can be written as a GGUF file, too.
    """

    adapter: Path
    output: Path
    base: str
    storage: str
    dtype: torch.dtype
    dtype_reason: str
    weights: tuple[WeightLoss, ...]
    logits: LogitsDifference | None
    bytes: int
    notes: tuple[str, ...] = ()
    passed: tuple[str, ...] = ()
    stored: str | None = None
    model: Path | None = None
    cheapest: Form | None = None
    answers: bool = True
    exportable: bool = False

    @property
    def median_error(self) -> float:
        """Median of the weights' relative errors; 0 if the adapter changes nothing."""
        return median([weight.relative_error for weight in self.weights]) if self.weights else 0.0

    @property
    def worst(self) -> WeightLoss | None:
        """Weight that lost the largest part of its update."""
        return max(self.weights, key=lambda weight: weight.relative_error, default=None)

    @property
    def entries(self) -> int:
        return sum(weight.entries for weight in self.weights)

    @property
    def vanished(self) -> int | None:
        """Number of changed entries that are stored like the base's; None if unknown."""
        counts = [weight.vanished for weight in self.weights]
        return None if None in counts else sum(filter(None, counts))

    @property
    def vanished_share(self) -> float:
        """`vanished` as a fraction of `entries`; 0 if not counted."""
        return (self.vanished or 0) / self.entries if self.entries else 0.0

    @property
    def warnings(self) -> tuple[str, ...]:
        """Recommended changes."""
        kept = None if self.logits is None else self.logits.kept
        if kept is None and self.coded and self.median_error >= 1:
            off = f"the median error of a weight is {self.median_error:,.1f} × its update"
            fix = "store it in more bits, or keep the adapter separate from its base"
            lost = f"stored as {self.stored}, {off}: the training may have no effect; {fix}"
            return (*self.passed, lost)
        if kept is None or kept >= ENOUGH:
            return self.passed
        cheap = self.cheapest
        fix = "keep the adapter separate from its base" if cheap is None else f"merge with {cheap}"
        return (*self.passed, f"the merged model keeps {share(kept)} of what was learned; {fix}")

    @property
    def again(self) -> bool:
        """True if nearly all codes are those of a base that had codes of the same form."""
        return self.stored == self.storage and self.vanished_share > VANISHED_LIMIT

    @property
    def coded(self) -> bool:
        """True if weights are stored in codes of blocks or rows."""
        return self.stored is not None and self.stored not in ("f32", "f16", "bf16")


def share(part: float) -> str:
    """Format a part of the learning, rounded down: 100 % is all of it."""
    if part < 0:
        return "less than 0 %"  # further from the trained model than the base is
    return f"{math.floor(round(1000 * part, 4)) / 10:.1f} %"


def wider(stored: str | None, *dtypes: torch.dtype) -> str:
    """Return the argument of `isotype merge` for a wider dtype, or a GGUF file's type."""
    if stored not in GGUF_TYPES:
        return f"--dtype {' or '.join(map(dtype_name, dtypes))}"
    types = [next(kind for kind, each in GGUF_TYPES.items() if each == dtype) for dtype in dtypes]
    return f"--gguf {' or '.join(types)}"


def rounding_loss(
    name: str,
    before: torch.Tensor,
    merged: torch.Tensor,
    dtype: torch.dtype | None,
    stored: torch.Tensor | None = None,
) -> WeightLoss:
    """Return the loss of the update `merged - before` by rounding `merged` to `dtype`.

    Args:
        before: W, of any shape and float dtype.
        merged: W + D in float32, of the same shape.
        dtype: dtype it is rounded to; None if it is stored in codes of blocks or rows.
        stored: the stored values, of the same shape; default: `merged` rounded to `dtype`.
    """
    assert dtype is not None or stored is not None
    lost = moved = 0.0
    entries = vanished = 0
    flat, flat_merged = before.flatten(), merged.flatten()
    flat_stored = None if stored is None else stored.flatten()
    for at in range(0, flat.numel(), _CHUNK):
        old, new = flat[at : at + _CHUNK], flat_merged[at : at + _CHUNK].float()
        update = new - old.float()
        rounded = new.to(dtype) if flat_stored is None else flat_stored[at : at + _CHUNK]
        changed = update != 0
        entries += int(changed.count_nonzero())
        if dtype is not None:
            vanished += int(changed.logical_and_(rounded == old.to(dtype)).count_nonzero())
        lost += _squares(new - rounded.float())
        moved += _squares(update)
    error = (lost / moved) ** 0.5 if moved else 0.0
    return WeightLoss(name, error, entries, None if dtype is None else vanished)


def _squares(values: torch.Tensor) -> float:
    # In float64 from the squares on: those of small numbers underflow in float32.
    return float(torch.linalg.vector_norm(values, dtype=torch.float64)) ** 2


def compare_logits(trained: torch.Tensor, merged: torch.Tensor) -> LogitsDifference:
    """Return the difference of two sets of logits, both `[tokens, vocabulary]` in float64."""
    wide = min(trained.shape[-1], merged.shape[-1])  # a vocabulary may have been padded
    trained, merged = trained[..., :wide], merged[..., :wide]
    expected, actual = trained.log_softmax(-1), merged.log_softmax(-1)
    divergence = (expected.exp() * (expected - actual)).sum(-1)
    largest = float((trained - merged).abs().max())
    return LogitsDifference(trained.shape[0], largest, float(divergence.mean().clamp(min=0)))

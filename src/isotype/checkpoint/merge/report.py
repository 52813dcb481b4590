"""Dataclasses for the result of a merge, and functions that compute its rounding errors."""

import math
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

from isotype.core.dtypes import GGUF_TYPES, dtype_name

ENOUGH = 0.98
"""Smallest `LogitsDifference.kept` that needs no warning."""

VANISHED_LIMIT = 0.99
"""If more than this fraction of the changed entries have the same codes as in the base, the merge has no effect."""

_CHUNK = 1 << 18
"""Number of entries that are compared at a time. They fit into the caches of the CPU."""


_LEAST_KL = 1e-12
"""KL divergence in nats between logits that differ only by float32 rounding (about 1e-6)."""


@dataclass(frozen=True)
class WeightLoss:
    """Rounding loss of a merged parameter W + D, where W is the weight of the base, and D is the update by the
    adapter.

    Attributes:
        relative_error: ||S - (W + D)|| / ||D|| in Frobenius norms, as a fraction. S is the stored weight.
        entries: number of nonzero entries of D.
        vanished: number of these entries that are lost, because W and W + D are stored as the same value or code. None if
            unknown.
    """

    name: str
    relative_error: float
    entries: int
    vanished: int | None


@dataclass(frozen=True)
class LogitsDifference:
    """Distance in float32 between the logits of a merged model and of the trained model (the base of the training with
    the adapter).

    Attributes:
        max_abs: largest absolute difference of two logits.
        mean_kl: mean of KL(trained || merged) over the tokens, in nats.
        base_kl: mean of KL(trained || base) over the tokens, in nats.
        losses: losses of the base, the trained and the merged model on training rows; None for other texts.
        source: name of the training rows; None for isotype's texts.
        pictured: number of compared tokens that follow an image.
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
        """Kept share of the learning, 1 - KL(trained || merged) / KL(trained || base); None if the base's outputs hardly change."""
        return 1 - self.mean_kl / self.base_kl if self.base_kl > _LEAST_KL else None

    @property
    def fall(self) -> float | None:
        """Share of the loss decrease that the merged model keeps; None if the training did not decrease the loss."""
        if self.losses is None or self.losses[0] <= self.losses[1]:
            return None
        base, trained, merged = self.losses
        return (base - merged) / (base - trained)


@dataclass(frozen=True)
class Form:
    """A storage format of a merged model. It is tried without writing a file.

    Attributes:
        arguments: arguments of `isotype merge` for the format.
        bits: bits per weight, including the quantization constants.
        kept: fraction of the learning that is kept, as in `LogitsDifference`.
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
        storage: storage of the base. A base in `"nf4"`, `"fp4"` or `"int8"` was dequantized.
        dtype: dtype to which weights are rounded before they are quantized to `stored`. `dtype_reason`: why.
        weights: rounding loss of each weight that the adapter changed. It is measured on the files if they are quantized or
            GGUF.
        logits: comparison of the merged model with the trained model; None if they were not compared (see `notes`).
        notes: remarks about the written types, about differences from the base, and about the comparison.
        stored: bitsandbytes format or GGUF type; None for dense safetensors.
        range_warnings: warnings about values of the training that exceed the range of `dtype`.
        model: path to load the model from: `output`, or the GGUF file in it.
        cheapest: the tried format with the fewest bits that keeps enough (`ENOUGH`) of the learning; None if no format was
            tried.
        answers: True if the merged model can generate text.
        exportable: True if the model is dense and can also be written as a GGUF file.
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
    range_warnings: tuple[str, ...] = ()
    stored: str | None = None
    model: Path | None = None
    cheapest: Form | None = None
    answers: bool = True
    exportable: bool = False

    @property
    def median_error(self) -> float:
        return median([weight.relative_error for weight in self.weights]) if self.weights else 0.0

    @property
    def worst(self) -> WeightLoss | None:
        return max(self.weights, key=lambda weight: weight.relative_error, default=None)

    @property
    def entries(self) -> int:
        return sum(weight.entries for weight in self.weights)

    @property
    def vanished(self) -> int | None:
        counts = [weight.vanished for weight in self.weights]
        return None if None in counts else sum(filter(None, counts))

    @property
    def vanished_share(self) -> float:
        return (self.vanished or 0) / self.entries if self.entries else 0.0

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings about values beyond the range of the dtype and about lost learning, each with a recommended change."""
        kept = None if self.logits is None else self.logits.kept
        if kept is None and self.coded and self.median_error >= 1:
            off = f"the median error of a weight is {self.median_error:,.1f} × its update"
            fix = "store it in more bits, or keep the adapter separate from its base"
            lost = f"stored as {self.stored}, {off}: the training may have no effect; {fix}"
            return (*self.range_warnings, lost)
        if kept is None or kept >= ENOUGH:
            return self.range_warnings
        cheap = self.cheapest
        fix = "keep the adapter separate from its base" if cheap is None else f"merge with {cheap}"
        return (*self.range_warnings, f"the merged model keeps {share(kept)} of what was learned; {fix}")

    @property
    def again(self) -> bool:
        """True if base and result have the same format, and nearly all changed entries have equal codes in both."""
        return self.stored == self.storage and self.vanished_share > VANISHED_LIMIT

    @property
    def coded(self) -> bool:
        """True if weights are stored in a bitsandbytes format or in GGUF blocks."""
        return self.stored is not None and self.stored not in ("f32", "f16", "bf16")


def share(part: float) -> str:
    """Return a fraction of the learning as a percentage, rounded down to a tenth."""
    if part < 0:
        return "less than 0 %"  # the merged model is further from the trained model than the base
    return f"{math.floor(round(1000 * part, 4)) / 10:.1f} %"


def wider(stored: str | None, *dtypes: torch.dtype) -> str:
    """Return the argument of `isotype merge` that selects one of these dtypes: `--gguf` for a GGUF file, else `--dtype`."""
    if stored not in GGUF_TYPES:
        return f"--dtype {' or '.join(map(dtype_name, dtypes))}"
    types = [next(kind for kind in GGUF_TYPES if GGUF_TYPES[kind] == dtype) for dtype in dtypes]
    return f"--gguf {' or '.join(types)}"


def rounding_loss(
    name: str, before: torch.Tensor, merged: torch.Tensor, stored: torch.Tensor, dtype: torch.dtype | None
) -> WeightLoss:
    """Return how much of the update `merged - before` the stored weight loses. The three tensors have the same shape.

    Args:
        before: W, in any float dtype.
        merged: W + D in float32.
        stored: values of the stored weight, in any float dtype.
        dtype: dtype of the stored weight; None for codes of a bitsandbytes format or of GGUF blocks.
    """
    lost = moved = 0.0
    entries = vanished = 0
    parts = (torch.split(values.flatten(), _CHUNK) for values in (before, merged.float(), stored))
    for old, new, rounded in zip(*parts, strict=True):
        update = new - old.float()
        changed = update != 0
        entries += int(changed.count_nonzero())
        if dtype is not None:
            vanished += int(changed.logical_and_(rounded == old.to(dtype)).count_nonzero())
        lost += _squares(new - rounded.float())
        moved += _squares(update)
    error = (lost / moved) ** 0.5 if moved else 0.0
    return WeightLoss(name, error, entries, None if dtype is None else vanished)


def _squares(values: torch.Tensor) -> float:
    # In float64: the squares of small numbers underflow in float32.
    return float(torch.linalg.vector_norm(values, dtype=torch.float64)) ** 2


def compare_logits(trained: torch.Tensor, merged: torch.Tensor) -> LogitsDifference:
    """Return the difference of two sets of logits, both `[tokens, vocabulary]` in float64."""
    vocabulary = min(trained.shape[-1], merged.shape[-1])  # one of the vocabularies may be padded
    trained, merged = trained[..., :vocabulary], merged[..., :vocabulary]
    expected, actual = trained.log_softmax(-1), merged.log_softmax(-1)
    divergence = (expected.exp() * (expected - actual)).sum(-1)
    largest = float((trained - merged).abs().max())
    return LogitsDifference(trained.shape[0], largest, float(divergence.mean().clamp(min=0)))

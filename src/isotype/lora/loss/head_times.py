"""What language-model heads took on a GPU, isotype's and TRL's: kept in the cache folder by card, torch and class of shapes.

TRL's Triton kernel folds a tile of logits in one pass, but projects three times where `isotype.lora.loss.log_probs` does twice: which of the two
is faster is a matter of the card, the vocabulary and the width. `isotype.lora.loss.head_choice` measures it.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2
from pathlib import Path

import torch

from isotype.core.dtypes import dtype_name
from isotype.lora import measured

REVISION = 1
"""Of both functions: what was measured of former ones does not count."""

_FEWEST, _MOST = 256, 2048


@dataclass(frozen=True)
class HeadShape:
    """A class of calls that one measurement decides for.

    Attributes:
        vocabulary, hidden: of the weight, `[vocabulary, hidden]`.
        tokens: with labels, rounded up to a power of two of 256 to 2048: from there on both take their time in proportion.
        stored: dtype of the weight.
        compute: dtype of the products.
        outputs: results beside the log-probabilities.
        gradients: results that are differentiated.
        trained: whether the weight gets a gradient.
        capped: whether the logits have a soft cap.
    """

    vocabulary: int
    hidden: int
    tokens: int
    stored: torch.dtype
    compute: torch.dtype
    outputs: tuple[str, ...] = ()
    gradients: tuple[str, ...] = ("log_probs",)
    trained: bool = False
    capped: bool = False

    def __str__(self) -> str:
        more = [*self.outputs, *(f"gradient of {name}" for name in self.gradients[1:])]
        more += ["trained"] * self.trained + ["soft cap"] * self.capped
        stored = "" if self.stored == self.compute else f" of {dtype_name(self.stored)} weights"
        size = f"{self.tokens} tokens, {self.vocabulary} words, width {self.hidden}, {dtype_name(self.compute)}{stored}"
        return ", ".join([size, *more])


@dataclass(frozen=True)
class HeadTimes:
    """Milliseconds of forward and backward: medians of turns."""

    isotype: float
    trl: float

    @property
    def own_is_faster(self) -> bool:
        """Whether isotype's is."""
        return self.isotype < self.trl

    def __str__(self) -> str:
        return f"isotype's {self.isotype:.3g} ms, TRL's {self.trl:.3g} ms"


def token_class(tokens: int) -> int:
    """The number of tokens that stands for so many."""
    return int(min(_MOST, max(_FEWEST, 2 ** ceil(log2(max(tokens, 1))))))


def card_of(device: torch.device) -> str:
    """The name of a GPU, as its driver has it."""
    return str(torch.get_device_module(device).get_device_name(device))


TIMES = measured.Kept(HeadTimes)
"""Of every card, by the text of the shape."""


def times_file(card: str) -> Path:
    """Where the times on a card with this torch are kept."""
    return measured.file_of_card("heads", card, REVISION)

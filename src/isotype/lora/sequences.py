"""Sequences behind one another in one row, of which each attends to itself alone: by where they end, and not by a mask of all pairs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Sequences:
    """The sequences of a row `[1, tokens]`.

    Attributes:
        ends: 0, and where each of them ends: int32 `[sequences + 1]`, on the device of the tokens.
        longest: tokens of the longest, known without a look at the device.
        window: how many keys up to its own place a query attends to; None for all.
    """

    ends: torch.Tensor
    longest: int
    window: int | None = None

    def mask(self, tokens: int, *, causal: bool) -> torch.Tensor:
        """Which keys each query attends to, bool `[1, 1, tokens, tokens]`: for kernels that take no lengths."""
        places = torch.arange(tokens, device=self.ends.device)
        owners = torch.bucketize(places, self.ends[1:].long(), right=True)
        seen = owners[:, None] == owners
        behind = places[:, None] - places
        if causal:
            seen = seen & (behind >= 0)
        if self.window is not None:
            seen = seen & (behind < self.window)
        return seen[None, None]


def packed(inputs: Mapping[str, Any]) -> Sequences | None:
    """The sequences of a batch that was packed, by what its collator says of them; None where it says nothing."""
    ends, longest = inputs.get("cu_seq_lens_q"), inputs.get("max_length_q")
    if ends is None or not isinstance(longest, int) or inputs.get("attention_mask") is not None:
        return None
    return Sequences(ends, longest)


_known: ContextVar[Sequences | None] = ContextVar("sequences", default=None)


def current() -> Sequences | None:
    """Return the sequences of the row that a model is called with, where somebody has said them."""
    return _known.get()


@contextmanager
def saying(sequences: Sequences | None) -> Iterator[None]:
    """Within it a model is called with these sequences; with None, nothing is said of them."""
    token = _known.set(sequences)
    try:
        yield
    finally:
        _known.reset(token)

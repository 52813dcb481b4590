"""Concatenated sequences in one row, separated by their ends instead of a full mask."""

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
        ends: 0 and the end of each sequence: int32 `[sequences + 1]`, on the tokens' device.
        longest: tokens of the longest, known without synchronization.
        window: number of keys, up to its own position, that a query attends to; None for all.
    """

    ends: torch.Tensor
    longest: int
    window: int | None = None

    def mask(self, tokens: int, *, causal: bool) -> torch.Tensor:
        """Return the keys that each query attends to, bool `[1, 1, tokens, tokens]`, for kernels without lengths."""
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
    """Return the sequences of a packed batch from its collator's arguments; None if it has none."""
    ends, longest = inputs.get("cu_seq_lens_q"), inputs.get("max_length_q")
    if ends is None or not isinstance(longest, int) or inputs.get("attention_mask") is not None:
        return None
    return Sequences(ends, longest)


_known: ContextVar[Sequences | None] = ContextVar("sequences", default=None)


def current() -> Sequences | None:
    """Return the announced sequences of the row with which a model is called, if any."""
    return _known.get()


@contextmanager
def saying(sequences: Sequences | None) -> Iterator[None]:
    """Announce the sequences of model calls inside; None for unknown."""
    token = _known.set(sequences)
    try:
        yield
    finally:
        _known.reset(token)

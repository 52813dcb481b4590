"""Second moments of a linear layer's input channels: what the constants of its 4-bit weights are fitted by.

They are written into policies, one character a channel: its moment relative to the layer's largest, in half octaves.
"""

from __future__ import annotations

import torch

_LEVELS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
_OCTAVE = 2
"""Levels to an octave. The constants are as good with whole octaves (benchmarks/quality.py)."""
_PRIOR = 8
"""Tokens that count beside those measured, each with the mean of all channels: an expert that two tokens reach says little."""


def written(squares: torch.Tensor, tokens: int) -> str:
    """The moments as text, the largest as `_`.

    Args:
        squares: `[in]`, sums over tokens of the channels' squares, in any unit.
        tokens: how many.
    """
    squares = squares.cpu().double()  # which some devices have not
    moments = squares + _PRIOR * squares.mean() / max(1, tokens)
    levels = (moments / moments.max()).log2().mul(_OCTAVE).round() + len(_LEVELS) - 1
    return "".join(_LEVELS[level] for level in levels.nan_to_num(0).clamp(0, len(_LEVELS) - 1).int().tolist())


def read(text: str) -> torch.Tensor:
    """`[in]` float32 moments relative to the largest.

    Raises:
        ValueError: a character is none of those that are written.
    """
    levels = torch.tensor([_LEVELS.index(each) for each in text], dtype=torch.float32)
    return torch.exp2((levels - (len(_LEVELS) - 1)) / _OCTAVE)

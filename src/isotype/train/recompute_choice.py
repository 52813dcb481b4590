"""`--gradient_checkpointing auto`: no more layers are computed again in the backward than the device's memory asks for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from isotype.core.units import format_bytes
from isotype.model.recompute import CHECKPOINTING
from isotype.precision.devices.room import Room

SPARSEST = 4
"""The fewest layers that are checkpointed are every fourth: fewer would save less than the margin is."""

Foresee = Callable[[Mapping[str, Any] | None], int]


class NotForeseenError(Exception):
    """What a step takes cannot be said; the message says why, as a clause."""


@dataclass(frozen=True)
class Choice:
    """Which layers are computed again in the backward.

    Attributes:
        arguments: of the model's `gradient_checkpointing_enable`; None for no layer.
        reason: why, as a clause.
    """

    arguments: Mapping[str, Any] | None
    reason: str

    @property
    def words(self) -> str:
        """`off`, `every layer`, `every 2nd layer`, …"""
        if self.arguments is None:
            return "off"
        number = int(self.arguments.get("every_n_layers", 1))
        endings = {2: "2nd", 3: "3rd"}
        return "every layer" if number == 1 else f"every {endings.get(number, f'{number}th')} layer"

    def row(self) -> tuple[str, str, str]:
        """The row of the policy's table."""
        return "checkpointing", self.words, self.reason


def choose(foresee: Foresee, room: Room) -> Choice:
    """The fewest layers to compute again with which a step fits: none, every fourth to every second, or all.

    Args:
        foresee: bytes at the peak of a step with these arguments of `gradient_checkpointing_enable`; raises `NotForeseenError`.
        room: what the step may take.
    """
    if room.size is None:
        return Choice(CHECKPOINTING, room.words)
    try:
        without = foresee(None)
        if without <= room.size:
            return Choice(None, f"{format_bytes(without)} at the step's peak, within {room.words}")
        least = foresee(CHECKPOINTING)
        for number in _sparser(without, least, room.size):
            some = {**CHECKPOINTING, "every_n_layers": number}
            peak = foresee(some)
            if peak <= room.size:
                saved = f"{format_bytes(peak)} at the step's peak, {format_bytes(without)} without"
                return Choice(some, f"{saved}, and no more than {room.words}")
    except NotForeseenError as why:
        return Choice(CHECKPOINTING, f"what the step takes without is not known: {why}")
    fits = "" if least <= room.size else ", more than the step may take even so"
    reason = f"{format_bytes(least)} at the step's peak, {format_bytes(without)} without: {room.words}{fits}"
    return Choice(CHECKPOINTING, reason)


def _sparser(without: int, least: int, room: int) -> range:
    """The numbers n to try, the largest first: what every n-th layer saves is nearly an n-th of what all save."""
    if least > room or without <= least:
        return range(0)
    most = min(SPARSEST, int((without - least) / (without - room)))
    return range(most, 1, -1)

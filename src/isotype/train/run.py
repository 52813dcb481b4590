"""A training run as two values: everything decided before a weight is read, and what is built from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from isotype.checkpoint.opened import Checkpoint
from isotype.core.names import format_bytes
from isotype.lora.fuse import FusionReport
from isotype.model.recompute import CHECKPOINTING
from isotype.precision.devices.profile import DeviceProfile
from isotype.precision.devices.room import Room
from isotype.precision.policy import PrecisionPolicy
from isotype.precision.ranges import Ranges
from isotype.report.run.record import RunRecord, Sample
from isotype.train.chat import Prompt
from isotype.train.command.settings import Settings
from isotype.train.rows.lengths import Lengths

SPARSEST = 4
"""At least every fourth layer is checkpointed: fewer would save less than the margin of error."""

Foresee = Callable[[Mapping[str, Any] | None], int]


class NotForeseenError(Exception):
    """The cost of a step cannot be determined; the message is the reason, as a clause."""


@dataclass(frozen=True)
class Choice:
    """The layers recomputed in the backward.

    Attributes:
        arguments: of the model's `gradient_checkpointing_enable`; None for no layer.
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
        """Row of the policy's table."""
        return "checkpointing", self.words, self.reason


def choose(foresee: Foresee, room: Room) -> Choice:
    """Return the fewest recomputed layers with which a step fits: none, every fourth to every second, or all.

    `foresee` returns the peak in bytes with arguments of `gradient_checkpointing_enable`.
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
        return Choice(CHECKPOINTING, f"memory without recomputation is unknown: {why}")
    fits = "" if least <= room.size else ", still more than the step may use"
    reason = f"{format_bytes(least)} at the step's peak, {format_bytes(without)} without: {room.words}{fits}"
    return Choice(CHECKPOINTING, reason)


def _sparser(without: int, least: int, room: int) -> range:
    """Return the numbers n to try, the largest first: every n-th layer saves nearly an n-th of what all save."""
    if least > room or without <= least:
        return range(0)
    most = min(SPARSEST, int((without - least) / (without - room)))
    return range(most, 1, -1)


@dataclass(frozen=True)
class Run:
    """The decisions of a training command.

    Attributes:
        settings: the command, with the base model in place of an adapter to train further.
        ranges: the measurement behind the policy; None if there is none.
        rewards: the trainer's argument for rewards; empty for methods without.
        resume: the run's checkpoint to resume; None to start from the beginning.
        earlier: the report of the run up to there.
        identity: the settings that determine its numbers, see `isotype.train.output.resume.identity_of`.
    """

    settings: Settings
    checkpoint: Checkpoint
    policy: PrecisionPolicy
    profile: DeviceProfile
    data: Any
    rewards: Mapping[str, Any] = field(default_factory=dict)
    resume: Path | None = None
    earlier: RunRecord | None = None
    identity: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    ranges: Ranges | None = None


@dataclass(frozen=True)
class Built:
    """The objects that a run has built for training.

    Attributes:
        asked: questions to answer before and after.
        fusion: the fused functions; None if nothing was fused.
        lengths: of the training rows, if known.
        pictures: the data has pictures.
    """

    trainer: Any
    asked: Sequence[tuple[Sample, Prompt]]
    choice: Choice
    fusion: FusionReport | None = None
    notes: tuple[str, ...] = ()
    lengths: Lengths | None = None
    pictures: bool = False

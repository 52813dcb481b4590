"""A training run as two values: `Run` has the decisions before a weight is read, `Built` the objects built after that."""

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
"""Largest `every_n_layers`: a larger number saves less memory than the error of the memory's estimate."""

Foresee = Callable[[Mapping[str, Any] | None], int]


class NotForeseenError(Exception):
    """The memory of a step cannot be determined; the message is the reason, as a clause."""


@dataclass(frozen=True)
class Choice:
    """The layers that are recomputed in the backward, and the reason for this choice.

    Attributes:
        arguments: keywords of the model's `gradient_checkpointing_enable`; None if no layer is recomputed.
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


def choose(foresee: Foresee, room: Room) -> Choice:
    """Choose as few recomputed layers as the memory allows: none, every fourth, third or second layer, or all.

    `foresee` returns the step's peak memory in bytes, for given arguments of `gradient_checkpointing_enable`.
    """
    if room.size is None:
        return Choice(CHECKPOINTING, room.words)
    try:
        without = foresee(None)
        if without <= room.size:
            return Choice(None, f"{format_bytes(without)} at the step's peak, within {room.words}")
        least = foresee(CHECKPOINTING)
        tries = least <= room.size and without > least
        # To checkpoint every n-th layer saves nearly 1/n of what all layers save.
        most = min(SPARSEST, int((without - least) / (without - room.size))) if tries else 1
        for number in range(most, 1, -1):
            some = {**CHECKPOINTING, "every_n_layers": number}
            peak = foresee(some)
            if peak <= room.size:
                saved = (
                    f"{format_bytes(peak)} at the step's peak ({format_bytes(without)} without recomputation)"
                )
                return Choice(some, f"{saved}, within {room.words}")
    except NotForeseenError as why:
        return Choice(CHECKPOINTING, f"memory without recomputation is unknown: {why}")
    fits = "" if least <= room.size else ", still more than the step may use"
    reason = f"{format_bytes(least)} at the step's peak ({format_bytes(without)} without recomputation): {room.words}{fits}"
    return Choice(CHECKPOINTING, reason)


@dataclass(frozen=True)
class Run:
    """The decisions of a training command.

    Attributes:
        settings: the command's settings, with the base model in place of an adapter to train further.
        rewards: the trainer's argument `reward_funcs`; empty for methods without rewards.
        resume: the checkpoint to resume; None to start from the beginning.
        earlier: the report of the run up to the checkpoint `resume`.
        identity: the settings that determine the run's numbers, see `isotype.train.output.resume.identity_of`.
        ranges: the value ranges by which the policy was decided; None without a measurement.
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
        asked: sample questions for the model before and after the training, with their prompts.
        fusion: the report on the fused layers; None if nothing was fused.
        lengths: lengths of the training rows; None if they are unknown.
        pictures: True if the data has pictures.
    """

    trainer: Any
    asked: Sequence[tuple[Sample, Prompt]]
    choice: Choice
    fusion: FusionReport | None = None
    notes: tuple[str, ...] = ()
    lengths: Lengths | None = None
    pictures: bool = False

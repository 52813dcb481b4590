"""A training run: its decisions, and the objects that are built for it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from isotype.checkpoint.checkpoint import Checkpoint
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
"""Largest `every_n_layers`. With larger numbers, less memory is saved than the error of the memory estimate."""

Foresee = Callable[[Mapping[str, Any] | None], int]


class NotForeseenError(Exception):
    """The memory of a step cannot be determined. The message is a clause that gives the reason."""


@dataclass(frozen=True)
class Choice:
    """The choice of the layers that are recomputed in the backward, with the reason.

    Attributes:
        arguments: arguments of the model's `gradient_checkpointing_enable`, or None if no layer is recomputed.
    """

    arguments: Mapping[str, Any] | None
    reason: str

    @property
    def words(self) -> str:
        """A description of the choice, such as `off`, `every layer` or `every 2nd layer`."""
        if self.arguments is None:
            return "off"
        number = int(self.arguments.get("every_n_layers", 1))
        endings = {2: "2nd", 3: "3rd"}
        return "every layer" if number == 1 else f"every {endings.get(number, f'{number}th')} layer"


def choose(foresee: Foresee, room: Room) -> Choice:
    """Choose to recompute as few layers as the memory allows: no layer, every fourth, third or second layer, or all
    layers.

    `foresee` is a function that takes arguments of `gradient_checkpointing_enable` and returns the step's peak memory
    in bytes.
    """
    if room.size is None:
        return Choice(CHECKPOINTING, room.words)
    try:
        without = foresee(None)
        if without <= room.size:
            return Choice(None, f"{format_bytes(without)} at the step's peak, within {room.words}")
        least = foresee(CHECKPOINTING)
        tries = least <= room.size and without > least
        # Recomputing every n-th layer saves nearly 1/n of the memory that recomputing all layers saves.
        most = min(SPARSEST, int((without - least) / (without - room.size))) if tries else 1
        for number in range(most, 1, -1):
            some = {**CHECKPOINTING, "every_n_layers": number}
            peak = foresee(some)
            if peak <= room.size:
                return Choice(some, f"{_peaks(peak, without)}, within {room.words}")
    except NotForeseenError as why:
        return Choice(CHECKPOINTING, f"memory without recomputation is unknown: {why}")
    fits = "" if least <= room.size else ", still more than the step may use"
    return Choice(CHECKPOINTING, f"{_peaks(least, without)}: {room.words}{fits}")


def _peaks(peak: int, without: int) -> str:
    return f"{format_bytes(peak)} at the step's peak ({format_bytes(without)} without recomputation)"


@dataclass(frozen=True)
class Run:
    """The decisions of a training command. The field `trainer` and all following fields are set after the model is
    loaded.

    Attributes:
        settings: the command's settings. If the command names an adapter, the model is the adapter's base model.
        rewards: a dict with the trainer's argument `reward_funcs`, or an empty dict for methods without rewards.
        resume: the checkpoint to resume, or None to start from the beginning.
        earlier: the report of the run up to the checkpoint `resume`.
        identity: the settings that determine the run's results (see `isotype.train.output.resume.identity_of`).
        ranges: the value ranges that decided the policy, or None if ranges were not measured.
        questions: (sample, prompt) of each question that the model answers before and after the training.
        fusion: the report on the fused layers; None if no layer was fused.
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
    trainer: Any = None
    questions: Sequence[tuple[Sample, Prompt]] = ()
    choice: Choice | None = None
    fusion: FusionReport | None = None
    lengths: Lengths | None = None
    pictures: bool = False

"""A training run as two values: everything decided before a weight is read, and what is built from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from isotype.checkpoint.adapter import Adapter
from isotype.checkpoint.opened import Checkpoint
from isotype.lora.fuse import FusionReport
from isotype.precision.devices.profile import DeviceProfile
from isotype.precision.policy import PrecisionPolicy
from isotype.precision.ranges import Ranges
from isotype.report.run.record import RunRecord, Sample
from isotype.train.command.settings import Settings
from isotype.train.generate import Prompt
from isotype.train.recompute_choice import Choice
from isotype.train.rows.lengths import Lengths


@dataclass(frozen=True)
class Run:
    """The decisions of a training command.

    Attributes:
        settings: the command, with the base model in place of an adapter to train further.
        start: the adapter to train further; None for a new one.
        ranges: the measurement behind the policy; None if there is none.
        rewards: the trainer's argument for rewards; empty for methods without.
        resume: the run's checkpoint to resume; None to start from the beginning.
        earlier: the report of the run up to there.
        identity: the settings that determine its numbers, see `isotype.train.output.resume.identity_of`.
    """

    settings: Settings
    checkpoint: Checkpoint
    start: Adapter | None
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
    """

    trainer: Any
    asked: Sequence[tuple[Sample, Prompt]]
    choice: Choice
    fusion: FusionReport | None = None
    notes: tuple[str, ...] = ()
    lengths: Lengths | None = None

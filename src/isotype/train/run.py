"""A training run as two values: all that is decided before a weight is read, and what is built by it."""

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
    """What a training command comes to.

    Attributes:
        settings: the command, with the base model in the place of an adapter that it goes on from.
        checkpoint: the model.
        start: the adapter that is trained further; None for a new one.
        policy: of every role's dtype.
        ranges: the measurement that it was decided by; None where there is none.
        profile: the device.
        data: splits of rows.
        rewards: the trainer's argument for rewards; empty for methods without.
        resume: the run's checkpoint that it goes on from; None for a start from the beginning.
        earlier: the report of the run up to there.
        identity: the settings that decide its numbers, see `isotype.train.output.resume.identity_of`.
        notes: what its user should know besides.
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
    """What a run has built to train.

    Attributes:
        trainer: under the policy.
        asked: the questions that it is asked before and after.
        choice: of the layers that are computed again in the backward.
        fusion: what computes in functions of ours; None where nothing was fused.
        notes: what its user should know besides.
        lengths: of the training rows, where they are known.
    """

    trainer: Any
    asked: Sequence[tuple[Sample, Prompt]]
    choice: Choice
    fusion: FusionReport | None = None
    notes: tuple[str, ...] = ()
    lengths: Lengths | None = None

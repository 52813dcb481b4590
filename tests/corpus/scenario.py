"""A case of the public corpus as something that runs: the broken set-up, what is wrong with it, what fixes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tests.reality import Inputs


@dataclass
class Broken:
    """A fresh broken set-up: the arguments of `isotype.check` and of `tests.reality.real_step`.

    Attributes:
        model: real, tiny, on the CPU.
        inputs: keyword arguments of the model (labels included), or a callable model -> loss.
        autocast: autocast dtype, or None.
        scaler: whether a GradScaler is used.
        optimizer: `adamw`, `adamw_fused` or `sgd`.
        learning_rate: of the optimizer.
        device: device profile to judge for; `cpu` where the failure is seen on this machine.
        policy: the policy the set-up claims to follow, or None.
        fsdp: 0, or the FSDP version that the run is sharded by.
        phases: of the step.
        generate: what is run in the generate phase (callable on the model), or None.
    """

    model: nn.Module
    inputs: Inputs
    autocast: torch.dtype | None = None
    scaler: bool = False
    optimizer: str = "adamw"
    learning_rate: float = 1e-3
    device: str = "cpu"
    policy: Any = None
    fsdp: int = 0
    phases: tuple[str, ...] = ("forward", "backward", "unscale", "optimizer")
    generate: Callable[[nn.Module], Any] | None = None


@dataclass(frozen=True)
class Scenario:
    """One case of the corpus.

    Attributes:
        case: id in the corpus (`automodel-1540`).
        build: makes the broken set-up again each time.
        codes: codes of which one has to be found (`IST101`); the first is the best.
        cause: a regular expression that the finding's `cause` (or its evidence) has to match.
        crashes: a regular expression that the real error has to match, at present on this CPU; "" for a silent case
            or one that only another device refuses.
        phase: where the real step raises, if it does.
        cost: for silent cases: says what it really costs here (a measured fact: bytes, dtype of an output, values
            that did not move), or None once it is fixed. Raises nothing.
        fix: a regular expression that the description of the first verified fix has to match.
        advice: the cure is an argument or a file that only the user can change: the set-up as it is after the user
            followed the advice, built again; None where `isotype.repair` fixes the model itself.
    """

    case: str
    build: Callable[[], Broken]
    codes: tuple[str, ...]
    cause: str
    crashes: str = ""
    phase: str = "forward"
    cost: Callable[[Broken], str | None] | None = None
    fix: str = "."
    advice: Callable[[], Broken] | None = None
    notes: str = field(default="", compare=False)

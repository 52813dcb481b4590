"""One training step to check as one value: whoever asks builds it, one function runs it (`preflight.run`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from isotype.precision.devices.room import Room
from isotype.precision.policy import PrecisionPolicy
from isotype.precision.ranges import Ranges
from isotype.records.memory import MemoryKind, Phase

DEFAULT_PHASES: tuple[Phase, ...] = ("forward", "backward", "unscale", "optimizer")


@dataclass(frozen=True)
class LossOf:
    """A loss over inputs that are faked with the model.

    Attributes:
        function: (model, inputs) -> loss.
        inputs: tensors by name.
    """

    function: Callable[[nn.Module, Any], torch.Tensor]
    inputs: Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class StepRequest:
    """A training step: everything that decides what happens in it.

    Attributes:
        model: any `nn.Module`, real or on the meta device.
        inputs: the keyword arguments the model is called with (labels included), a callable model -> loss, or a
            `LossOf`.
        policy: the policy the model is meant to follow; None: the one it carries, if any.
        device: a device profile (`"t4"`) or a real device; None: the policy's, else the best one here.
        autocast: dtype of autocast around forward and loss; None: the policy's, else off; False: off.
        scaler: whether a GradScaler is used; None: with float16 autocast.
        optimizer: a name, an optimizer, or a callable parameters -> optimizer.
        phases: of the step, in any order; `"generate"` adds a forward without labels and gradients.
        learning_rate: of the optimizer; None: the optimizer's own where it is one.
        fsdp: 0, or the version of FSDP that the run is sharded by.
        devices: how many devices train together, a process each: the memory is that of one of them. Without `fsdp` each holds
            all weights (DDP).
        reshard: whether FSDP frees a block's gathered weights after its forward.
        shard_integers: whether FSDP shards frozen weights that are stored as integers, as isotype does and accelerate does not.
        gradient_checkpointing: switch it on for the step: True, or the arguments of the model's
            `gradient_checkpointing_enable`; None or False leaves it as the model has it.
        generate: what the phase `"generate"` runs, given the model.
        autocast_eval: whether autocast is on in the phase `"generate"` too.
        fold: trace layers that are equal but for their values once; what is found in one is said of all.
        evaluation: the inputs of a batch that is evaluated between steps, as `inputs`; None: nothing is evaluated.
        reference: of what a frozen copy is there too, which the loss compares with: `weights` or `adapters`; None: of nothing.
        accumulates: whether an optimizer step takes several micro-batches of these inputs.
        room: what the step may take of the device's memory; None: its share of all of it.
        wiring: whether it is measured which inputs reach which predictions, on a small copy of the model; or the inputs that it
            is measured with, where a forward that is put before the model's own passes on others.
        ranges: what was measured of the model's values; None: `run` measures a float16 step whose weights are at hand,
            where that takes little time.
    """

    model: nn.Module
    inputs: Any
    policy: PrecisionPolicy | None = None
    device: str | torch.device | None = None
    autocast: str | torch.dtype | bool | None = None
    scaler: bool | None = None
    optimizer: Any = "adamw"
    phases: Sequence[str] = DEFAULT_PHASES
    learning_rate: float | None = None
    fsdp: int = 0
    devices: int = 1
    reshard: bool = True
    shard_integers: bool = True
    gradient_checkpointing: Mapping[str, Any] | bool | None = None
    generate: Callable[[nn.Module], Any] | None = None
    autocast_eval: bool = False
    fold: bool = False
    evaluation: Any = None
    reference: MemoryKind | None = None
    accumulates: bool = False
    room: Room | None = None
    ranges: Ranges | None = None
    wiring: bool | Mapping[str, Any] = True


def named_inputs(inputs: Any) -> Mapping[str, Any]:
    """The tensors among the inputs of a step, by name; none where a callable brings its own."""
    tensors: Mapping[str, Any] = (
        inputs.inputs if isinstance(inputs, LossOf) else {} if callable(inputs) else inputs
    )
    return tensors

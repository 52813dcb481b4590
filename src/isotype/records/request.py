"""A request for one training step; `preflight.run` executes it."""

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
    """A loss function (model, inputs) -> loss, and its input tensors by name, which are faked with the model."""

    function: Callable[[nn.Module, Any], torch.Tensor]
    inputs: Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class StepRequest:
    """A training step to check, with all its settings.

    Attributes:
        model: any `nn.Module`, real or on the meta device.
        inputs: the keyword arguments the model is called with (labels included), a callable model ->
            loss, or a `LossOf`.
        policy: the model's intended policy; None: the one attached to it, if any.
        device: a device profile (`"t4"`) or a real device; None: the policy's, else the best one here.
        autocast: dtype of autocast around forward and loss; None: the policy's, else off; False: off.
        scaler: whether a GradScaler is used; None: with float16 autocast.
        optimizer: a name, an optimizer, or a callable parameters -> optimizer.
        phases: of the step, in any order; `"generate"` adds a forward without labels and gradients.
        learning_rate: of the optimizer; None: the optimizer's own where it is one.
        fsdp: 0, or the version of FSDP that the run is sharded by.
        devices: number of devices that train together; the memory is that of one. Without `fsdp` each
            holds all weights (DDP).
        reshard: whether FSDP frees a block's gathered weights after its forward.
        zero3: version of the DeepSpeed whose ZeRO-3 shards the run; "" for none.
        find_unused: whether DDP looks for parameters without a gradient.
        shard_integers: whether FSDP shards frozen weights that are stored as integers, as isotype does
            and accelerate does not.
        gradient_checkpointing: enables it for the step: True, or the arguments of the model's
            `gradient_checkpointing_enable`; None or False keeps the model's setting.
        generate: function of the model that the phase `"generate"` runs.
        autocast_eval: whether autocast is on in the phase `"generate"` too.
        fold: trace equal layers once; a finding in one applies to all.
        evaluation: inputs of an evaluation batch between steps, as `inputs`; None: no evaluation.
        reference: the loss's frozen reference copy, of `weights` or `adapters`; None: there is none.
        accumulates: whether an optimizer step takes several micro-batches of these inputs.
        ahead: batches of such inputs in the device's memory beside the one that is computed.
        room: device memory available to the step; None: its share of all of it.
        wiring: whether to measure on a small copy which inputs reach which predictions; or the inputs to
            measure with, if a wrapped forward passes on other inputs than it gets.
        others: batches that other processes get at the same time.
        ranges: measured value ranges; None: `run` measures them for a float16 step with available
            weights, if that takes little time.
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
    zero3: str = ""
    find_unused: bool = False
    shard_integers: bool = True
    gradient_checkpointing: Mapping[str, Any] | bool | None = None
    generate: Callable[[nn.Module], Any] | None = None
    autocast_eval: bool = False
    fold: bool = False
    evaluation: Any = None
    reference: MemoryKind | None = None
    accumulates: bool | int = False
    ahead: int = 0
    room: Room | None = None
    ranges: Ranges | None = None
    wiring: bool | Mapping[str, Any] = True
    others: Sequence[Mapping[str, Any]] = ()


def named_inputs(inputs: Any) -> Mapping[str, Any]:
    """Return the tensors among a step's inputs, by name; none for a callable with its own inputs."""
    tensors: Mapping[str, Any] = (
        inputs.inputs if isinstance(inputs, LossOf) else {} if callable(inputs) else inputs
    )
    return tensors


def batches_ahead(micro_batches: int, kind: str) -> int:
    """Batches that a `Trainer` has in a device's memory beside the one that is computed.

    It fetches all micro-batches of an optimizer step first, and accelerate's loader one more, which stays with the host.

    Args:
        micro_batches: of an optimizer step.
        kind: of the device.
    """
    return micro_batches - 1 + (kind == "cpu")

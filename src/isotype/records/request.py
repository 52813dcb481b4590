"""A request for one training step, which `preflight.run` executes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from isotype.precision.devices.profile import DeviceProfile
from isotype.precision.devices.room import Room, room_of
from isotype.precision.policy import PrecisionPolicy
from isotype.precision.ranges import Ranges
from isotype.precision.versions import Incompatibility
from isotype.records.memory import MemoryKind, Phase

DEFAULT_PHASES: tuple[Phase, ...] = ("forward", "backward", "unscale", "optimizer")


@dataclass(frozen=True)
class LossOf:
    """A loss function (model, inputs) -> loss, and its inputs by name. A trace replaces the inputs by fake tensors.

    Attributes:
        kept: how many batches of predictions an evaluation keeps in memory, including copies; 0 in a training step.
        generates: whether the function generates tokens, in the phase `rollout`.
    """

    function: Callable[[nn.Module, Any], Any]
    inputs: Mapping[str, Any]
    kept: int = 0
    generates: bool = False

    @property
    def between(self) -> Phase:
        """The phase of an evaluation with this function: `rollout` if it generates tokens, else `evaluate`."""
        return "rollout" if self.generates else "evaluate"


DEEPSPEED = "DeepSpeed's casts and sharding"
"""The part of a step that is not traced if DeepSpeed runs it."""
UNSHARDED = "the memory is that of unsharded weights, gradients and optimizer states"


@dataclass(frozen=True, kw_only=True, eq=False)
class StepSettings:
    """Settings that a `StepRequest` and the `Setup` of its step share.

    Attributes:
        fsdp: version of FSDP (1 or 2); 0 if FSDP is not used.
        devices: number of devices that train together, by DDP unless `fsdp` is set. Memory is always the memory of one
            device.
        reshard: whether FSDP frees a block's gathered weights after the block's forward.
        deepspeed: whether DeepSpeed runs the step. DeepSpeed's casts and sharding are not traced.
        zero3: version of DeepSpeed if the run uses its ZeRO-3; else "".
        find_unused: whether DDP looks for parameters without a gradient (`find_unused_parameters`).
        shard_integers: whether FSDP shards frozen weights that are stored as integers: True in isotype, False in
            accelerate.
        autocast_eval: whether autocast is also on in evaluation and in the phase `"generate"`.
        room: device memory that the step may take; None for the device's limit.
        ranges: measured value ranges. None lets `run` measure a float16 step if the weights are available and the
            measurement is short.
    """

    fsdp: int = 0
    devices: int = 1
    reshard: bool = True
    deepspeed: bool = False
    zero3: str = ""
    find_unused: bool = False
    shard_integers: bool = True
    autocast_eval: bool = False
    room: Room | None = None
    ranges: Ranges | None = None


@dataclass(frozen=True, eq=False)
class StepRequest(StepSettings):
    """A training step to check, with all its settings. `StepSettings` describes the fields that are not listed.

    Attributes:
        model: any `nn.Module`, real or on the meta device.
        inputs: keyword arguments of the model (with labels), a callable model -> loss, or a `LossOf`.
        policy: the model's intended policy; None for the policy attached to the model, if any.
        device: a device profile (`"t4"`) or a real device; None for the policy's device, else this machine's best.
        autocast: dtype of autocast around forward and loss; None for the policy's dtype, if any; False for no autocast.
        scaler: whether a GradScaler is used; None to use it only under float16 autocast.
        optimizer: a name, an optimizer, a list of optimizers, or a callable parameters -> optimizer.
        phases: phases of the step, in any order; `"generate"` adds a forward without labels and gradients.
        learning_rate: learning rate of the optimizer; None for the learning rate in `optimizer`.
        gradient_checkpointing: True, or arguments of the model's `gradient_checkpointing_enable`; None and False keep
            the model's setting.
        generate: function of the model that the phase `"generate"` runs.
        fold: whether equal layers are traced once. A finding then applies to all equal layers.
        evaluation: an evaluation batch between steps, in the form of `inputs`; None if there is no evaluation.
        reference: kind of the frozen reference copy that the loss uses (`weights` or `adapters`); None if there is
            none.
        accumulates: number of micro-batches in an optimizer step, or True for several.
        fetches_all: whether all micro-batches of an optimizer step are fetched before the first is computed, as in a
            `Trainer`.
        wiring: True to measure, on a small copy of the model, which predictions depend on which inputs. A mapping does
            the same with other inputs than `inputs`, for a wrapper that changes the inputs.
        others: batches that other processes get at the same time.
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
    gradient_checkpointing: Mapping[str, Any] | bool | None = None
    generate: Callable[[nn.Module], Any] | None = None
    fold: bool = False
    evaluation: Any = None
    reference: MemoryKind | None = None
    accumulates: bool | int = False
    fetches_all: bool = False
    wiring: bool | Mapping[str, Any] = True
    others: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True)
class Setup(StepSettings):
    """Settings of the step. `isotype.records.request.StepSettings` describes the fields that are not listed.

    Attributes:
        autocast: autocast dtype around forward and loss, or None.
        learning_rate: learning rate of the optimizer; None if unknown.
        updates: parameter -> (optimizer, learning rate); empty if `optimizer` and `learning_rate` apply to all.
        phases: the requested phases, in order.
        policy: the intended policy; None if the compute dtype was derived from the model.
        compute: dtype to which the trace converts mismatched operands (the dtype of the policy, of autocast, or of most
            modules), unless their part of the model has another dtype.
        gradient_checkpointing: arguments of the model's `gradient_checkpointing_enable`; None keeps the model's setting.
        checkpoint_dtype: dtype of the checkpoint according to the model's config; None if the config names none.
        attention: attention implementation of the model's config (`sdpa`, `flash_attention_2`, …); None if unknown.
        accumulates: number of micro-batches in an optimizer step. From the second micro-batch on, gradients are in
            memory.
        ahead: number of batches in the device's memory besides the current batch.
        batch: shapes of the inputs by argument name, for the report.
        details: rank, scale and targets of the adapters, and gradient checkpointing, in words.
        towers: names of the parts of the model for images or audio only.
        data: a description of the data set's rows; "" if there is no data set.
        incompatible: incompatible versions of this machine's libraries; empty if `profile` is not of this machine.
        family_ranges: a published statement on the float16 range of this model family, with its source; else "".
    """

    profile: DeviceProfile
    autocast: torch.dtype | None
    scaler: bool
    optimizer: str
    compute: torch.dtype
    learning_rate: float | None = None
    phases: tuple[Phase, ...] = ("forward", "backward", "unscale", "optimizer")
    policy: PrecisionPolicy | None = None
    gradient_checkpointing: Mapping[str, Any] | None = None
    checkpoint_dtype: torch.dtype | None = None
    attention: str | None = None
    accumulates: int = 1
    ahead: int = 0
    batch: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    details: tuple[str, ...] = ()
    towers: tuple[str, ...] = ()
    data: str = ""
    incompatible: tuple[Incompatibility, ...] = ()
    family_ranges: str = ""
    updates: Mapping[str, tuple[str, float]] = field(default_factory=dict)

    @property
    def limit(self) -> Room:
        """Device memory that the step may take: `room`, or the device's limit; unknown with DeepSpeed, which shards."""
        return Room(None, UNSHARDED) if self.deepspeed else self.room or room_of(self.profile, all_free=True)


def named_inputs(inputs: Any) -> Mapping[str, Any]:
    """Return a step's inputs by name; an empty mapping if a callable creates the inputs."""
    named: Mapping[str, Any] = inputs.inputs if isinstance(inputs, LossOf) else inputs
    return {} if callable(named) else named

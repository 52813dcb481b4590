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
        kept: number of batches of predictions that an evaluation keeps in memory, including copies; 0 in a training step.
        generates: True if the function generates tokens, in the phase `rollout`.
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
UNSHARDED = "the reported memory includes unsharded weights, gradients and optimizer states"


@dataclass(frozen=True, kw_only=True, eq=False)
class StepSettings:
    """Settings that a `StepRequest` and the `Setup` of its step share.

    Attributes:
        fsdp: version of FSDP (1 or 2); 0 if FSDP is not used.
        devices: number of devices that train together, by DDP unless `fsdp` is set. Memory is always the memory of one device.
        reshard: True if FSDP frees the gathered weights of a block after the forward of the block.
        deepspeed: True if DeepSpeed runs the step. The casts and the sharding of DeepSpeed are not traced.
        zero3: version of DeepSpeed if the run uses its ZeRO-3; else "".
        find_unused: True if DDP looks for parameters without a gradient (`find_unused_parameters`).
        shard_integers: True if FSDP shards frozen weights that are stored as integers, as in isotype. False as in accelerate.
        autocast_eval: True if autocast is also on in evaluation and in the phase `"generate"`.
        room: device memory that the step may use; None for the limit of the device.
        ranges: measured value ranges. None lets `run` measure a float16 step if the weights are available and the measurement
            is short.
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
    """A training step to check, with all its settings. `StepSettings` documents the other fields.

    Attributes:
        model: any `nn.Module`, real or on the meta device.
        inputs: keyword arguments of the model (with labels), a callable model -> loss, or a `LossOf`.
        policy: the intended policy of the model; None for the policy that is attached to the model, if there is one.
        device: a device profile (`"t4"`) or a real device; None for the policy's device, or else this machine's best device.
        autocast: dtype of autocast around forward and loss; None for the dtype of the policy, if there is one; False for no
            autocast.
        scaler: True if a GradScaler is used; None to use a GradScaler only under float16 autocast.
        optimizer: a name, an optimizer, a list of optimizers, or a callable parameters -> optimizer.
        phases: phases of the step, in any order. `"generate"` adds a forward without labels and gradients.
        learning_rate: learning rate of the optimizer; None for the learning rate in `optimizer`.
        gradient_checkpointing: True, or arguments of the model's `gradient_checkpointing_enable`. None and False keep the
            setting of the model.
        generate: function of the model that the phase `"generate"` runs.
        fold: True if equal layers are traced only once. A finding then applies to all equal layers.
        evaluation: an evaluation batch between steps, in the form of `inputs`; None if there is no evaluation.
        reference: kind of the frozen reference copy that the loss uses (`weights` or `adapters`); None if there is none.
        accumulates: number of micro-batches in an optimizer step, or True for several.
        fetches_all: True if all micro-batches of an optimizer step are fetched before the first is computed, as in a `Trainer`.
        wiring: True to measure, on a small copy of the model, which predictions depend on which inputs. A mapping contains
            inputs for this measurement that replace `inputs`, for a wrapper that changes the inputs.
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
    """Settings of the step. `isotype.records.request.StepSettings` documents the other fields.

    Attributes:
        autocast: autocast dtype around forward and loss, or None.
        learning_rate: learning rate of the optimizer; None if unknown.
        updates: parameter -> (optimizer, learning rate); empty if `optimizer` and `learning_rate` apply to all parameters.
        phases: the requested phases, in order.
        policy: the intended policy; None if the compute dtype was derived from the model.
        compute: dtype to which the trace converts mismatched operands, unless their part of the model has another dtype. It is
            the dtype of the policy, of autocast, or of most modules.
        gradient_checkpointing: arguments of the model's `gradient_checkpointing_enable`; None keeps the model's setting.
        checkpoint_dtype: dtype that the checkpoint's config names; None if it names none.
        attention: attention implementation of the model's config (`sdpa`, `flash_attention_2`, …); None if unknown.
        accumulates: number of micro-batches in an optimizer step. If there are several, gradients are in memory from the second
            micro-batch on.
        ahead: number of batches in the device's memory besides the current batch.
        batch: shapes of the inputs by argument name, for the report.
        details: a description of the rank, scale and targets of the adapters, and of gradient checkpointing.
        towers: names of the parts of the model that are used only for images or audio.
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
        """Device memory that the step may use: `room`, or the device's limit. With DeepSpeed, which shards, it is unknown."""
        return Room(None, UNSHARDED) if self.deepspeed else self.room or room_of(self.profile, all_free=True)


def named_inputs(inputs: Any) -> Mapping[str, Any]:
    """Return the inputs of a step by name; an empty mapping if a callable creates the inputs."""
    named: Mapping[str, Any] = inputs.inputs if isinstance(inputs, LossOf) else inputs
    return {} if callable(named) else named

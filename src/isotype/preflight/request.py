"""One training step to check as one value: whoever asks builds it, one function runs it (`preflight.run`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from isotype.compat.transformers import attention_of
from isotype.core.dtypes import parse_dtype
from isotype.core.errors import Problem, UsageError
from isotype.model.adapters import adapter_words
from isotype.model.enforce import policy_of
from isotype.precision.by_ranges import known_families
from isotype.precision.devices.profile import device_profile
from isotype.precision.policy import PrecisionPolicy
from isotype.precision.ranges import Ranges
from isotype.precision.versions import incompatible_here
from isotype.trace.fake.code import LossOf, given_inputs
from isotype.trace.optimizers import learning_rate_of, unknown_optimizer
from isotype.trace.record import PHASES, Phase, Setup
from isotype.trace.sides import tallies, whole
from isotype.trace.weights import unread_weights

DEFAULT_PHASES: tuple[Phase, ...] = ("forward", "backward", "unscale", "optimizer")


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
    ranges: Ranges | None = None

    def setup(self) -> Setup:
        """How the step is run, with every default decided.

        Raises:
            UsageError: every argument that cannot be, at once.
            PrecisionError: an unknown device or dtype.
        """
        problems = list(_problems(self))
        if problems:
            raise UsageError("the step cannot be checked as asked", problems)
        policy = self.policy or policy_of(self.model)
        if policy is not None and policy.keep_frozen:
            policy = None
        asked = policy.autocast if self.autocast is None and policy is not None else self.autocast
        autocast = None if asked in (None, False) else parse_dtype(asked)  # type: ignore[arg-type]
        known = policy.compute if policy is not None else autocast
        config = getattr(self.model, "config", None)
        profile = device_profile(
            self.device if self.device is not None else policy.device if policy else "auto"
        )
        return Setup(
            profile=profile,
            autocast=autocast,
            scaler=autocast == torch.float16 if self.scaler is None else self.scaler,
            optimizer=self.optimizer if isinstance(self.optimizer, str) else type(self.optimizer).__name__,
            compute=known or compute_dtype(self.model),
            learning_rate=_learning_rate(self),
            phases=tuple(phase for phase in PHASES if phase in self.phases),
            policy=policy,
            fsdp=self.fsdp,
            devices=self.devices,
            reshard=self.reshard,
            shard_integers=self.shard_integers,
            gradient_checkpointing={}
            if self.gradient_checkpointing is True
            else self.gradient_checkpointing or None,
            autocast_eval=self.autocast_eval,
            checkpoint_dtype=_checkpoint_dtype(config),
            attention=attention_of(config),
            batch=_shapes(self.inputs),
            details=(*adapter_words(self.model), _checkpointing_words(self)),
            incompatible=incompatible_here(profile.kind) if profile.present else (),
            ranges=self.ranges,
            family_ranges=_family_ranges(config),
        )


def _problems(request: StepRequest) -> Iterator[Problem]:
    yield from unknown_optimizer(request.optimizer)
    inputs = request.inputs
    if not callable(inputs) and not isinstance(inputs, (Mapping, LossOf)) and not hasattr(inputs, "keys"):
        yield Problem(
            f"inputs of type {type(inputs).__name__}",
            "the dict that the model is called with (labels included), or a callable model -> loss",
            "isotype.check(model, {'input_ids': …, 'labels': …})",
        )
    if not isinstance(request.devices, int) or request.devices < 1:
        yield Problem(
            f"devices={request.devices!r}", "a number of devices, at least 1", "give 1, or leave it out"
        )
    unknown = [phase for phase in request.phases if phase not in PHASES]
    if unknown:
        yield Problem(f"phases {unknown}", f"of {', '.join(PHASES)}", "leave them out")


def _learning_rate(request: StepRequest) -> float | None:
    if isinstance(request.optimizer, torch.optim.Optimizer) and request.learning_rate is None:
        return learning_rate_of(request.optimizer)
    return request.learning_rate


def _shapes(inputs: Any) -> dict[str, tuple[int, ...]]:
    given = given_inputs(inputs)
    return {name: tuple(value.shape) for name, value in given.items() if isinstance(value, torch.Tensor)}


def _checkpoint_dtype(config: Any) -> torch.dtype | None:
    """The dtype the model's config says its checkpoint was saved in."""
    dtype = getattr(config, "dtype", None)
    return dtype if isinstance(dtype, torch.dtype) else None


def _family_ranges(config: Any) -> str:
    known = known_families().get(str(getattr(config, "model_type", "")))
    return f"{known['reaches']} ({known['source']})" if known else ""


def _checkpointing_words(request: StepRequest) -> str:
    modules = request.model.modules()
    on = request.gradient_checkpointing or any(
        getattr(module, "gradient_checkpointing", False) is True for module in modules
    )
    return "gradient checkpointing" if on else "no gradient checkpointing"


def compute_dtype(model: nn.Module) -> torch.dtype:
    """The dtype a model computes in by itself: that of most modules that compute, of most elements in a tie."""
    return whole(tallies(unread_weights(model))) or torch.float32

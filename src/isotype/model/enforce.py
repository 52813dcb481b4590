"""Bring a live model under a policy, whatever has touched it before."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from isotype.dtypes import dtype_name
from isotype.errors import PrecisionError, Problem
from isotype.model.boundary import set_boundary
from isotype.model.quantized import align_4bit, align_8bit
from isotype.model.walk import Place, is_pinned, own_float_parameters, places
from isotype.precision.policy import PrecisionPolicy

POLICY_ATTRIBUTE = "precision_policy"
"""Name of the plain attribute that carries the policy on a model."""

_ROUNDED = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Change:
    """One thing `enforce` had to put right.

    Attributes:
        name: fully qualified name of the parameter, buffer or module.
        what: what was changed, as `before -> after`.
    """

    name: str
    what: str

    def __str__(self) -> str:
        return f"{self.name}: {self.what}"


def enforce_model(model: nn.Module, policy: PrecisionPolicy) -> tuple[Change, ...]:
    """Restore `policy` on `model` in place and return what had to be changed (nothing, the second time).

    Trainable parameters become masters; frozen weights take the storage dtype and pinned ones float32;
    quantization states and compute dtypes follow; float32 buffers are restored where something rounded them;
    modules whose own weights are float32 get a boundary, so that they meet 16-bit neighbours in the compute
    dtype. Values that were rounded before are not brought back, except for rotary buffers, which are computed
    anew.

    Raises:
        PrecisionError: a quantized layer has lost its quantization state.
    """
    changes: list[Change] = []
    found = tuple(places(model))
    wanted = wanted_dtypes(found, policy)
    for place in found:
        changes += _parameters(place, wanted)
        changes += _quantization(place, policy)
        changes += _buffers(place, policy)
        changes += _boundary(place, policy)
    setattr(model, POLICY_ATTRIBUTE, policy)
    return tuple(changes)


def policy_of(model: Any) -> PrecisionPolicy | None:
    """The policy a model carries, or None."""
    policy = getattr(model, POLICY_ATTRIBUTE, None)
    return policy if isinstance(policy, PrecisionPolicy) else None


def summarize(changes: tuple[Change, ...]) -> list[str]:
    """One line for each kind of change with how often it occurred, most frequent first."""
    counts = Counter(change.what for change in changes)
    return [f"{what} ({count} place{'s' if count > 1 else ''})" for what, count in counts.most_common()]


def wanted_dtypes(found: Sequence[Place], policy: PrecisionPolicy) -> dict[nn.Parameter, torch.dtype]:
    """The dtype that `policy` wants for each unquantized float parameter of the modules at `found`.

    A parameter that several modules share takes float32 if one of them wants it.
    """
    wanted: dict[nn.Parameter, torch.dtype] = {}
    for place in found:
        for parameter, dtype in _own_dtypes(place, policy).items():
            if wanted.get(parameter) != torch.float32:
                wanted[parameter] = dtype
    return wanted


def _own_dtypes(place: Place, policy: PrecisionPolicy) -> dict[nn.Parameter, torch.dtype]:
    wanted = {}
    pinned = False
    for name, parameter in own_float_parameters(place.module).items():
        if parameter.requires_grad or place.adapter:  # an adapter that is inactive now may be trained next
            wanted[parameter] = policy.master
        elif is_pinned(f"{place.name}.{name}", policy.pinned):
            wanted[parameter], pinned = torch.float32, True
        else:
            wanted[parameter] = policy.plain
    # A norm's kernel takes its weight and bias in one dtype only; a pinned linear layer computes in float32.
    alike = place.kind == "norm" or (place.kind == "linear" and pinned)
    if alike and torch.float32 in wanted.values():
        return dict.fromkeys(wanted, torch.float32)
    return wanted


def _full_name(place: Place, name: str) -> str:
    return f"{place.name}.{name}" if place.name else name


def _parameters(place: Place, wanted: dict[nn.Parameter, torch.dtype]) -> list[Change]:
    changes = []
    for name, parameter in own_float_parameters(place.module).items():
        dtype = wanted[parameter]
        if parameter.dtype == dtype:
            continue
        what = f"{dtype_name(parameter.dtype)} -> {dtype_name(dtype)}"
        changes.append(Change(_full_name(place, name), what))
        grad, parameter.grad = parameter.grad, None
        parameter.data = parameter.data.to(dtype)
        if grad is not None:
            parameter.grad = grad.to(dtype)
    return changes


def _quantization(place: Place, policy: PrecisionPolicy) -> list[Change]:
    changes: list[str] = []
    if place.kind == "linear4bit":
        changes = align_4bit(place.name, place.module, policy.compute)
    elif place.kind == "linear8bit":
        changes = align_8bit(place.name, place.module)
    return [Change(place.name, what) for what in changes]


def _buffers(place: Place, policy: PrecisionPolicy) -> list[Change]:
    """Bring float32 buffers back: rotary frequencies are computed anew, pinned ones keep their rounded values."""
    rounded = {n: b for n, b in place.module.named_buffers(recurse=False) if b.dtype in _ROUNDED}
    rotary = {name for name in rounded if "inv_freq" in name}
    fresh = dict(_fresh_rotary(place).named_buffers(recurse=False)) if rotary else {}
    changes = []
    for name, buffer in rounded.items():
        full_name = _full_name(place, name)
        if name in rotary:
            restored, how = fresh[name].to(buffer.device), "float32, computed anew"
        elif is_pinned(full_name, policy.pinned):
            restored, how = buffer.float(), "float32"
        else:
            continue
        setattr(place.module, name, restored)
        changes.append(Change(full_name, f"{dtype_name(buffer.dtype)} -> {how}"))
    return changes


def _fresh_rotary(place: Place) -> nn.Module:
    """The rotary module at `place`, built again from its config."""
    config = getattr(place.module, "config", None)
    if config is None:
        raise PrecisionError(
            "rotary frequencies were rounded",
            [
                Problem(
                    f"{place.name} ({type(place.module).__name__}) holds 16-bit inv_freq and no config to compute "
                    "it from",
                    "float32 frequencies",
                    "do not cast the whole model with .to(dtype); load it with isotype.load",
                )
            ],
        )
    return type(place.module)(config=config)


def _boundary(place: Place, policy: PrecisionPolicy) -> list[Change]:
    wanted = _wanted_boundary(place, policy)
    if not set_boundary(place.module, wanted, policy.compute):
        return []
    return [Change(place.name, f"{wanted} boundary set" if wanted else "boundary removed")]


def _wanted_boundary(place: Place, policy: PrecisionPolicy) -> str | None:
    if place.kind == "linear8bit":
        return "int8"
    if policy.plain == torch.float32 or place.tuner:
        return None
    own = own_float_parameters(place.module).values()
    high = [p for p in own if p.dtype == torch.float32]
    if not high:
        return None
    if place.kind == "linear4bit":
        return "bias"
    trained = place.adapter or any(p.requires_grad for p in high)
    if place.kind == "other":
        # Of modules that we know nothing about, the author's own code handles the pinned parameters.
        return "compute" if trained else None
    return "compute" if place.kind == "linear" and trained else "float32"

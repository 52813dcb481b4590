"""Bring a live model under a policy, whatever has touched it before."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from isotype.dtypes import dtype_name
from isotype.model.boundary import set_boundary
from isotype.model.quantized import align_4bit
from isotype.model.walk import Place, is_pinned, own_float_parameters, places
from isotype.precision.policy import PrecisionPolicy

POLICY_ATTRIBUTE = "precision_policy"
"""Name of the plain attribute that carries the policy on a model."""


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
    for place in places(model):
        changes += _parameters(place, policy)
        changes += _quantization(place, policy)
        changes += _buffers(place)
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


def wanted_dtypes(place: Place, policy: PrecisionPolicy) -> dict[str, torch.dtype]:
    """The dtype that `policy` wants for each float parameter of the module at `place`, by its own name."""
    own = own_float_parameters(place.module)
    wanted = {}
    for name, parameter in own.items():
        pinned = is_pinned(f"{place.name}.{name}", policy.pinned)
        wanted[name] = policy.master if parameter.requires_grad else torch.float32 if pinned else policy.plain
        if place.adapter and not parameter.requires_grad:
            wanted[name] = parameter.dtype  # an inactive adapter keeps its masters
    if place.kind == "norm" and torch.float32 in wanted.values():
        # A norm kernel takes weight and bias in one dtype only.
        return dict.fromkeys(wanted, torch.float32)
    return wanted


def _parameters(place: Place, policy: PrecisionPolicy) -> list[Change]:
    changes = []
    own = own_float_parameters(place.module)
    for name, wanted in wanted_dtypes(place, policy).items():
        parameter = own[name]
        if parameter.dtype == wanted:
            continue
        full_name = f"{place.name}.{name}" if place.name else name
        changes.append(Change(full_name, f"{dtype_name(parameter.dtype)} -> {dtype_name(wanted)}"))
        parameter.data = parameter.data.to(wanted)
        if parameter.grad is not None:
            parameter.grad = parameter.grad.to(wanted)
    return changes


def _quantization(place: Place, policy: PrecisionPolicy) -> list[Change]:
    if place.kind == "linear4bit":
        return [Change(place.name, what) for what in align_4bit(place.name, place.module, policy.compute)]
    return []


def _buffers(place: Place) -> list[Change]:
    """Rotary frequencies that a blanket `.to(bfloat16)` has rounded are computed anew from the module's config."""
    rounded = {
        name: buffer
        for name, buffer in place.module.named_buffers(recurse=False)
        if "inv_freq" in name and buffer.dtype in (torch.bfloat16, torch.float16)
    }
    if not rounded:
        return []
    fresh = dict(_fresh_rotary(place.module).named_buffers(recurse=False))
    changes = []
    for name, buffer in rounded.items():
        setattr(place.module, name, fresh[name].to(buffer.device))
        changes.append(
            Change(f"{place.name}.{name}", f"{dtype_name(buffer.dtype)} -> float32, computed anew")
        )
    return changes


def _fresh_rotary(module: nn.Module) -> nn.Module:
    config = getattr(module, "config", None)
    if config is None:
        from isotype.errors import PrecisionError, Problem

        raise PrecisionError(
            "rotary frequencies were rounded",
            [
                Problem(
                    f"{type(module).__name__} holds 16-bit inv_freq and no config to compute it from",
                    "float32 frequencies",
                    "do not cast the whole model with .to(dtype); load it with isotype.load",
                )
            ],
        )
    return type(module)(config=config)


def _boundary(place: Place, policy: PrecisionPolicy) -> list[Change]:
    wanted = _wanted_boundary(place, policy)
    if not set_boundary(place.module, wanted, policy.compute):
        return []
    return [Change(place.name, f"{wanted} boundary set" if wanted else "boundary removed")]


def _wanted_boundary(place: Place, policy: PrecisionPolicy) -> str | None:
    if policy.plain == torch.float32 or place.adapter or not place.leaf:
        return None
    own = own_float_parameters(place.module)
    if place.kind in ("linear4bit", "linear8bit"):
        bias = own.get("bias")
        return "bias" if bias is not None and bias.dtype != policy.compute else None
    high = [p for p in own.values() if p.dtype == torch.float32]
    if not high or place.kind == "other":
        return None
    trained_linear = place.kind == "linear" and any(p.requires_grad for p in high)
    if trained_linear:
        return "compute"
    return "float32" if len(high) == len(own) else "compute" if place.kind == "linear" else None

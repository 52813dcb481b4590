"""Fused modules: LoRA layers, gated MLPs, norms and attention with a swapped class."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import nn

from isotype.compat.swapped import Swapped, swap, swapped_class
from isotype.compat.torch import forward_hooks, forward_pre_hooks, is_transformed
from isotype.lora.fused import GatedInput, Siblings
from isotype.lora.gated import GatedParts, call_in_order
from isotype.lora.norms import NormParts, rms_norm
from isotype.lora.rotary import with_loops
from isotype.lora.weights import DenseWeights
from isotype.model.boundary import boundary_of, set_boundary
from isotype.model.walk import must_be_called


class Fused(Swapped):
    """Marker of the created classes.

    Attributes:
        lora_state: names of additional attributes of a module of this class.
        lora_original: the class that was swapped. A boundary set later is on top, with its own
            `original`.
    """

    lora_state: tuple[str, ...] = ()
    lora_original: type[nn.Module]


class FusedLora(Fused):
    """A LoRA layer: `lora_weights` has the model's base weights, `lora_siblings` the layers that run with it."""

    lora_state = ("lora_weights", "lora_siblings")
    lora_weights: DenseWeights
    lora_siblings: Siblings


class FusedMlp(Fused):
    """A gated MLP that does not save its product; `lora_parts` are the names of its parts."""

    lora_state = ("lora_parts",)
    lora_parts: GatedParts


class FusedNorm(Fused):
    """An RMSNorm with the parameters `lora_norm`."""

    lora_state = ("lora_norm",)
    lora_norm: NormParts


class FusedRotary(Fused):
    """An attention layer that rotates queries and keys in one function."""


def _is_left_to_torch() -> bool:
    """Return whether a compiler or transform traces the code, which needs torch's operators."""
    return torch.compiler.is_compiling() or is_transformed()


def _forward_lora(self: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    if isinstance(x, GatedInput):
        return self.lora_siblings.gated_output(self, x, self.lora_original.forward)
    if not args and not kwargs and isinstance(x, torch.Tensor) and not _is_left_to_torch():
        made = self.lora_siblings.output(self, x)
        if made is not None:
            return made
    return self.lora_original.forward(self, x, *args, **kwargs)


# PEFT changes base weights by `.data`, which cannot be detected otherwise.
def _merge(self: Any, *args: Any, **kwargs: Any) -> Any:
    self.lora_weights.forget(self.get_base_layer())
    return self.lora_original.merge(self, *args, **kwargs)


def _unmerge(self: Any) -> Any:
    self.lora_weights.forget(self.get_base_layer())
    return self.lora_original.unmerge(self)


def _forward_gated(self: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    parts: GatedParts = self.lora_parts
    down = self._modules[parts.down]
    hooked = must_be_called(forward_hooks(down)) or must_be_called(forward_pre_hooks(down))
    if args or kwargs or hooked or _is_left_to_torch() or not isinstance(down, FusedLora):
        return self.lora_original.forward(self, x, *args, **kwargs)
    first, second = call_in_order(self, parts, x)
    return down(GatedInput(parts.gate, first, second))  # type: ignore[operator]


def _forward_norm(self: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    if args or kwargs or _is_left_to_torch() or not x.is_floating_point():
        return self.lora_original.forward(self, x, *args, **kwargs)
    return rms_norm(x, self.weight, self.lora_norm)


def _forward_rotary(self: Any, *args: Any, **kwargs: Any) -> Any:
    forward = self.lora_original.forward
    if not _is_left_to_torch():
        forward = with_loops(forward)
    return forward(self, *args, **kwargs)


_MEMBERS: Mapping[type[Fused], Mapping[str, Any]] = {
    FusedLora: {"forward": _forward_lora, "merge": _merge, "unmerge": _unmerge},
    FusedMlp: {"forward": _forward_gated},
    FusedNorm: {"forward": _forward_norm},
    FusedRotary: {"forward": _forward_rotary},
}


@cache
def _fused_class(kind: Any, base: Any) -> Any:
    return swapped_class(kind, (_fused_class, (kind, base)), base, _MEMBERS[kind], lora_original=base)


def put_in(module: nn.Module, kind: Any, *state: Any) -> None:
    """Make `module` a module of class `kind`, with the values of its `lora_state`."""
    for name, value in zip(kind.lora_state, state, strict=True):
        module.__dict__[name] = value
    own: Any = type(module)
    swap(module, _fused_class(kind, own))


def take_out(module: nn.Module) -> None:
    """Restore a module's original class, if it was swapped."""
    if isinstance(module, Fused):
        settings = boundary_of(module)
        set_boundary(module, None)  # a boundary set later is on top
        for name in module.lora_state:
            module.__dict__.pop(name, None)
        swap(module, module.original)
        set_boundary(module, settings)

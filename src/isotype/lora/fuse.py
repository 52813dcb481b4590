"""Put fused LoRA paths into a PEFT model, and take them out again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import psutil
import torch
from torch import nn

from isotype.core.names import plural, starred
from isotype.core.units import format_bytes
from isotype.lora.fused import GatedInput, Siblings, gated_output, why_not, working_dtype
from isotype.lora.gated import GatedParts, call_in_order, gated_parts
from isotype.lora.same_input import same_input
from isotype.lora.weights import DenseWeights
from isotype.model.enforce import policy_of
from isotype.model.swapped import Swapped, swap, swapped_class
from isotype.model.walk import is_tuner_layer


@dataclass(frozen=True)
class FusionReport:
    """What `fuse` did, module by module.

    Attributes:
        fused: names of the LoRA layers that compute in one function.
        together: those of them that read the same input and run as one.
        gated: name of each gated MLP that does not keep its product -> the activation.
        left: name of each LoRA layer that is left on PEFT's own path -> why.
        unseen: why it is not known which layers read the same input; empty where it is.
        copies: how many base weights have a dense copy in the compute dtype.
        copied_bytes: the bytes of those copies.
    """

    fused: tuple[str, ...]
    together: tuple[tuple[str, ...], ...]
    gated: Mapping[str, str]
    left: Mapping[str, str]
    unseen: str = ""
    copies: int = 0
    copied_bytes: int = 0

    @property
    def summary(self) -> str:
        """One line."""
        parts = [f"{len(self.fused)} of {plural(len(self.fused) + len(self.left), 'LoRA layer')}"]
        if self.together:
            parts.append(f"{plural(len(self.together), 'group')} on the same input")
        if self.gated:
            parts.append(plural(len(self.gated), "gated MLP"))
        if self.copies:
            parts.append(f"{format_bytes(self.copied_bytes)} of dense copies")
        return f"fused: {', '.join(parts)}"

    def __str__(self) -> str:
        lines = [f"fused: {plural(len(self.fused), 'LoRA layer')}"]
        kinds = Counter(" ".join(name.rpartition(".")[2] for name in names) for names in self.together)
        lines += [f"together: {names} ({count} times)" for names, count in kinds.items()]
        if self.unseen:
            lines.append(f"one by one: {self.unseen}; give `inputs`, with which the model can be run")
        for gate, count in Counter(self.gated.values()).items():
            lines.append(
                f"gated: {plural(count, 'MLP')} ({gate}), whose product is formed again in the backward"
            )
        if self.copies:
            size = format_bytes(self.copied_bytes)
            lines.append(f"kept: dense copies of {plural(self.copies, 'base weight')}, {size}")
        reasons = Counter((starred(name), reason) for name, reason in self.left.items())
        for (name, reason), count in reasons.items():
            lines.append(f"left to PEFT: {name} ({plural(count, 'layer')}): {reason}")
        return "\n".join(lines)


class _FusedLora(Swapped):
    """Marks the classes of fused LoRA layers.

    Attributes:
        lora_weights: gives the base weights of all fused layers of the model.
        lora_siblings: the layers that run with this one, itself included.
    """

    lora_weights: DenseWeights
    lora_siblings: Siblings


class _FusedMlp(Swapped):
    """Marks the classes of gated MLPs whose product is not kept.

    Attributes:
        lora_parts: the names of its parts.
    """

    lora_parts: GatedParts


_STATE = ("lora_weights", "lora_siblings", "lora_parts")


def _forward_lora(self: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    if isinstance(x, GatedInput):
        return gated_output(self.lora_weights, self, x, self.original.forward)
    if not args and not kwargs and isinstance(x, torch.Tensor) and not torch.compiler.is_compiling():
        made = self.lora_siblings.output(self, x)
        if made is not None:
            return made
    return self.original.forward(self, x, *args, **kwargs)


# PEFT changes base weights by `.data`, which nothing else could notice.
def _merge(self: Any, *args: Any, **kwargs: Any) -> Any:
    self.lora_weights.forget(self.get_base_layer())
    return self.original.merge(self, *args, **kwargs)


def _unmerge(self: Any) -> Any:
    self.lora_weights.forget(self.get_base_layer())
    return self.original.unmerge(self)


def _forward_gated(self: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    parts: GatedParts = self.lora_parts
    down = self._modules[parts.down]
    hooked = down._forward_hooks or down._forward_pre_hooks
    plain = args or kwargs or hooked or torch.compiler.is_compiling() or not isinstance(down, _FusedLora)
    if plain:
        return self.original.forward(self, x, *args, **kwargs)
    first, second = call_in_order(self, parts, x)
    layer: Any = down
    return layer(GatedInput(parts.gate, first, second))


@cache
def _fused_lora(base: Any) -> Any:
    members: dict[str, Any] = {"forward": _forward_lora, "merge": _merge, "unmerge": _unmerge}
    return swapped_class(_FusedLora, (_fused_lora, (base,)), base, members)


@cache
def _fused_mlp(base: Any) -> Any:
    return swapped_class(_FusedMlp, (_fused_mlp, (base,)), base, {"forward": _forward_gated})


def fuse(model: nn.Module, inputs: Any = None, *, budget: int | None = None) -> FusionReport:
    """Let the LoRA layers of a PEFT model compute in one function each, and those that read the same input together.

    Parameters, names, files, merging and switching of adapters stay PEFT's own. A layer whose active adapter cannot be
    fused (see `FusionReport.left`) runs as PEFT has it; so does every layer while it is merged or disabled, is compiled,
    or has hooks inside. Gated MLPs form their product again in the backward instead of keeping it. The model is run
    once, without gradients, to see which layers read the same input.

    Args:
        model: a PEFT model; changed in place. A model that is fused already is fused afresh.
        inputs: what the model is run with once: the arguments of its forward by name. By default a few tokens, which
            reach the language model and no vision tower.
        budget: bytes that dense copies of quantized base weights may take, or of those that another compute dtype needs
            cast. By default a quarter of the free memory on a CPU, where dequantizing a weight costs more than half of
            the product it feeds, and none on other devices. With a policy (`isotype.enforce`, `isotype.add_lora`) the
            copies are made here, else by the first step.

    Returns:
        What was fused and what was not, and why.
    """
    unfuse(model)
    left = {}
    fused: dict[str, Any] = {}
    for name, module in model.named_modules():
        if not is_tuner_layer(module) or not hasattr(module, "lora_A"):
            continue
        reason = why_not(module)
        if reason is None:
            fused[name] = module
        else:
            left[name] = reason
    weights = DenseWeights(_default_budget(model) if budget is None else budget)
    groups, unseen = same_input(model, fused, inputs)
    for names in groups:
        siblings = Siblings(weights, [fused[name] for name in names])
        for layer in siblings.layers:
            layer.lora_weights, layer.lora_siblings = weights, siblings
            swap(layer, _fused_lora(layer.__class__))
    gated = _fuse_gated(model)
    copies = _keep_copies(model, weights, fused)
    together = tuple(names for names in groups if len(names) > 1)
    return FusionReport(tuple(fused), together, gated, left, unseen, copies, weights.bytes)


def _fuse_gated(model: nn.Module) -> dict[str, str]:
    gated = {}
    for name, module in list(model.named_modules()):
        parts = gated_parts(module)
        if parts is not None and isinstance(module._modules[parts.down], _FusedLora):
            setattr(module, "lora_parts", parts)  # noqa: B010 - modules type their attributes as tensors
            swap(module, _fused_mlp(cast(Any, type(module))))
            gated[name] = parts.gate.name
    return gated


def _keep_copies(model: nn.Module, weights: DenseWeights, fused: Mapping[str, Any]) -> int:
    policy = policy_of(model)
    if policy is None:
        return 0
    bases = [layer.get_base_layer() for layer in fused.values()]
    kept = [weights.keep(base, working_dtype(policy.compute, base.weight)) for base in bases]
    return sum(bool(size) for size in kept)


def unfuse(model: nn.Module) -> None:
    """Take the fused paths out of a model: every module has its own class again, and all copies of weights are gone."""
    for module in model.modules():
        if isinstance(module, (_FusedLora, _FusedMlp)):
            swap(module, module.original)
            for name in _STATE:
                module.__dict__.pop(name, None)


def _default_budget(model: nn.Module) -> int:
    on_cpu = all(parameter.device.type == "cpu" for parameter in model.parameters())
    return int(psutil.virtual_memory().available) // 4 if on_cpu else 0

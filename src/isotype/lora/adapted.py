"""Describes PEFT's LoRA layers as data: what a layer computes with its active adapters, or why the layer cannot be fused."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, repeat
from operator import attrgetter, contains, itemgetter
from typing import Any, NamedTuple

import torch
from torch import nn

from isotype.compat.accelerate import HOOK, only_places
from isotype.compat.peft import DORA_CACHE
from isotype.compat.torch import CHILDREN, HOOKS, PARAMETERS
from isotype.model.boundary import boundary_of
from isotype.model.quantized import is_repacked, quantization_state, row_scales
from isotype.model.shard import is_gathered, is_sharded
from isotype.model.walk import LINEAR_KINDS, kind_of, must_be_called


@dataclass(frozen=True)
class Adapter:
    """An active adapter of a layer.

    Attributes:
        scale: alpha / r, or alpha / sqrt(r) for rsLoRA.
        magnitude: True if the adapter is DoRA. A layer with a DoRA adapter has no other adapter and no dropout.
    """

    rank: int
    scale: float
    dropout: float = 0.0
    magnitude: bool = False


@dataclass(frozen=True)
class Layer:
    """A linear layer: the frozen base layer, the factor of each bias (1 or an adapter's scale) and the active adapters."""

    base: nn.Module
    biases: tuple[float, ...] = ()
    adapters: tuple[Adapter, ...] = ()

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        return tuple(adapter.rank for adapter in self.adapters)

    @cached_property
    def scales(self) -> tuple[float, ...]:
        return tuple(adapter.scale for adapter in self.adapters)

    @cached_property
    def drops(self) -> bool:
        return any(adapter.dropout for adapter in self.adapters)

    @cached_property
    def rank(self) -> int:
        return sum(self.ranks)


def why_not(layer: Any) -> str | None:
    """Return a clause that says why a PEFT layer cannot be fused with its active adapters; None if the layer can be fused."""
    base = layer.get_base_layer()
    if layer.base_layer is not base:  # one PEFT method wraps another
        inner = type(layer.base_layer)
        return f"the base is a layer of another adapter ({inner.__module__}.{inner.__name__})"
    kind = kind_of(base)
    weight = getattr(base, "weight", None)
    if kind not in LINEAR_KINDS or weight is None or weight.dim() != 2:
        return f"the base is {type(base).__name__}, not a linear layer"
    if weight.requires_grad:
        return "the base weight is trained"
    if lost := _missing_state(base):
        return f"the base has lost the {lost}"
    if _parts_of(layer).offloaded():
        return "the weights are offloaded (a device map), and only PEFT's forward calls the hooks that fetch them"
    if any(map(is_gathered, (part for part in layer.modules() if part is not layer))):
        return "a part of the layer is sharded separately (FSDP2), and only PEFT's forward calls the hooks that gather it"
    settings = boundary_of(base)
    if settings is not None and settings.kind not in ("bias", "int8"):
        return f"the inputs or outputs of the base are cast (boundary {settings.kind!r})"
    return _why_not_adapters(layer)


def _missing_state(base: Any) -> str | None:
    kind = kind_of(base)
    if kind == "linear4bit":
        state = quantization_state(base)
        if state is None:
            return "quantization state"
        if is_repacked(state):
            return "layout for training: bitsandbytes repacked weights for evaluation; load the model again"
    return "row scales" if kind == "linear8bit" and row_scales(base) is None else None


def _why_not_adapters(layer: Any) -> str | None:
    names = _active(layer)
    for name in names:
        variant = layer.lora_variant.get(name)
        dora = variant is not None and name in layer.lora_magnitude_vector
        if variant is not None and not (dora and type(variant).__name__ == "DoraLinearVariant"):
            return f"adapter {name!r} is a {type(variant).__name__}"
        for part in (layer.lora_A[name], layer.lora_B[name]):
            if kind_of(part) != "linear" or boundary_of(part) or part.weight.dim() != 2:
                return f"adapter {name!r} does not consist of plain linear layers"
        if dora and len(names) > 1:
            return "the layer has DoRA and other adapters"
        if dora and layer.lora_B[name].bias is not None:
            return "the layer has DoRA with lora_bias"
        if dora and layer.training and _dropout(layer, name):
            return "the layer has DoRA with dropout"
        if dora and _caches(layer):
            return "the DoRA norms are cached (peft.helpers.DoraCaching)"
    return None


def _caches(layer: Any) -> bool:
    """Return True if a DoRA layer caches norms between calls, or still has a cache that PEFT's forward must clear."""
    if not layer.lora_magnitude_vector:  # this check runs in every call; most layers have no DoRA
        return False
    dora = sys.modules.get("peft.tuners.lora.dora")
    enabled = not layer.training and getattr(dora, "ENABLE_DORA_CACHING", False)
    return enabled or any(getattr(part, DORA_CACHE, None) for part in layer.lora_magnitude_vector.values())


def _active(layer: Any) -> list[str]:
    return [] if layer.disable_adapters else [name for name in layer.active_adapters if name in layer.lora_A]


def _dropout(layer: Any, name: str) -> float:
    module = layer.lora_dropout[name]
    return float(module.p) if module.training and isinstance(module, nn.Dropout) else 0.0


def _as_data(layer: Any) -> tuple[Layer, tuple[torch.Tensor, ...]]:
    base, names = layer.get_base_layer(), _active(layer)
    biases = [(1.0, base.bias)] + [(layer.scaling[name], layer.lora_B[name].bias) for name in names]
    biases = [(scale, bias) for scale, bias in biases if bias is not None]
    adapters, tensors = [], [bias for _, bias in biases]
    for name in names:
        dora = name in layer.lora_variant
        down, up = layer.lora_A[name].weight, layer.lora_B[name].weight
        adapters.append(Adapter(down.shape[0], layer.scaling[name], _dropout(layer, name), dora))
        tensors += [down, up]
        if dora:
            tensors.append(layer.lora_magnitude_vector[name].weight)
    return Layer(base, tuple(scale for scale, _ in biases), tuple(adapters)), tuple(tensors)


@dataclass(frozen=True)
class Reading:
    """A PEFT layer as data. The object is cached, because creating it takes as long as a few matrix products.

    Attributes:
        tensors: the layer's tensors in the order that `lora_linear` expects.
        device: device of the base weight. Hooks of PEFT's forward may move inputs to this device.
    """

    layer: Layer
    tensors: tuple[torch.Tensor, ...]
    device: torch.device
    _parts: _Parts
    _parameters: list[torch.Tensor | None]  # kept alive, because `_facts` has their ids
    _facts: tuple[Any, ...]

    def holds(self, layer: Any) -> bool:
        """Return True if `layer` has not changed since this object was created."""
        facts = self._parts.facts(layer, self.layer.base, self.tensors)
        return facts == self._facts and not self._parts.hooked()


def read(layer: Any, former: Reading | None) -> Reading | None:
    """Return `former` if it still describes the layer, or else a new `Reading`; None if the layer needs PEFT's
    forward.

    Only PEFT's forward calls the hooks of inner modules, and gathers sharded weights (FSDP2).
    """
    if former is not None and former.holds(layer):
        return former
    parts = _parts_of(layer)
    parameters = parts.parameters()
    sharded = any(parameter is not None and is_sharded(parameter) for parameter in parameters)
    if layer.merged or sharded or parts.hooked() or why_not(layer) is not None:
        return None
    data, tensors = _as_data(layer)
    facts = parts.facts(layer, data.base, tensors)
    return Reading(data, tensors, layer.get_base_layer().weight.device, parts, parameters, facts)


_CHILDREN, _PARAMETERS, _TRAINING = map(itemgetter, (CHILDREN, PARAMETERS, "training"))
_HOOKS = itemgetter(*HOOKS)
_SHAPE, _P = attrgetter("shape"), attrgetter("p")


class _Parts(NamedTuple):
    """The modules of a PEFT layer and of its active adapters.

    Attributes:
        all: the `__dict__` of the layer and of each part.
        called: the `__dict__` of every module that PEFT's forward calls: the base layer and the parts of active adapters.
        dropouts: the dropout modules that PEFT's forward calls.
    """

    all: tuple[dict[str, Any], ...]
    called: tuple[dict[str, Any], ...]
    dropouts: tuple[Any, ...]

    def facts(self, layer: Any, base: Any, tensors: Sequence[torch.Tensor]) -> tuple[Any, ...]:
        """Return everything that a `Reading` of the layer depends on, except hooks."""
        children = [*chain.from_iterable(map(dict.values, map(_CHILDREN, self.all)))]
        active = layer.active_adapter
        return (
            children,
            [*map(type, children)],
            [*map(id, self.parameters())],
            layer.merged,
            layer.disable_adapters,
            active if isinstance(active, str) else tuple(active),
            layer.training,
            [*map(_TRAINING, self.called)],
            [*map(_P, self.dropouts)],
            [*layer.scaling.items()],
            [*layer.lora_variant.items()],
            [*map(_SHAPE, tensors)],
            base.weight.requires_grad,
            _missing_state(base),
            _caches(layer),
        )

    def parameters(self) -> list[torch.Tensor | None]:
        return [*chain.from_iterable(map(dict.values, map(_PARAMETERS, self.called)))]

    def offloaded(self) -> bool:
        """Return True if hooks of accelerate fetch weights in every call."""
        # This check runs for every product; most layers have no hook.
        placed = any(map(contains, self.called, repeat(HOOK)))
        return placed and any(HOOK in part and not only_places(part[HOOK]) for part in self.called)

    def hooked(self) -> bool:
        """Return True if a module inside of the layer has hooks that may change values. Hooks of the layer itself always run."""
        hooks = filter(None, chain.from_iterable(map(_HOOKS, self.called)))
        return any(map(must_be_called, hooks)) or self.offloaded()


def _parts_of(layer: Any) -> _Parts:
    names = _active(layer)
    parts = [getattr(layer, name) for name in (*layer.adapter_layer_names, "lora_dropout")]
    dicts = [p for p in parts if isinstance(p, nn.ModuleDict) and any(name in p for name in names)]
    inner = [part[name] for part in dicts for name in names if name in part]
    called = [part for module in (layer.base_layer, *inner) for part in module.modules()]
    return _Parts(
        tuple(part.__dict__ for part in (layer, *dicts, *called)),
        tuple(part.__dict__ for part in called),
        tuple(part for part in called if isinstance(part, nn.Dropout)),
    )

"""Experts modules, with PEFT's adapters, that compute in `isotype.model.experts.compute` after a class swap.

PEFT (0.21) nests one `ParamWrapper` per adapted weight around an experts module, and forms the delta of every
expert (`lora/layer.py`). A swapped wrapper reads the wrappers below it and applies their adapters to
activations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from isotype.compat.accelerate import HOOK, only_places
from isotype.compat.peft import PARAMETER_WRAPPER_REPAIRS, takes_outputs_first
from isotype.compat.swapped import Swapped, swap, swapped_class
from isotype.compat.torch import (
    forward_hooks,
    forward_pre_hooks,
    needs_operators,
    own_parameters,
)
from isotype.compat.transformers import gate_of, has_parallel_experts
from isotype.core.dtypes import autocast_dtype
from isotype.core.errors import PrecisionError
from isotype.model.boundary import Boundary
from isotype.model.experts.compute import Adapter, Experts, Product, experts_output
from isotype.model.experts.stack import QuantizedStack, codes_of, quantized_stack, shape_of
from isotype.model.shard import is_sharded
from isotype.model.walk import must_be_called
from isotype.precision.devices.simulated import working_dtype

_WRAPPER = "ParamWrapper"
_GATED, _UP, DOWN = "gate_up_proj", "up_proj", "down_proj"


@dataclass(frozen=True)
class Layout:
    """The layout of a class of experts.

    Attributes:
        up: name of the weight of the first product.
        inputs_first: whether weights are stored as `[experts, in, out]`.
        normed: whether outputs are normed before weighting.
        routed: whether the module takes each token's experts and weights; if not, its input is equally
            many tokens of each expert in order.
    """

    up: str
    inputs_first: bool
    biases: bool
    normed: bool
    routed: bool = True


def layout_of(module: nn.Module) -> Layout | None:
    """Return the layout of transformers' experts (`use_experts_implementation`, 5.23) or Llama 4's; else None."""
    cls: Any = type(module)
    if any(each.__name__ == "Llama4TextExperts" for each in cls.__mro__):
        return Layout(_GATED, inputs_first=True, biases=False, normed=False, routed=False)
    if gate_of(module) is None or not hasattr(module, "has_gate"):
        return None
    if has_parallel_experts(module):
        return None
    up = _GATED if module.has_gate else _UP
    return Layout(up, bool(module.is_transposed), bool(module.has_bias), bool(module.has_post_expert_norm))


def _wraps(cls: Any) -> bool:
    """Return whether a class is PEFT's adapter on parameters, by name to avoid importing PEFT."""
    return any(each.__name__ == _WRAPPER for each in cls.__mro__)


def is_experts_wrapper(module: nn.Module) -> bool:
    """Return whether a module is PEFT's adapter on a weight of an experts module."""
    return _wraps(type(module)) and layout_of(module.get_base_layer()) is not None  # type: ignore[operator]


def _with_wrappers(outer: Any) -> list[Any]:
    """Return the wrappers of one experts module from the outermost to the innermost, and the module."""
    modules = [outer]
    while _wraps(type(modules[-1])):
        modules.append(modules[-1].base_layer)
    return modules


def wrappers_of(outer: Any) -> list[Any]:
    """Return the wrappers of one experts module from the outermost to the innermost."""
    return _with_wrappers(outer)[:-1]


def base_of(outer: Any) -> Any:
    """Return the experts module inside the outermost wrapper, or the module itself."""
    return _with_wrappers(outer)[-1]


def outermost(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield a model's experts modules by name; of an adapted one, the outermost wrapper."""
    inner: set[int] = set()
    for name, module in model.named_modules():
        if id(module) in inner:
            continue
        if is_experts_wrapper(module):
            inner |= {id(part) for part in module.modules()}
            yield name, module
        elif layout_of(module) is not None:
            yield name, module


def why_not(outer: Any) -> str | None:
    """Return why experts stay on their own path, as a clause; None if one function can compute them."""
    wrappers, base = wrappers_of(outer), base_of(outer)
    layout = layout_of(base)
    if layout is None:
        return f"{type(base).__name__} computes in a way of its own"
    other = sorted({w.parameter_name for w in wrappers} - {layout.up, DOWN})
    if other:
        return f"{', '.join(other)} is adapted as well"
    trained = [name for name, value in base.named_parameters() if value.requires_grad]
    if trained:
        return f"{', '.join(trained)} is trained"
    if isinstance(base, Boundary):
        return "it computes in its own dtype"
    return None


def needs_function(outer: Any) -> bool:
    """Return whether only the one function is right or memory-bounded: for quantized experts, or adapter dropout."""
    base = base_of(outer)
    stacks = (quantized_stack(base, name) for name in getattr(base, "parametrizations", ()))
    return any(stack is not None for stack in stacks) or _drops(outer)


# ------------------------------------------------------------------------------------------------------------------ forward


class FusedExperts(Swapped):
    """Marker of the created classes; `plain` is the class that was swapped."""

    plain: type[nn.Module]


def _forward_adapted(self: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    if self.disable_adapters or self.merged:
        return self.plain.forward(self, x, *args, **kwargs)
    inputs = (*args, *kwargs.values())  # all callers pass them in this order
    reason = _why_not_now(self, inputs)
    if reason is None:
        return _computed(self, x, inputs)
    if self.training and _drops(self):
        what = f"{type(base_of(self)).__name__}, whose adapters have dropout: {reason}"
        expected = "isotype's own function of experts: PEFT's has no dropout"
        raise PrecisionError.of("dropout on experts would be left out", what, expected, "lora_dropout 0")
    return self.plain.forward(self, x, *args, **kwargs)


def _forward_base(self: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
    inputs = (*args, *kwargs.values())
    if _why_not_now(self, inputs) is None:
        return _computed(self, hidden_states, inputs)
    return self.plain.forward(self, hidden_states, *args, **kwargs)


def _merge(self: Any, *args: Any, **kwargs: Any) -> Any:
    base, name = self.get_base_layer(), self.parameter_name
    if (stack := quantized_stack(base, name)) is not None:
        what = f"{type(base).__name__}.{name}, stored in {stack.storage}"
        fix = "write the merged model with isotype merge, or load the base without quantization"
        headline = "an adapter cannot be merged into codes in memory"
        raise PrecisionError.of(headline, what, "a dense weight", fix)
    return self.plain.merge(self, *args, **kwargs)


_WRAPPER_MEMBERS: Mapping[str, Callable[..., Any]] = {
    "forward": _forward_adapted,
    "merge": _merge,
    **PARAMETER_WRAPPER_REPAIRS,
}
_BASE_MEMBERS: Mapping[str, Callable[..., Any]] = {"forward": _forward_base}


@cache
def _swapped(base: Any) -> Any:
    members = _WRAPPER_MEMBERS if _wraps(base) else _BASE_MEMBERS
    return swapped_class(FusedExperts, (_swapped, (base,)), base, members, plain=base)


def put_in(outer: Any) -> None:
    """Let experts and their wrappers compute in the one function."""
    for module in _with_wrappers(outer):
        cls: Any = type(module)
        if not isinstance(module, FusedExperts):
            swap(module, _swapped(cls))


def take_out(model: nn.Module) -> None:
    """Restore the classes of a model's experts and wrappers, except if only the one function computes them right."""
    for _, outer in outermost(model):
        if not needs_function(outer):
            for module in _with_wrappers(outer):
                if isinstance(module, FusedExperts):
                    swap(module, module.original)  # type: ignore[arg-type]


def use_where_needed(model: nn.Module) -> None:
    """Swap those of a model's experts that need the one function."""
    for _, outer in outermost(model):
        if needs_function(outer) and why_not(outer) is None:
            put_in(outer)


def _why_not_now(outer: Any, inputs: tuple[Any, ...]) -> str | None:
    """Return why this call does not use the one function, as a clause; None if it does."""
    base = base_of(outer)
    layout = layout_of(base)
    if layout is None or len(inputs) != (2 if layout.routed else 0):
        return "it is called in a way of its own"
    if needs_operators() or _is_parametrized_by_others(base):
        return "a compiler or a transform looks at what runs"
    for part in (part for part in outer.modules() if part is not outer):
        hooks = (forward_hooks(part), forward_pre_hooks(part))
        placed = HOOK in part.__dict__ and not only_places(part.__dict__[HOOK])
        if placed or any(map(must_be_called, hooks)):
            return f"a {type(part).__name__} in it has hooks"
    if any(map(is_sharded, outer.parameters())):
        return "a process holds a part of its weights only"
    return why_not(outer)


def _drops(outer: Any) -> bool:
    return any(isinstance(d, nn.Dropout) and d.p for w in wrappers_of(outer) for d in w.lora_dropout.values())


def _is_parametrized_by_others(base: nn.Module) -> bool:
    """Return whether a weight is currently parametrized by trained tensors, as PEFT does during a call."""
    lists = getattr(base, "parametrizations", {}).values()
    return any(not isinstance(each, QuantizedStack) for parts in lists for each in parts)


def _computed(outer: Any, x: torch.Tensor, inputs: tuple[Any, ...]) -> torch.Tensor:
    wrappers, base = wrappers_of(outer), base_of(outer)
    layout = layout_of(base)
    assert layout is not None, "asked of experts only"
    products, factors = [], []
    for name in (layout.up, DOWN):
        wrapper = next((each for each in wrappers if each.parameter_name == name), None)
        adapters, tensors = _adapters(wrapper, layout)
        products.append(_product(base, name, layout, adapters))
        factors += tensors
    rows, count = x.reshape(-1, x.shape[-1]), shape_of(base, DOWN)[0]
    if layout.routed:
        index, scores = (each.reshape(rows.shape[0], -1) for each in inputs)
    else:
        each = torch.arange(count, device=x.device)
        index, scores = each.repeat_interleave(rows.shape[0] // count)[:, None], None
    compute = autocast_dtype(x.device.type) or _dtype(base, DOWN)
    if layout.routed:
        gate = gate_of(base) if layout.up == _GATED else base.act_fn
    else:
        gate = partial(_gated, base.act_fn)
    normed = base.post_expert_norm if layout.normed else None
    spec = Experts(products[0], products[1], gate, compute, working_dtype(compute, x), count, normed)
    return experts_output(spec, rows, index, scores, factors).view(x.shape)


def _gated(activation: Any, h: torch.Tensor) -> torch.Tensor:
    gate, up = h.chunk(2, dim=-1)
    return up * activation(gate)  # type: ignore[no-any-return]


def _dtype(base: nn.Module, name: str) -> torch.dtype:
    stack = quantized_stack(base, name)
    return own_parameters(base)[name].dtype if stack is None else stack.dtype  # type: ignore[union-attr]


def _product(base: Any, name: str, layout: Layout, adapters: tuple[Adapter, ...]) -> Product:
    bias = own_parameters(base)[f"{name}_bias"] if layout.biases else None
    stack = quantized_stack(base, name)
    if stack is None:
        weight = own_parameters(base)[name]
        assert weight is not None, "an experts module has its weights"
        return Product(lambda start, stop: weight[start:stop], layout.inputs_first, adapters, 0, bias)
    size = stack.shape[1] * stack.shape[2] * stack.dtype.itemsize
    part = partial(stack.part, codes_of(base, name))
    return Product(part, layout.inputs_first, adapters, size, bias, tuple(stack.shape[1:]))


def _adapters(wrapper: Any, layout: Layout) -> tuple[tuple[Adapter, ...], list[torch.Tensor]]:
    """Return a wrapper's active adapters, and views of its A `[experts, in, r]` and B `[experts, r, out]`.

    PEFT's lora_A is `[experts * r, …]`, its lora_B `[…, r * experts]`, experts innermost
    (`ParamWrapper.get_delta_factors`).
    """
    adapters: list[Adapter] = []
    tensors: list[torch.Tensor] = []
    if wrapper is None or wrapper.disable_adapters:
        return (), []
    for name in (name for name in wrapper.active_adapters if name in wrapper.lora_A):
        dropout = wrapper.lora_dropout[name]
        drops = isinstance(dropout, nn.Dropout) and dropout.training
        adapters.append(Adapter(wrapper.scaling[name], dropout.p if drops else 0.0))
        first, second = wrapper.lora_A[name].weight, wrapper.lora_B[name].weight
        first = first.reshape(wrapper.num_experts, -1, first.shape[-1])
        outputs = second.shape[0]
        second = second.reshape(-1, wrapper.num_experts).t().unflatten(1, (outputs, -1))
        # The delta is `second first`, or its transpose if PEFT assumes the layout [in, out].
        pair = (second, first) if takes_outputs_first(wrapper) else (first.mT, second.mT)
        tensors += pair if layout.inputs_first else (pair[1].mT, pair[0].mT)
    return tuple(adapters), tensors

"""Replaces the classes of experts and their PEFT adapters, so that `isotype.model.experts.compute` computes them.

PEFT (0.21) wraps an experts module in nested `ParamWrapper`s, one for each adapted weight, and computes every expert's
delta (`lora/layer.py`). After this replacement, the outermost wrapper reads the adapters of all wrappers, and multiplies
activations by them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from isotype.compat.accelerate import HOOK, only_places
from isotype.compat.peft import PARAMETER_WRAPPER_REPAIRS, takes_outputs_first
from isotype.compat.swapped import Swapped, swap, swapped_class
from isotype.compat.torch import forward_hooks, forward_pre_hooks, needs_operators, own_parameters
from isotype.compat.transformers import gate_of, has_parallel_experts
from isotype.core.dtypes import autocast_dtype
from isotype.core.errors import PrecisionError
from isotype.model.boundary import Boundary
from isotype.model.experts.compute import Adapter, Experts, Product, experts_output
from isotype.model.experts.stack import QuantizedStack, codes_of, quantized_stack, shape_of
from isotype.model.shard import is_sharded
from isotype.model.walk import derives_from, must_be_called
from isotype.precision.devices.simulated import working_dtype

_GATED, _UP, DOWN = "gate_up_proj", "up_proj", "down_proj"
_WRAPPER = "ParamWrapper"  # PEFT's class of wrappers around a module whose parameter is adapted


@dataclass(frozen=True)
class Layout:
    """The layout of a class of experts.

    Attributes:
        up: name of the weight of the first product.
        inputs_first: True for weights `[experts, in, out]`, False for `[experts, out, in]`.
        normed: True if a norm is applied to the outputs before the routing weights.
        routed: True if the module gets the experts and routing weights of each token. Otherwise, its input contains all tokens
            of the first expert, then equally many of the second expert, and so on.
    """

    up: str
    inputs_first: bool
    biases: bool
    normed: bool
    routed: bool = True


def layout_of(module: nn.Module) -> Layout | None:
    """Return the layout of a transformers (5.23) experts module, including Llama 4's module; None for other modules."""
    if derives_from(type(module), "Llama4TextExperts"):
        return Layout(_GATED, inputs_first=True, biases=False, normed=False, routed=False)
    if gate_of(module) is None or not hasattr(module, "has_gate") or has_parallel_experts(module):
        return None
    up = _GATED if module.has_gate else _UP
    return Layout(up, bool(module.is_transposed), bool(module.has_bias), bool(module.has_post_expert_norm))


def is_experts_wrapper(module: nn.Module) -> bool:
    """Return True if a module is PEFT's `ParamWrapper` around an experts module."""
    return derives_from(type(module), _WRAPPER) and layout_of(module.get_base_layer()) is not None  # type: ignore[operator]


def _with_wrappers(outer: Any) -> list[Any]:
    """Return an experts module's wrappers, the outermost first, and then the module itself."""
    modules = [outer]
    while derives_from(type(modules[-1]), _WRAPPER):
        modules.append(modules[-1].base_layer)
    return modules


def wrappers_of(outer: Any) -> list[Any]:
    """Return an experts module's wrappers, the outermost first."""
    return _with_wrappers(outer)[:-1]


def base_of(outer: Any) -> Any:
    """Return the experts module inside of the wrapper `outer`; `outer` itself if it is not a wrapper."""
    return _with_wrappers(outer)[-1]


def outermost(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield (name, module) of a model's experts modules. For experts with adapters, yield the outermost wrapper."""
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
    """Return the reason why experts have to keep their own forward; None if isotype's function can compute them."""
    wrappers, base = wrappers_of(outer), base_of(outer)
    layout = layout_of(base)
    if layout is None:
        return f"{type(base).__name__} does not compute as transformers' experts do"
    other = sorted({w.parameter_name for w in wrappers} - {layout.up, DOWN})
    if other:
        return f"{', '.join(other)} is adapted as well"
    trained = [name for name, value in base.named_parameters() if value.requires_grad]
    if trained:
        return f"{', '.join(trained)} is trained"
    if isinstance(base, Boundary):
        return "the experts compute in another dtype"
    return None


def needs_function(outer: Any) -> bool:
    """Return True if these experts need isotype's function: if they are quantized, or their adapters have dropout."""
    base = base_of(outer)
    stacks = (quantized_stack(base, name) for name in getattr(base, "parametrizations", ()))
    return any(stack is not None for stack in stacks) or _drops(outer)


# -------------------------------------------------------------------------------------------------------- forward


class FusedExperts(Swapped):
    """Base class of experts and wrappers whose forward is isotype's function. `plain` is the original class."""

    plain: type[nn.Module]


def _forward_adapted(self: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    if self.disable_adapters or self.merged:
        return self.plain.forward(self, x, *args, **kwargs)
    inputs = (*args, *kwargs.values())  # all callers pass experts and weights in this order
    reason = _why_not_now(self, inputs)
    if reason is None:
        return _computed(self, x, inputs)
    if self.training and _drops(self):
        what = f"{type(base_of(self)).__name__}, whose adapters have dropout: {reason}"
        expected = "experts that isotype's function computes, because PEFT's function has no dropout"
        raise PrecisionError.of("dropout on experts would have no effect", what, expected, "lora_dropout 0")
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
        headline = "an adapter cannot be merged into a quantized weight in memory"
        raise PrecisionError.of(headline, what, "a dense weight", fix)
    return self.plain.merge(self, *args, **kwargs)


@cache
def _swapped(base: Any) -> Any:
    wraps = derives_from(base, _WRAPPER)
    # A compiled block calls this forward uncompiled: PEFT's forward, which can be compiled, has no dropout.
    forward = torch.compiler.disable(_forward_adapted if wraps else _forward_base)  # type: ignore[no-untyped-call]
    members = {"forward": forward, **({"merge": _merge, **PARAMETER_WRAPPER_REPAIRS} if wraps else {})}
    return swapped_class(FusedExperts, (_swapped, (base,)), base, members, plain=base)


def put_in(outer: Any) -> None:
    """Replace the classes of experts and their wrappers, so that isotype's function becomes their forward."""
    for module in _with_wrappers(outer):
        cls: Any = type(module)
        if not isinstance(module, FusedExperts):
            swap(module, _swapped(cls))


def take_out(model: nn.Module) -> None:
    """Restore the classes of a model's experts and wrappers that do not need isotype's function."""
    for _, outer in outermost(model):
        if not needs_function(outer):
            for module in _with_wrappers(outer):
                if isinstance(module, FusedExperts):
                    swap(module, module.original)  # type: ignore[arg-type]


def use_where_needed(model: nn.Module) -> None:
    """Make isotype's function the forward of experts that are quantized or have adapters with dropout."""
    for _, outer in outermost(model):
        if needs_function(outer) and why_not(outer) is None:
            put_in(outer)
    for module in model.modules():
        cls: Any = type(module)
        # The swap also repairs PEFT's wrapper of a quantized stack whose experts keep their own forward.
        wraps = derives_from(cls, _WRAPPER) and not isinstance(module, FusedExperts)
        if wraps and quantized_stack(module.get_base_layer(), module.parameter_name) is not None:  # type: ignore[operator, arg-type]
            swap(module, _swapped(cls))


def _why_not_now(outer: Any, inputs: tuple[Any, ...]) -> str | None:
    """Return the reason why isotype's function cannot compute this call; None if it can."""
    base = base_of(outer)
    layout = layout_of(base)
    if layout is None or len(inputs) != (2 if layout.routed else 0):
        return "the experts are called with other arguments"
    if needs_operators() or _is_parametrized_by_others(base):
        return "a compiler or a transform traces the call"
    for part in (part for part in outer.modules() if part is not outer):
        hooks = (forward_hooks(part), forward_pre_hooks(part))
        placed = HOOK in part.__dict__ and not only_places(part.__dict__[HOOK])
        if placed or any(map(must_be_called, hooks)):
            return f"a {type(part).__name__} inside of the experts has hooks"
    if any(map(is_sharded, outer.parameters())):
        return "this process has only a part of the weights"
    return why_not(outer)


def _drops(outer: Any) -> bool:
    return any(isinstance(d, nn.Dropout) and d.p for w in wrappers_of(outer) for d in w.lora_dropout.values())


def _is_parametrized_by_others(base: nn.Module) -> bool:
    """Return True if a weight has a parametrization besides its quantization, as during PEFT's forward."""
    lists = getattr(base, "parametrizations", {}).values()
    return any(not isinstance(part, QuantizedStack) for parts in lists for part in parts)


def _computed(outer: Any, x: torch.Tensor, inputs: tuple[Any, ...]) -> torch.Tensor:
    wrappers, base = wrappers_of(outer), base_of(outer)
    layout = layout_of(base)
    assert layout is not None
    products, factors = [], []
    for name in (layout.up, DOWN):
        wrapper = next((wrapper for wrapper in wrappers if wrapper.parameter_name == name), None)
        adapters, tensors = _adapters(wrapper, layout)
        products.append(_product(base, name, layout, adapters))
        factors += tensors
    rows, count = x.reshape(-1, x.shape[-1]), shape_of(base, DOWN)[0]
    if layout.routed:
        index, scores = (routing.reshape(rows.shape[0], -1) for routing in inputs)
    else:
        numbers = torch.arange(count, device=x.device)
        index, scores = numbers.repeat_interleave(rows.shape[0] // count)[:, None], None
    stack = quantized_stack(base, DOWN)
    stored = base.get_parameter(DOWN).dtype if stack is None else stack.dtype
    compute = autocast_dtype(x.device.type) or stored
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


def _product(base: Any, name: str, layout: Layout, adapters: tuple[Adapter, ...]) -> Product:
    bias = own_parameters(base)[f"{name}_bias"] if layout.biases else None
    stack = quantized_stack(base, name)
    if stack is None:
        weight = own_parameters(base)[name]
        assert weight is not None, "a weight that is not quantized is a parameter of the experts module"
        return Product(lambda start, stop: weight[start:stop], layout.inputs_first, adapters, 0, bias)
    size = stack.shape[1] * stack.shape[2] * stack.dtype.itemsize
    part = partial(stack.part, codes_of(base, name))
    return Product(part, layout.inputs_first, adapters, size, bias, tuple(stack.shape[1:]))


def _adapters(wrapper: Any, layout: Layout) -> tuple[tuple[Adapter, ...], list[torch.Tensor]]:
    """Return a wrapper's active adapters, and views `[experts, in, r]` and `[experts, r, out]` of their A and B."""
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
        second = second.reshape(-1, wrapper.num_experts).t().unflatten(1, (second.shape[0], -1))
        # The delta is the product `second first`. It is transposed if PEFT takes weights as [in, out].
        pair = (second, first) if takes_outputs_first(wrapper) else (first.mT, second.mT)
        tensors += pair if layout.inputs_first else (pair[1].mT, pair[0].mT)
    return tuple(adapters), tensors

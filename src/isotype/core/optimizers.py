"""Facts about optimizers (package, state dtype, kernels), by parts of the names that `--optim` accepts."""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import Parameter, signature
from typing import Any

import torch
from torch import nn

from isotype.core.arguments import did_you_mean
from isotype.core.errors import Problem, first_line
from isotype.core.tables import table


@dataclass(frozen=True, slots=True)
class NamePart:
    """A part of optimizers' names, such as `galore` in `galore_adamw_8bit`, and facts about these optimizers.

    Attributes:
        package: import name of the optimizer's package; "" for torch and transformers.
        state: dtype of the optimizer state. In `state`, `{}` stands for the dtype of the master weights. If `state` is "",
            another part of the name decides.
        own_kernels: True if the update kernels accept every float dtype.
    """

    text: str
    package: str = ""
    state: str = ""
    why: str = ""
    own_kernels: bool = False


_TABLE = table(__file__)
NAME_PARTS = tuple(NamePart(**part) for part in _TABLE)
"""Each fact comes from the first part of the name that has it: `galore_adamw_8bit` has galore's package and an 8-bit state."""


def package_of(name: str) -> str | None:
    """Return the import name of an optimizer's package; None for torch and transformers."""
    return next((part.package for part in NAME_PARTS if part.package and part.text in name), None)


def state_of(name: str) -> tuple[str, str] | None:
    """Return (dtype, description) of an optimizer's state; None for Adam's. In it, `{}` stands for the master weights' dtype."""
    return next(((part.state, part.why) for part in NAME_PARTS if part.state and part.text in name), None)


def has_own_kernels(name: str) -> bool:
    """Return True if an optimizer's update kernels accept every float dtype."""
    return any(part.own_kernels and part.text in name for part in NAME_PARTS)


def state_bytes(
    name: str, shape: Sequence[int], itemsize: int = 4, *, float32: bool = False, pages: bool = True
) -> int:
    """Return the bytes of the states of one parameter in an optimizer with its own kernels.

    Args:
        itemsize: bytes of an element of the parameter.
        float32: True for parameters (such as embeddings) whose states are neither quantized nor projected.
        pages: True if the device can move paged states to the memory of the CPU. Such states do not count.
    """
    elements = math.prod(shape)
    moments = next((count for part, count in _MOMENTS.items() if part in name), 2)
    if package_of(name) not in ("bitsandbytes", "torchao"):
        bytes_of_moment = 1 if "8bit" in name else itemsize
        rank = _RANK if len(shape) == 2 and min(shape) > _RANK and not float32 else 0
        if rank and ("galore" in name or "apollo" in name):
            return rank * (moments * bytes_of_moment * max(shape) + itemsize * min(shape))
        return bytes_of_moment * moments * elements
    if pages and "paged" in name and elements >= _PAGED:
        return 0
    bits, block = (4, 128) if "4bit" in name else (8, 256) if "8bit" in name else (32, 0)
    if float32 or not block or elements < _SMALL:
        return 4 * moments * elements
    return moments * (elements * bits // 8 + 4 * -(-elements // block))


def bytes_of_step(name: str, shape: Sequence[int], itemsize: int = 4, *, float32: bool = False) -> int:
    """Return the bytes that bitsandbytes (0.49) allocates on a CPU to update one parameter: float32 copies and results.

    The arguments are those of `state_bytes`.
    """
    if package_of(name) != "bitsandbytes":
        return 0
    elements = math.prod(shape)
    copies = _COPIES[not float32 and elements >= _SMALL and "8bit" in name]
    count = next((count for part, count in copies.items() if part in name), copies[""])
    return int(4 * elements * (count + (itemsize < 4)))


_COPIES: tuple[Mapping[str, float], ...] = (
    {"ademamix": 4, "": 3},
    {"ademamix": 9.25, "rmsprop": 3, "": 5},
)
"""For float32 and 8-bit states, maps a part of an optimizer's name to the number of copies of a float32 parameter."""

_MOMENTS = {
    "lomo": 0, "adafactor": 0, "schedule_free_sgd": 1, "lion": 1, "rmsprop": 1, "muon": 1, "grok": 3,
    "ademamix": 3,
}  # fmt: skip
"""Maps a part of a name to the number of states (and copies of weights) that are as large as the parameter. The default is 2."""

_RANK = 128
"""Default rank of the projections of gradients in GaLore and APOLLO. The projection matrix also takes memory."""

_PAGED = 100_000
"""Smallest number of elements of a parameter whose states are paged."""

_SMALL = 4096
"""Parameters with fewer elements than this number have float32 states."""

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adamw_torch": torch.optim.AdamW,
    "adamw_foreach": partial(torch.optim.AdamW, foreach=True),
    "adamw_fused": partial(torch.optim.AdamW, fused=True),
    "adamw_torch_fused": partial(torch.optim.AdamW, fused=True),
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
    "adafactor": torch.optim.Adafactor,
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
}


def unknown_optimizer(asked: Any) -> Iterator[Problem]:
    """Yield a problem if `asked` is an unknown name or a list that contains anything but optimizers."""
    if isinstance(asked, (list, tuple)) and (not asked or len(optimizers_in(asked)) < len(asked)):
        yield Problem("optimizer: a list", "optimizers of torch in the list", "optimizer=[muon, adamw]")
    if isinstance(asked, str) and asked not in OPTIMIZERS and not has_own_kernels(asked):
        fix = did_you_mean(asked, OPTIMIZERS, "use one of these, or a callable", n=2)
        yield Problem(f"optimizer {asked!r}", f"one of {', '.join(OPTIMIZERS)}", fix)


def optimizers_in(request: Any) -> tuple[torch.optim.Optimizer, ...]:
    """Return the optimizers in a request, without the wrappers of accelerate; () for a name or a callable."""
    listed = request if isinstance(request, (list, tuple)) else (request,)
    several = (getattr(one, "optimizer", one) for one in listed)
    return tuple(optimizer for optimizer in several if isinstance(optimizer, torch.optim.Optimizer))


def class_of(optimizer: Any) -> str:
    """Return the name of an optimizer's class, with `fused` before it if its kernels are fused."""
    fused = any(group.get("fused") for group in getattr(optimizer, "param_groups", ()))
    return "fused " * fused + type(optimizer).__name__


def parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    yield from (parameter for group in optimizer.param_groups for parameter in group["params"])


def compensates(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a setting or a state of an optimizer keeps the digits that rounding to 16 bits takes from updates."""
    settings = {**vars(optimizer), **optimizer.defaults}
    rounds = any(value is True and re.search("kahan|stochastic", name) for name, value in settings.items())
    keys = {str(key) for state in optimizer.state.values() for key in state}
    return rounds or any(re.search("kahan|comp|shift|master", key) for key in keys)


def are_masters(updated: Sequence[torch.Tensor], model: nn.Module) -> bool:
    """Return True if `updated` may be copies of a model's trainable 16-bit parameters. Flat copies may have padding."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    elements, size = (sum(tensor.numel() for tensor in tensors) for tensors in (trained, updated))
    fits = elements <= size if all(tensor.dim() == 1 for tensor in updated) else elements == size
    return fits and any(parameter.itemsize == 2 for parameter in trained)


def learning_rate_of(*optimizers: torch.optim.Optimizer) -> float:
    """Return the largest learning rate of the parameter groups, before the scheduler changes it."""
    return max(_rate(group) for optimizer in optimizers for group in optimizer.param_groups)


def _rate(group: Mapping[str, Any]) -> float:
    return float(group.get("initial_lr", group.get("lr", 0.0)))


def updates_of(request: Any) -> dict[str, tuple[str, float]]:
    """Return parameter name -> (optimizer class, learning rate). Only optimizers from `names_instead` have names."""
    return {
        name: (type(optimizer).__name__, _rate(group))
        for optimizer in optimizers_in(request)
        for group in optimizer.param_groups
        for name in group.get(_NAMES, ())
    }


_PLAIN = (bool, int, float, str, torch.dtype, type(None))
"""`names_instead` copies attributes of these types. Attributes of other types may refer to the parameters of the optimizer."""


def names_instead(optimizer: torch.optim.Optimizer, model: nn.Module) -> torch.optim.Optimizer:
    """Return a copy of an optimizer that has no tensors. The groups of the copy list the names of the model's
    parameters.

    From this copy, `make_optimizer` makes an optimizer for another model.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    copy = object.__new__(type(optimizer))
    vars(copy).update({key: value for key, value in vars(optimizer).items() if isinstance(value, _PLAIN)})
    vars(copy).update(defaults=optimizer.defaults, state={}, param_groups=[])
    for group in optimizer.param_groups:
        members = group.get(_NAMES) or [names[id(p)] for p in group["params"] if id(p) in names]
        copy.param_groups.append({**group, "params": [], _NAMES: members})
    return copy


_NAMES = "isotype's names"
"""Key of the parameter names in a group of the copy that `names_instead` returns."""


def kernels_of(request: Any) -> str:
    """Return the name for `state_bytes` of an optimizer with its own kernels; "" if its step can be traced."""
    if isinstance(request, str):
        return "" if request in OPTIMIZERS else request
    kind = type(request)
    return f"bnb_{kind.__name__.lower()}" if kind.__module__.startswith("bitsandbytes") else ""


def make_optimizer(
    request: Any, parameters: Sequence[torch.Tensor], learning_rate: float | None, names: Sequence[str] = ()
) -> Any:
    """Return an optimizer of `parameters`, or the reason why its step cannot be traced on fake tensors.

    Args:
        request: a name, an optimizer (for its class and settings), or a callable (parameters -> optimizer).
        learning_rate: learning rate if `request` is a name; None for the default.
        names: parameter names. A copied optimizer (`names_instead`) assigns parameters to groups by these names.
    """
    if kernels_of(request):
        return "the optimizer has its own kernels"
    if isinstance(request, torch.optim.Optimizer):
        return _remade(request, parameters, dict(zip(names, parameters, strict=False)))
    if callable(request):
        return request(parameters)
    return OPTIMIZERS[request](parameters, **({} if learning_rate is None else {"lr": learning_rate}))


def _remade(
    request: torch.optim.Optimizer, parameters: Sequence[torch.Tensor], named: Mapping[str, torch.Tensor]
) -> Any:
    kind = type(request)
    plain = {name: value for name, value in vars(request).items() if isinstance(value, _PLAIN)}
    accepted = signature(kind.__init__).parameters
    groups = [
        # A scheduler adds `initial_lr` to the groups, but some constructors do not accept it.
        {key: value for key, value in group.items() if key not in ("initial_lr", _NAMES)}
        | {"params": [named[name] for name in group.get(_NAMES, ()) if name in named]}
        for group in request.param_groups
    ]
    arguments: list[Any] = groups if any(group["params"] for group in groups) else [*parameters]
    if len(groups) == 1 and groups[0].keys() <= {"params", *request.defaults}:
        arguments = groups[0]["params"] or arguments
    closure = signature(kind.step).parameters.get("closure")
    if closure is not None and closure.default is Parameter.empty:
        return "the step calls a closure that computes the loss"
    try:
        copy = kind(arguments, **{k: v for k, v in (plain | request.defaults).items() if k in accepted})
    except Exception as error:  # noqa: BLE001 - a constructor of the user's code may take other arguments
        return f"its constructor raises {first_line(error)}"
    vars(copy).update(plain)
    if len(copy.param_groups) == len(groups):  # `arguments` may be parameters without their group's options
        for group, options in zip(copy.param_groups, groups, strict=True):
            group.update({key: value for key, value in options.items() if key != "params"})
    return copy

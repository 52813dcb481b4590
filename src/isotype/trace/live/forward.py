"""Examines the forwards of a running script: input names, training or not, and stale casts or copies of weights."""

import copy
import inspect
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from traceback import walk_stack
from types import CodeType, FrameType
from typing import Any, Self

import torch
from torch import nn
from torch.nn.modules import module as modules
from torch.nn.parameter import UninitializedParameter
from torch.optim import optimizer as optimizers

from isotype.compat.compiler import uncompiled
from isotype.compat.torch import UncompiledMode, has_compiler, put_under, run_in_mode, storage_of, take_out
from isotype.core.dtypes import HALVES
from isotype.core.operators import ADDS_IN_PLACE, operator_name, tensors_of
from isotype.core.source import asking_line, is_called_by, line_in, shown
from isotype.model.walk import derives_from
from isotype.records.trace import COPY_OF_WEIGHT, MERGED_WEIGHT, Call, Operand, Origin
from isotype.trace.dtype_reads import arguments_of, stores_in

_PLAIN = (torch.Tensor, nn.Parameter)


def trains(module: nn.Module) -> bool:
    """Return whether a forward of `module` may start a training step. The forward of a parametrization does not."""
    if not torch.is_grad_enabled() or is_called_by("torch.nn.utils.parametrize") or is_lazy(module):
        return False
    return any(p.requires_grad and not p.is_meta for p in module.parameters())


def is_lazy(module: nn.Module) -> bool:
    """Return whether a forward of `module` will create parameters (`LazyLinear`)."""
    return any(isinstance(parameter, UninitializedParameter) for parameter in module.parameters())


@dataclass(frozen=True)
class Beginning:
    """A forward that is about to run and will be recorded.

    Attributes:
        inputs: the forward's inputs by argument name.
        method: name of the method that is called instead of the forward; "" for a forward.
        around: the call of a method that computes the loss, and calls this forward for it; None without one.
    """

    model: nn.Module
    inputs: Mapping[str, Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    method: str = ""
    around: Self | None = None


def named_inputs(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return a forward's inputs by argument name. If that is impossible, positional ones are `argument 0`, `argument 1`, …"""
    by_position = {**{f"argument {number}": value for number, value in enumerate(args)}, **kwargs}
    try:
        signature = inspect.signature(module.forward)
        signature.bind(*args, **kwargs)
    except (TypeError, ValueError):
        return by_position
    pairs = zip(signature.parameters.values(), args, strict=False)
    named = {p.name: value for p, value in pairs if p.kind is p.POSITIONAL_OR_KEYWORD}
    return {**named, **kwargs} if len(named) == len(args) else by_position


def beginning_of(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], caller: FrameType | None = None
) -> Beginning:
    """Describe a forward. Caches (transformers' `Cache`) are shallow copies, because the forward changes the originals."""
    inputs = {name: _present(value) for name, value in named_inputs(module, args, kwargs).items()}
    return Beginning(module, inputs, args, kwargs, around=_around(module, caller))


def _present(value: Any) -> Any:
    if not derives_from(type(value), "Cache"):
        return value
    present = copy.copy(value)
    for name, content in vars(value).items():
        if name == "layers":
            present.layers = [copy.copy(layer) for layer in content]
        elif name.endswith("_attention_cache"):
            setattr(present, name, _present(content))
    return present


def method_called(frame: FrameType) -> Beginning | None:
    """Return the call of a module's method that runs in `frame`; None if there is none, or if it has deleted an argument."""
    name, arguments = frame.f_code.co_name, arguments_of(frame.f_code)
    if arguments[:1] != ("self",):
        return None  # `f_locals` would keep the variables of this frame alive
    owner, values = frame.f_locals.get("self"), frame.f_locals
    inputs = {argument: values[argument] for argument in arguments[1:] if argument in values}
    if not isinstance(owner, nn.Module) or _code_of(owner, name) is not frame.f_code:
        return None
    return Beginning(owner, inputs, (), inputs, name) if len(inputs) == len(arguments) - 1 else None


def _around(module: nn.Module, frame: FrameType | None) -> Beginning | None:
    """Return the outermost call of a method like Lightning's `training_step`, whose model contains `module`; else None.

    Calls that cannot be repeated are left out: the method assigns an argument, updates weights or starts autocast.
    """
    outermost = None
    for caller, _ in walk_stack(frame) if frame is not None else ():
        code = caller.f_code
        once = any(map(_ONCE.search, code.co_names)) or not _COMPUTES_LOSS.search(code.co_name)
        call = None if once else method_called(caller)
        if call is not None and call.model is not module and not code.co_flags & _MORE_ARGUMENTS:
            assigned = {name for *_, name in stores_in(code)}.intersection(arguments_of(code))
            again = trains(call.model) and not assigned and not _only_once(call.model, code, set())
            outermost = call if again and module in {*call.model.modules()} else outermost
    return outermost


def _only_once(owner: nn.Module, code: CodeType, known: set[CodeType]) -> bool:
    """Return whether a method of `owner`, or a method that it calls, updates weights or starts autocast."""
    known.add(code)
    called = (_code_of(owner, name) for name in code.co_names)
    inside = any(_only_once(owner, other, known) for other in called if other and other not in known)
    return inside or any(map(_ONCE.search, code.co_names))


def _code_of(owner: nn.Module, method: str) -> CodeType | None:
    return getattr(inspect.unwrap(getattr(type(owner), method, _code_of)), "__code__", None)


_COMPUTES_LOSS = re.compile("loss|_step$|forward")
_ONCE = re.compile("backward$|^step$|^zero_grad$|^autocast$")
_MORE_ARGUMENTS = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS


class StaleCasts:
    """Detects an optimizer step and a later forward in one autocast region.

    Autocast casts a weight once and keeps the cast until the outermost region ends. So the later forward uses the old
    weights, and `report` is called once. A test weight is cast and changed to detect this.
    """

    def __init__(self, report: Callable[[], None]) -> None:
        self._report, self._hooks = report, ExitStack()
        self.detach = self._hooks.close

    def stepped(self, device: str) -> None:
        """After an optimizer step on this device type, prepare the test weight for the next forward."""
        self.detach()
        if not (torch.is_autocast_enabled(device) and torch.is_autocast_cache_enabled()):
            return
        weight = nn.Parameter(torch.ones(1, 1, device=device))
        _product(weight)
        with torch.no_grad():
            weight.fill_(2.0)

        def called(module: nn.Module, _: Any) -> None:
            if not torch.compiler.is_compiling():
                self.detach()
                if torch.is_autocast_enabled(device) and float(_product(weight).detach()) == 1.0:
                    self._report()

        self._hooks.enter_context(modules.register_module_forward_pre_hook(called))


class Averages(UncompiledMode):  # type: ignore[no-untyped-call]
    """Detects that a script averages trained weights into a 16-bit copy, or that PEFT merges adapters between steps.

    It watches from an optimizer step to the next forward. `report` gets the first call that adds to a copy or merges. A
    frozen weight of the same model can be the copy. The first update of `AveragedModel` only overwrites the copy with
    the weights. After such an update, the next step is watched, too, and `later` becomes 1. No attributes are set on
    tensors, because `torch.save` would save them.
    """

    def __init__(self, report: Callable[[Call], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._report, self._reported, self._copied = report, False, False
        self.later = 0
        self._merge: Call | None = None
        self._weights: list[torch.Tensor] = []
        # id of a computed tensor's `__dict__` -> this `__dict__`, and kinds of the tensors that it was computed from.
        # `torch.utils.swap_tensors` would refuse a tensor with a weak reference.
        self._terms: dict[int, tuple[dict[str, Any], set[str]]] = {}
        self._hooks, self._after_step = ExitStack(), ExitStack()

    def stepped(self, models: Sequence[nn.Module]) -> None:
        """After an optimizer step of these models, watch until the next forward or another optimizer's step."""
        self._stop()  # torch is iterating over the hooks after a step, so `_after_step` stays
        if not self._reported:
            self._watch(models)

    def _watch(self, models: Sequence[nn.Module]) -> None:
        self._weights = [weight for model in models for weight in model.parameters()]
        put_under(self)
        self._hooks.callback(take_out, self)
        # Otherwise the compiler would trace this mode, and never compile the function again.
        if has_compiler():
            self._hooks.enter_context(uncompiled())
        # torch is iterating over the hooks of a step, so none may be removed now. Without weights, no copy is reported.
        forget = optimizers.register_optimizer_step_pre_hook(lambda *_: self._weights.clear())
        self._hooks.enter_context(forget)
        ended = modules.register_module_forward_pre_hook(lambda module, _: self._ended(module, models))
        self._hooks.enter_context(ended)

    def _ended(self, module: nn.Module, models: Sequence[nn.Module]) -> None:
        """Stop at a forward. After a merge, stop only at a forward that trains: a merge after the last step is harmless."""
        if self._merge is not None:
            if not trains(module):
                return
            self._report(self._merge)
            self._merge = None
        self.detach()
        if self._copied and not self._reported:
            self._copied, once = False, [models]

            def again(*_: Any) -> None:
                while once:
                    self.later += 1
                    self._watch(once.pop())

            self._after_step.enter_context(optimizers.register_optimizer_step_post_hook(again))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = run_in_mode(func, args, kwargs)
        name = operator_name(func)
        adds, averaging = ADDS_IN_PLACE.match(name), _AVERAGING.fullmatch(name)
        if (
            not self._reported
            and _QUANTIZES.match(name)
            and (line := line_in("peft/tuners/", ("merge", "unmerge")))
        ):
            self._merge, self._reported = self._call(name, args[0], line, MERGED_WEIGHT), True
        if not self._reported and (adds or averaging):
            source = shown(asking_line())
            if name.endswith("_.Tensor") and "peft/tuners/" in source and args[0].dtype in HALVES:
                self._merge, self._reported = self._call(name, args[0], source, MERGED_WEIGHT), True
                return result
            firsts = [arg[0] if isinstance(arg, (list, tuple)) and arg else arg for arg in args]
            scales = kwargs.get("alpha", 1) != 1
            operands, new = list(tensors_of(firsts)), next(tensors_of(result), None)
            averages = averaging is not None and self._track(averaging["name"], operands, new, scales)
            copies = (t for t in tensors_of(args[0]) if self._kinds(t) == {"copy"})
            in_place = next(copies, None) if adds else None
            if averages or in_place is not None:
                self._reported = True
                average = next(tensors_of(args)) if in_place is None else in_place
                self._report(self._call(name, average, source, COPY_OF_WEIGHT))
        return result

    def _call(self, name: str, changed: torch.Tensor, source: str, described: str) -> Call:
        origin = Origin("outside", changed.dtype, described)
        operand = Operand("self", changed.dtype, tuple(changed.shape), origin)
        return Call(name, "forward", "", source, (operand,), ())

    def _track(
        self, name: str, operands: Sequence[torch.Tensor], result: torch.Tensor | None, scales: bool
    ) -> bool:
        """Store the kinds of tensors from which `result` is computed. Return whether it is an average.

        `p + noise` adds to the weight itself; an average adds to a scaled weight.
        """
        kinds = [self._kinds(operand) for operand in operands]
        if name == "copy_":
            self._copied |= kinds == [{"copy"}, {"weight"}]
            return False
        both = set().union(*kinds)
        scaled = any("weight" in self._terms_of(operand) for operand in operands)
        scaled = name == "lerp" or (name == "add" and (scaled or (scales and "weight" in kinds[-1])))
        if both and result is not None and not any(result is operand for operand in operands):
            self._terms[id(vars(result))] = vars(result), both
        return len(operands) > 1 and both == {"weight", "copy"} and scaled

    def _kinds(self, tensor: torch.Tensor) -> set[str]:
        """Return the kinds of the tensors that a 16-bit tensor of a trained weight's shape was computed from."""
        if terms := self._terms_of(tensor):
            return terms
        alike = [weight for weight in self._weights if weight.requires_grad and weight.shape == tensor.shape]
        if type(tensor) not in _PLAIN or tensor.dtype not in HALVES or not alike:
            return set()
        gradients = [weight.grad for weight in alike if weight.grad is not None]
        for kind, known in (("weight", alike), ("gradient", gradients)):
            if any(type(other) in _PLAIN and storage_of(other) == storage_of(tensor) for other in known):
                return {kind}
        return {"copy"}

    def _terms_of(self, tensor: torch.Tensor) -> set[str]:
        return self._terms.get(id(vars(tensor)), ({}, set()))[1]

    def detach(self) -> None:
        self._stop()
        self._after_step.close()

    def _stop(self) -> None:
        self._hooks.close()
        self._weights = []
        self._terms.clear()


_QUANTIZES = re.compile(r"bitsandbytes\.(quantize_4bit|int8_vectorwise_quant)\b")
"""Names of the operators that quantize a weight again after a merge."""
_AVERAGING = re.compile(r"aten\.(?:_foreach_)?(?P<name>mul|div|sub|rsub|add|lerp|copy_)\.\w+")
"""Names of the operators that compute averages, except those that add to their first argument."""


def _product(weight: nn.Parameter) -> torch.Tensor:
    with torch.enable_grad():
        return weight @ torch.ones(1, 1, device=weight.device)


def autocast_of(calls: Sequence[Call]) -> torch.dtype | None:
    """Return the autocast dtype under which most operators of the forward ran; None without autocast."""
    counts = Counter(call.autocast for call in calls if call.phase in ("forward", "generate"))
    return counts.most_common(1)[0][0] if counts else None

"""Describes dtype errors outside of recorded steps: the line that raised the error, the tensors in local variables, and advice."""

import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from isotype.compat.imports import when_imported
from isotype.compat.replaced import Replacements
from isotype.compat.standard import frame_above
from isotype.core.dtypes import FLOATS, dtype_name
from isotype.core.names import grouped, listed, plural, short
from isotype.core.optimizers import parameters_of
from isotype.core.source import line_of, tensors_at_hand
from isotype.model.walk import is_packed, living, name_in_process
from isotype.ranges.twin import unwrapped
from isotype.records.finding import in_library
from isotype.records.trace import NO_GRADIENT, NOT_SCALAR, NOTHING_UNSCALED, Trace
from isotype.report.text import short_source
from isotype.rules.kit.words import and_others
from isotype.trace.dtype_history import state_casts
from isotype.trace.live.forward import Beginning, beginning_of, method_called
from isotype.trace.script import cast_by_evaluation

_SHOWN = 6
_TUNERS = "peft.tuners.tuners_utils"


@dataclass(frozen=True)
class Outside:
    """The description of a dtype error.

    Attributes:
        source: `file:line` of the code that raised the error, in the script or in a library.
        tensors: for each float tensor in the variables of this code: variable, dtype, shape, and name in the model ("" outside
            of the model).
        help: advice, or "".
        cause: a description of the cause; "" if the tensors show the cause.
    """

    source: str
    tensors: tuple[tuple[str, torch.dtype, tuple[int, ...], str], ...]
    help: str
    cause: str = ""

    def lines(self) -> Iterator[str]:
        if self.tensors or self.help:
            yield f"  --> {short_source(self.source)}"
        for name, dtype, shape, in_model in self.tensors:
            yield f"   |   {name}  {dtype_name(dtype)}  {list(shape)}   {in_model}".rstrip()
        if self.cause:
            yield f"   = cause  {self.cause}"
        if self.help:
            yield f"   = help   {self.help}"


class Unloads(Replacements):
    """Records the lines at which PEFT removes a model's adapters: `merge_and_unload()` and `unload()`."""

    def __init__(self) -> None:
        super().__init__()
        self.lines = WeakKeyDictionary[nn.Module, str]()
        self.callback(when_imported(_TUNERS, self._watch))

    def _watch(self) -> None:
        for name in ("merge_and_unload", "unload"):
            self.wrap(sys.modules[_TUNERS].BaseTuner, name, partial(self._unload, name))

    def _unload(self, name: str, unload: Callable[..., nn.Module], *args: Any, **kwargs: Any) -> nn.Module:
        model, frame = unload(*args, **kwargs), frame_above(2)
        assert frame is not None
        self.lines[model] = f"{name}() at {short(f'{frame.f_code.co_filename}:{frame.f_lineno}')}"
        return model


def outside(error: BaseException, model: nn.Module, step: Trace, unloads: Mapping[nn.Module, str]) -> Outside:
    """Describe an error outside of `step`, a training step of `model`. `unloads`: lines at which PEFT removed adapters."""
    parts = (*model.named_parameters(), *model.named_buffers())
    names = {id(tensor): name for name, tensor in parts}
    source, variables = line_of(error), dict(tensors_at_hand(error))
    removed = next((line for part in model.modules() if (line := unloads.get(part))), "")
    if removed and NO_GRADIENT in str(error) and not any(p.requires_grad for p in model.parameters()):
        how = "train before this line, or add new adapters after it (get_peft_model)"
        return Outside(
            source, (), how, f"{removed} has removed the adapters, and all other weights are frozen"
        )
    if gradientless := _without_gradients(error, model, names):
        kernels = (part for part in step.untraced if part.startswith("the kernels of"))
        advice = [gradientless, *(f"{part} may have no backward" for part in kernels)]
        return Outside(source, (), "; ".join(advice))
    if (copied := _of_copy(error, model)) is not None:
        return replace(copied, source=source)
    optimizers = [owner for owner in owners_in(error) if isinstance(owner, torch.optim.Optimizer)]
    if casts := [cast for optimizer in optimizers for cast in state_casts.get(optimizer, ())]:
        _, before, after, _, line = casts[0]
        to = f"from {dtype_name(before)} to {dtype_name(after)}"
        cause = f"load_state_dict at {short(line)} has cast {listed(dict.fromkeys(name for name, *_ in casts))} {to}"
        return Outside(
            source, (), "after load_state_dict, assign these states again from the loaded dict", cause
        )
    states = dict(_of_optimizer(optimizers))
    floats = [
        (n, t) for n, t in (states or variables).items() if t.dtype in FLOATS and t.dim() and not t.is_nested
    ]
    of_others = (t for _, t in floats if isinstance(t, nn.Parameter) and id(t) not in names)
    of = names | {id(t): name_in_process(t) for t in of_others}
    tensors = tuple((n, t.dtype, tuple(t.shape), of.get(id(t), "")) for n, t in floats)
    dtypes = {dtype for _, dtype, *_ in tensors}
    return Outside(source, tensors[:_SHOWN], _help(error, source, bool(states), dtypes))


def _help(error: BaseException, source: str, optimizes: bool, dtypes: set[torch.dtype]) -> str:
    if "ScalarType BFloat16" in str(error):
        return f"NumPy has no bfloat16: write .float() before .numpy() at {short(source)}"
    if optimizes:
        return "create the optimizer after the last cast of the model, or cast its states to the dtypes of their parameters; if only a validation needs the cast, cast a copy of the model"
    place = f"before {short(source)} gets them" if in_library(source) else f"at {short(source)}"
    return f"cast the tensors to one dtype {place}" if len(dtypes) > 1 else ""


def _without_gradients(error: BaseException, model: nn.Module, names: Mapping[int, str]) -> str:
    """Return advice for an error about missing gradients; "" for other errors."""
    how = "compute the loss outside of torch.no_grad(), and not from detached values"
    if NO_GRADIENT in str(error):
        codes = any(map(is_packed, model.parameters()))
        way = "add adapters (get_peft_model)" if codes else "call requires_grad_() of the parameters to train"
        why = f"no parameter of the model requires a gradient: {way}"
        return how if any(parameter.requires_grad for parameter in model.parameters()) else why
    if NOT_SCALAR in str(error):
        return "call backward on a scalar, such as loss.mean()"
    if NOTHING_UNSCALED not in str(error):
        return ""
    parameters = [parameter for optimizer in stepped_at(error) for parameter in parameters_of(optimizer)]
    named = and_others(names.get(id(parameter), f"{list(parameter.shape)}") for parameter in parameters)
    return f"no parameter of this optimizer ({named}) has a gradient: {how}; create the optimizer after the last change of the model; or do not call step() on it"


def stepped_at(error: BaseException) -> list[torch.optim.Optimizer]:
    """Return the last optimizer among the variables of the traceback's frames, as a list; [] if there is none."""
    variables = (v for frame, _ in traceback.walk_tb(error.__traceback__) for v in frame.f_locals.values())
    return [value for value in variables if isinstance(value, torch.optim.Optimizer)][-1:]


def updated_at(error: BaseException) -> nn.Module | None:
    """Return the outermost module that contains all parameters of the last optimizer in a traceback; None without one."""
    updated = {id(parameter) for optimizer in stepped_at(error) for parameter in parameters_of(optimizer)}
    models = [m for m in living(nn.Module) if updated and updated <= {*map(id, m.parameters())}]
    return max(models, key=lambda model: len([*model.modules()]), default=None)


def calls_of(error: BaseException) -> list[Beginning]:
    """Return the calls that raised the error: methods of models, then the outermost forward; [] without a forward."""
    calls: list[Beginning] = []
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code is nn.Module.__call__.__code__:
            values = frame.f_locals
            return [*calls, beginning_of(unwrapped(values["self"]), values["args"], values["kwargs"])]
        if call := method_called(frame):
            calls.append(call)
    return []


def casts_since(before: Trace, after: Trace) -> Iterator[str]:
    """For each cast of weights between the traces `before` and `after` (from one float dtype to another), yield a text."""
    earlier = {weight.name: weight.dtype for weight in before.weights}
    dtypes = ((w.name, earlier.get(w.name, w.dtype), w.dtype, w.set_at) for w in after.weights)
    cast = [row for row in dtypes if row[1] != row[2] and {row[1], row[2]} <= FLOATS]
    for (was, now, line), rows in grouped(cast, lambda row: row[1:]).items():
        why = f": {how}" if (how := cast_by_evaluation(now, [line]) or line) else ""
        yield f"{and_others(name for name, *_ in rows)} from {dtype_name(was)} to {dtype_name(now)}{why}"


def owners_in(error: BaseException, method: str = "") -> Iterator[object]:
    """Yield `self` of the frames in the traceback, or only of the frames of `method`. The innermost comes last."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if "self" in frame.f_locals and method in ("", frame.f_code.co_name):
            yield frame.f_locals["self"]


def _of_copy(error: BaseException, model: nn.Module) -> Outside | None:
    """Describe an error of a module (`AveragedModel`) whose averages have another dtype than the model; None for other errors."""
    trained = dict(model.named_parameters())
    # A forward raises errors of other operands.
    no_update = {id(model), *map(id, owners_in(error, "forward"))}
    for owner in owners_in(error):
        if not isinstance(owner, nn.Module) or id(owner) in no_update:
            continue
        copies = dict(owner.named_parameters())
        of = {name: trained.get(name.partition(".")[2]) for name in copies}
        pairs = [
            (name, copy, o) for name, copy in copies.items() if (o := of[name]) is not None and o is not copy
        ]
        unlike = [pair for pair in pairs if pair[1].dtype != pair[2].dtype]
        if not unlike or any(copy.shape != parameter.shape for _, copy, parameter in pairs):
            continue
        kind, (name, copy, parameter) = type(owner).__name__, unlike[0]
        cause = f"{kind} holds {len(unlike)} of {plural(len(pairs), 'parameter')} in another dtype than the model, but the update needs equal dtypes"
        how = f"keep the averages in float32: cast the {kind} with .float()"
        if copy.dtype.itemsize > parameter.dtype.itemsize:
            how = f"cast the parameter to {dtype_name(copy.dtype)} in the update"
            if kind == "AveragedModel":
                how = "pass avg_fn=get_ema_avg_fn(DECAY) or get_swa_avg_fn() to AveragedModel instead of multi_avg_fn, to promote dtypes"
        both = ("average", copy, name), ("parameter", parameter, name.partition(".")[2])
        return Outside("", tuple((n, t.dtype, tuple(t.shape), of) for n, t, of in both), how, cause)
    return None


def _of_optimizer(optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameter, the gradient and the state with different dtypes of the optimizers that raised the error."""
    for optimizer in optimizers:
        for parameter in parameters_of(optimizer):
            state = {"grad": parameter.grad, **optimizer.state.get(parameter, {})}
            tensors = {k: v for k, v in state.items() if isinstance(v, torch.Tensor) and v.dim()}
            if any(tensor.dtype != parameter.dtype for tensor in tensors.values()):
                yield "parameter", parameter
                yield from tensors.items()
                return

"""Records a real step without changing it.

Memory of the recorder itself does not count in the ledger. If the recorder fails, it stops and stores the reason in
`LiveRecorder.fault`; the step goes on.
"""

import math
import os
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import takewhile
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn, overrides
from torch.overrides import TorchFunctionMode

from isotype.compat import torch_device
from isotype.compat.standard import frame_above
from isotype.compat.torch import OpOverload, current_node, forget_gradient_hooks, is_simulated, run_in_mode
from isotype.contracts.contract import autocast_lists, contracts_for, contracts_here
from isotype.core.dtypes import FLOATS, HALVES, autocast_dtype, dtype_name
from isotype.core.errors import error_line, first_line
from isotype.core.names import named
from isotype.core.operators import COLLECTIVES, given_tensors, leaves
from isotype.core.source import asking_line, shown
from isotype.model.walk import living
from isotype.records.memory import Phase
from isotype.records.trace import CASTS, UNSAFE, Breach, Call, Origin, Weight
from isotype.trace.dtype_reads import DTYPE
from isotype.trace.fake.code import named_tensors
from isotype.trace.fake.recorder import is_about_dtypes
from isotype.trace.live.terms import Terms
from isotype.trace.operator_call import OperatorCall
from isotype.trace.recorder import ORIGIN, Recorder
from isotype.trace.weights import memory_kind, packed_bytes, state_tensors, tensors_and_weights

aten = torch.ops.aten

_UNSCALE = aten._amp_foreach_non_finite_check_and_unscale_.default
# Functions of a backward. Their names would hide the function that made a cast.
_BACKWARDS = frozenset({"backward", "grad"})

_Noted = TypeVar("_Noted")


class LiveRecorder(Recorder):
    """Records a real step; operators run unchanged.

    Args:
        seconds: time limit of the recorder's own work.
        kind: kind of the simulated device. For a step on a CPU, the calls are recorded as the simulated device's
            autocast runs them.

    Attributes:
        contracts: contracts of the device, for the diagnosis of an error.
        autocast_device: device type of the step's autocast.
        fault: the reason why the recorder has stopped; "" while it records.
        failed: the last call of this step that raised; the script may have caught the error.
        failure_text: the error of `failed`; "" if no call raised.
        weights: records of the parameters and buffers of every model that the script has called.
        terms: records the scalars of this step that have lost their graph.
        graded: ids of the parameters that got a gradient in a backward of this step.
        unsynced: id of each DDP model whose last forward with gradients ran under `no_sync()` -> line of this forward.
        treatment: name of the device's autocast list that contains the running function; "" if there is none.
        without_autocast: module that runs in a thread without autocast, unlike the step -> sentence on it.
        of_gradients: True to record only operators on accumulated gradients, and collectives.
    """

    supports_higher_order_operators = True

    def __init__(
        self, device: str, limit: float = math.inf, seconds: float = math.inf, kind: str = "cpu"
    ) -> None:
        super().__init__()
        self._limit, self._seconds, self._spent = limit, seconds, 0.0
        self.contracts = contracts_here(device)
        self.autocast_device = device
        self._simulated = kind != "cpu" and device == "cpu"
        self._lists, self._kind = autocast_lists(kind if device == "cpu" else device), kind
        self.treatment = ""
        self.fault = ""
        self.of_gradients = False
        self.failed: Call | None = None
        self.failure_text = ""
        self.weights: list[Weight] = []
        self.graded: set[int] = set()
        self.unsynced: dict[int, str] = {}
        self.terms = Terms()
        self.without_autocast = WeakKeyDictionary[nn.Module, str]()
        self._marked: set[int] = set()  # ids: weak references would prevent `torch.utils.swap_tensors`
        self._process, self._thread = os.getpid(), threading.get_ident()
        self._autocast: torch.dtype | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # A higher-order operator is skipped, because its inner operators are recorded. Forked processes, such as a data
        # loader's workers, are skipped, too.
        ignored = self.of_gradients and not _of_gradients(args)
        skipped = self.fault or (ignored and getattr(func, "namespace", "") != COLLECTIVES)
        skipped = skipped or len(self.calls) >= self._limit or os.getpid() != self._process
        if skipped or not isinstance(func, OpOverload):
            return run_in_mode(func, args, kwargs)
        try:
            result = run_in_mode(func, args, kwargs)
        except Exception as error:
            self._book(self._raised, func, args, kwargs, error)
            raise
        self._book(self._done, func, args, kwargs, result)
        return result

    def _book(self, note: Callable[..., _Noted], *args: Any) -> _Noted | None:
        """Call a method of the recorder and count its time. An error, or too much time, ends the recording: return None."""
        if self.fault:
            return None
        started, noted = time.perf_counter(), None
        try:
            noted = note(*args)
        except Exception as error:  # noqa: BLE001 - an error of the bookkeeping must not affect the script's step
            self.fault = error_line(error)
        self._spent += time.perf_counter() - started
        if self._spent > self._seconds and not self.fault:
            self.fault = f"recording {len(self.calls):,} operators took {self._seconds:g} s"
        return noted

    def _done(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        self._turn(func)
        call = OperatorCall(func, args, kwargs, self._place())
        self._write(call, result)
        if self._simulated and self.phase == "forward" and call.name not in CASTS:
            self._as_on_device([tensor for _, tensor in call.tensors], result)
        if self.phase == "backward" and current_node() is None:
            self.calls[-1] = replace(self.calls[-1], by_script=True)

    def begin_function(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Record the Python function that begins, and how the autocast of the simulated device treats it."""
        self.like, self.autocast = self.cast_origin(name, args, kwargs), autocast_dtype(self.autocast_device)
        self.function = "" if name in _BACKWARDS else name
        self.treatment = ""
        if self.autocast is not None:
            self.treatment = self._lists.treatment(name, args, kwargs)
            if self._simulated and self.treatment == "banned":
                breach = Breach(f"torch.nn.functional.{name} {UNSAFE}", False, torch.float32)
                self._book(self.note, f"torch.{name}", given_tensors(args, kwargs), breach)

    def _as_on_device(self, tensors: Sequence[torch.Tensor], result: Any) -> None:
        """Change the last call from 16 bits to float32 if the simulated device's autocast computes it in float32.

        The results also get origins in float32, so later calls that use the results change, too. A call gets a breach if the
        device refuses the changed dtypes.
        """
        call, scalars = self.calls[-1], not any(operand.shape for operand in self.calls[-1].operands)
        wide = [o for o in call.operands if o.dtype in HALVES and o.origin.dtype == torch.float32]
        if wide and not self.treatment:
            operands = tuple(replace(o, dtype=torch.float32) if o in wide else o for o in call.operands)
            if refused := contracts_for(self._kind).refusal(call.op, (o.dtype for o in operands)):
                breach = Breach(refused.message, refused.assumed, operands[0].dtype)
                self.calls[-1] = replace(call, operands=operands, breach=breach)
                return
        widens = self.treatment in ("banned", "float32")
        widens |= self.treatment != "lower" and any(operand.shape or scalars for operand in wide)
        if widens:
            widened = in_dtypes(call, dict.fromkeys(HALVES, torch.float32))
            self.calls[-1] = replace(widened, autocast=call.autocast)
        for tensor in leaves(result) if widens or wide else ():
            if isinstance(tensor, torch.Tensor) and not any(tensor is operand for operand in tensors):
                dtype = torch.float32 if widens and tensor.dtype in HALVES else tensor.dtype
                if self.origin(tensor).dtype != dtype:
                    self.mark(tensor, Origin("autocast", dtype, self.function, call.module, call.source))

    def _raised(self, func: Any, args: Any, kwargs: Any, error: Exception) -> None:
        self._turn(func)
        call = OperatorCall(func, args, kwargs, self._place())
        call.args, call.kwargs, call.breach = (), {}, Breach(first_line(error), False, None)
        self._write(call, None)
        self.failed, self.failure_text = self.calls[-1], str(error)

    def refused(self, func: Any, args: Any, kwargs: Any, error: Exception) -> None:
        """Record a function that raised an error before it ran any operator."""
        if self.failure_text != str(error):
            self._book(self._refused, func, args, kwargs, error)

    def _refused(self, func: Any, args: Any, kwargs: Any, error: Exception) -> None:
        tensors = given_tensors(args, kwargs)
        floats = {tensor.dtype for _, tensor in tensors if tensor.dtype in FLOATS}
        if len(floats) < 2 and not (floats.intersection(HALVES) and is_about_dtypes(error)):
            return
        self.note(f"torch.{getattr(func, '__name__', func)}", tensors, Breach(first_line(error), False, None))
        self.failed, self.failure_text = self.calls[-1], str(error)

    def begin_step(self) -> None:
        """Start another step: remove the calls and errors of the last step."""
        for record in (self.calls, self.cuts, self._cut_nodes, self.frozen, self.graded):
            record.clear()
        self.terms = Terms()
        self.failed, self.failure_text = None, ""
        self.turn_to("forward")

    def around_backward(self, backward: Callable[..., Any], tensors: Any, *args: Any, **kwargs: Any) -> Any:
        self.begin_backward(tensors, sums=not self.of_gradients)
        return backward(tensors, *args, **kwargs)

    def begin_backward(self, tensors: Any, *, sums: bool) -> None:
        self._book(self.terms.backward, tensors, sums)

    def after_replica(self, replica: Any, args: Any, output: Any) -> None:
        """Record, after a forward of a DDP model, whether DDP will average the gradients of this forward."""
        if torch.is_grad_enabled():
            self.unsynced.pop(id(replica), None)
            if not replica.require_forward_param_sync:
                self.unsynced[id(replica)] = shown(asking_line())

    def end_function(self, name: str, args: Sequence[Any], result: Any) -> None:
        """Record the result of a function of the forward: it may be a term of the loss, or autocast may set its dtype."""
        if self.phase == "forward" and not self.of_gradients:
            self._book(self.terms.note, name, args, result)
            self._book(self.note_widened, self.treatment, result)
            self._book(self.note_unchanged, name, next(iter(args), None), result)

    def reads_dtype(self, tensor: torch.Tensor) -> None:
        self._book(lambda: self.reads.note(self.origin(tensor)))

    def cast_origin(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Origin | None:
        """Return the origin of a cast's dtype, as in `Recorder`. An error ends the recording, not the script."""
        return self._book(super().cast_origin, name, args, kwargs)

    # -------------------------------------------------------------------------------------------------- phases

    @property
    def inside(self) -> bool:
        """True if a module's forward is running."""
        return bool(self._frames)

    def enter(self, *args: Any, **kwargs: Any) -> None:
        self._autocast = autocast_dtype(self.autocast_device)
        super().enter(*args, **kwargs)

    def in_other_thread(self, module: nn.Module, name: str | None) -> bool:
        """Return whether a forward of the model's module `name` begins in another thread, where nothing is recorded."""
        if name is None or os.getpid() != self._process or threading.get_ident() == self._thread:
            return False
        if self._autocast is not None and autocast_dtype(self.autocast_device) is None:
            self.without_autocast[module] = (
                f"{named(name)} runs without autocast, because the step enters autocast to {dtype_name(self._autocast)} "
                "in another thread: enter torch.autocast in the function that the thread runs"
            )
        return not is_simulated()

    def turn_to(self, phase: Phase) -> None:
        self.phase = phase
        self.ledger.kind = "optimizer" if phase == "optimizer" else "activations"
        self.ledger.begin(phase)

    def _turn(self, func: Any) -> None:
        """Change the phase if `func` runs inside of an autograd node (the backward) or of a module (the forward)."""
        if self.phase in ("optimizer", "generate"):
            return
        if current_node() is not None:
            now: Phase = "backward"
        elif func is _UNSCALE:
            now = "unscale"
        else:
            now = "forward" if self._frames else self.phase
        if now != self.phase:
            self.turn_to(now)

    # ------------------------------------------------------------------------------------------------- tensors

    def mark(self, tensor: torch.Tensor, origin: Origin) -> None:
        """Set the origin of `tensor`'s dtype; `forget` removes it."""
        self._marked.add(id(tensor))
        super().mark(tensor, origin)

    def forget(self) -> None:
        """Remove the origins from the script's tensors, which the script may save, and drop all references to them."""
        for tensor in living(torch.Tensor) if self._marked else ():
            if id(tensor) in self._marked:
                vars(tensor).pop(ORIGIN, None)
        self._marked.clear()
        self.terms = Terms()
        self.names.clear()
        self._alive.clear()
        self._places.clear()

    def products(self) -> dict[str, Call]:
        """Return name of a trainable parameter -> a matmul of the forward with this parameter."""
        trained = {weight.name for weight in self.weights if weight.trainable}
        matmuls = (call for call in self.calls if call.phase == "forward" and call.flops)
        # An operand that was cast in the code (accelerate casts a model's output) is another value than the parameter.
        paths = ((call, o.origin.path()) for call in matmuls for o in call.operands)
        steps = ((call, s) for call, path in paths for s in takewhile(lambda s: s.kind != "cast", path))
        return {step.name: call for call, step in steps if step.name in trained}

    def names_of(self, weights: Iterable[torch.Tensor]) -> set[str]:
        return {self.names[id(weight)].name for weight in weights if id(weight) in self.names}

    def weigh(self, model: nn.Module, prefix: str = "") -> ExitStack:
        """Register and count the new weights and buffers of a model. Close the result to remove the hooks."""
        hooks = ExitStack()
        layers = dict(model.named_modules())
        for tensor, weight in tensors_and_weights(model):
            if id(tensor) in self.names:
                continue
            layer = layers[weight.module]
            if prefix:
                name, module = f"{prefix}{weight.name}", f"{prefix}{weight.module}".rstrip(".")
                weight = replace(weight, name=name, module=module)
            self.weights.append(weight)
            origin = Origin("buffer" if weight.buffer else "parameter", tensor.dtype, weight.name)
            self._register(tensor, origin)
            self.ledger.count(tensor, memory_kind(weight), local=packed_bytes(tensor))
            for state in state_tensors(tensor, layer):
                self.ledger.count(state, "weights")
                self.mark(state, Origin("state", state.dtype, weight.module, weight.module))
            if tensor.requires_grad and tensor.is_leaf:
                hooks.callback(forget_gradient_hooks, tensor)
                hooks.enter_context(tensor.register_post_accumulate_grad_hook(self._gradient))  # type: ignore[no-untyped-call]
        self._register_plain_tensors(model, prefix)
        return hooks

    def mark_inputs(self, inputs: Mapping[str, Any]) -> None:
        """Register each tensor in the inputs of a model by its name. Tensors that the step has computed keep their origin."""
        for name, value in (pair for key in inputs for pair in named_tensors(inputs[key], key)):
            if not hasattr(value, ORIGIN):
                self.mark(value, Origin("input", value.dtype, name))
                self.ledger.count(value, "inputs")

    def _gradient(self, parameter: torch.Tensor) -> None:
        if parameter.requires_grad:  # else code has frozen it after the forward
            self.graded.add(id(parameter))
        if parameter.grad is not None:
            self._book(self.ledger.count, parameter.grad, "gradients")


def _of_gradients(args: Sequence[Any]) -> bool:
    first = args[0] if args else None
    first = first[0] if isinstance(first, list | tuple) and first else first
    origin = getattr(first, ORIGIN, None) if isinstance(first, torch.Tensor) else None
    return origin is not None and origin.kind == "gradient" and current_node() is None


class LiveFunctions(TorchFunctionMode):
    """A function mode that records the running function, and errors that the function raises outside of operators."""

    def __init__(self, recorder: LiveRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, recorder = kwargs or {}, self._recorder
        if getattr(func, "__self__", None) is DTYPE:
            recorder.reads_dtype(args[0])
            return func(*args, **kwargs)
        recorder.set_trainable(func, *args, *kwargs.values())
        name = getattr(func, "__name__", "")
        if name == "grad":
            recorder.begin_backward(args[0] if args else kwargs["outputs"], sums=False)
        before = recorder.function, recorder.autocast, recorder.like, recorder.treatment
        recorder.begin_function(name, args, kwargs)
        try:
            result = func(*args, **kwargs)
            recorder.end_function(name, args, result)
            return result
        except (RuntimeError, ValueError, TypeError) as error:
            recorder.refused(func, args, kwargs, error)
            raise
        finally:
            recorder.function, recorder.autocast, recorder.like, recorder.treatment = before


_MODES = (__file__, torch_device.__file__)


@contextmanager
def warnings_at_callers() -> Iterator[None]:
    """In the `with` block, a warning names the script's line, not the line of a torch mode that intercepts the call."""
    before: Any = warnings.showwarning

    def show(message: Any, category: Any, file: str, line: int, *others: Any) -> None:
        frame: Any = frame_above(1) if file in _MODES else None
        while frame is not None and frame.f_code.co_filename != file:
            frame = frame.f_back
        if frame is None:
            before(message, category, file, line, *others)
            return
        while frame.f_code.co_filename in (*_MODES, overrides.__file__):
            by_torch, frame = frame.f_code.co_filename == overrides.__file__, frame.f_back
        frame = frame.f_back if by_torch else frame  # a Python function of torch calls the modes itself
        globals().pop("__warningregistry__", None)
        place = frame.f_code.co_filename, frame.f_lineno, frame.f_globals.get("__name__")
        registry = frame.f_globals.setdefault("__warningregistry__", {})
        warnings.warn_explicit(message, category, *place, registry)

    shown: Any = show
    warnings.showwarning = shown
    try:
        yield
    finally:
        if warnings.showwarning is shown:
            warnings.showwarning = before


def device_of(model: nn.Module) -> str:
    """Return the device type that holds most parameter elements of a model; `"cpu"` for a model without parameters."""
    counts: Counter[str] = Counter()
    for parameter in model.parameters():
        counts[parameter.device.type] += parameter.numel()
    return max(counts, key=lambda device: counts[device], default="cpu")


def in_dtypes(call: Call, others: Mapping[torch.dtype, torch.dtype]) -> Call:
    """Return a call in which each dtype that is a key of `others` is replaced by its value."""
    operands = (replace(o, dtype=others.get(o.dtype, o.dtype)) for o in call.operands)
    results = ((others.get(dtype, dtype), shape) for dtype, shape in call.results)
    autocast = call.autocast and others.get(call.autocast, call.autocast)
    return replace(call, operands=tuple(operands), results=tuple(results), autocast=autocast)

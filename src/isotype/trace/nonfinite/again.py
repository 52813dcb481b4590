"""Runs a step a second time to find the first operator with a non-finite result; the model stays unchanged.

An operator is reported if its operands are finite and its result is not. Intended values are not reported: the -inf of
an attention mask, infinities that follow from this -inf, and uninitialized memory. A NaN that follows from -inf is
reported. The operands are checked only if the result is not finite, so a finite step takes one pass over each result.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from isotype.compat.torch import OpOverload, current_node, own_buffers, run_in_mode, storage_key
from isotype.core.operators import is_view, leaves
from isotype.core.random_states import random_states_kept
from isotype.core.source import shown
from isotype.model.shard import local
from isotype.precision.ranges import has_statistics
from isotype.records.nonfinite import Cause, NonFinite, Value
from isotype.trace.nonfinite.cause import (
    TensorCall,
    TensorOperand,
    cause_of,
    entries_at,
    exact_result,
    fresh_elements,
    is_finite,
    value_of,
)
from isotype.trace.recorder import LIFTS, Recorder
from isotype.trace.weights import state_tensors

_UNSET = ("aten.empty", "aten.new_empty", "aten.resize")


def first_nonfinite(
    model: nn.Module,
    step: Callable[[], Iterable[torch.Tensor]],
    batches: Sequence[Mapping[str, Any]] = (),
    scale: float | None = None,
    stop: bool = True,
) -> NonFinite | None:
    """Run a step and return its first operator with a non-finite result; None if all results are finite.

    Gradients, buffers, training modes and random states are restored at the end. If the step draws random numbers, the
    function `step` has to set the random states. Compiled code runs eagerly.

    Args:
        model: the model whose weights and gradients the step uses.
        step: function that runs the forward and backward of each micro-batch, and yields its loss.
        batches: the micro-batches in order, each with its tensors by name.
        scale: the loss scale of the step's backward. None without loss scaling; the gradient norm is then checked, too.
        stop: True to stop the step at the operator; False if other processes wait for the end of the step.
    """
    recorder = FirstNonFinite(model, scale, stop)
    losses = []
    with _untouched(model), torch.compiler.set_stance("force_eager"):
        with suppress(FoundError), recorder.watch(model), recorder:
            remaining = iter(batches)
            recorder.begin_batch(next(remaining, {}))
            for loss in step():
                losses.append(loss.detach())
                recorder.begin_batch(next(remaining, {}))
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            if scale is None and gradients and all(type(grad) is torch.Tensor for grad in gradients):
                recorder.phase = "unscale"
                torch.nn.utils.get_total_norm(gradients)
        results = [*losses, *(p.grad for p in model.parameters() if p.grad is not None)]
        if recorder.finding is None and not all(map(is_finite, results)):
            return recorder.suspect
    return recorder.finding


@contextmanager
def _untouched(model: nn.Module) -> Iterator[None]:
    """Set `grad` to None in a `with` block; then restore gradients, buffers, training modes and random states."""
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    held = ((m, name, b) for m in model.modules() for name, b in own_buffers(m).items() if b is not None)
    buffers = [(m, name, buffer, buffer.detach().clone()) for m, name, buffer in held if not buffer.is_meta]
    modes = [(module, module.training) for module in model.modules()]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        with random_states_kept():
            yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for holder, name, buffer, values in buffers:
                own_buffers(holder)[name] = buffer
                if not torch.equal(buffer, values):
                    buffer.copy_(values)
        for module, mode in modes:
            module.training = mode


_SKIPS = 10
"""A training ends after this number of skipped steps in a row, if the loss scale is at most 1."""


class StopReason:
    """Decides after each step of a training whether the training may continue."""

    def __init__(self) -> None:
        self._skips = 0

    def of(self, loss: float, norm: float | None, scale: Callable[[], float] | None) -> str | None:
        """Return the reason why the training has to end; None if it may continue.

        A non-finite loss always ends the training. A non-finite gradient is normal with a GradScaler, which then skips
        the step and lowers the loss scale. `scale` is a function that returns the loss scale; None without a
        GradScaler.
        """
        if not math.isfinite(loss):
            return "the loss is not finite"
        if norm is None or math.isfinite(norm):
            self._skips = 0
            return None
        if scale is None:
            return "the gradient is not finite"
        self._skips += 1
        if self._skips < _SKIPS or scale() > 1:
            return None
        return f"the gradient is not finite at any loss scale: {self._skips} steps were skipped in a row"


class FoundError(BaseException):
    """Ends the step at the first non-finite result. It is a `BaseException`, so `except Exception` does not catch it."""


class FirstNonFinite(Recorder):  # type: ignore[no-untyped-call]
    """Finds the first operator with a non-finite result.

    Args:
        stop: True to raise `FoundError` at this operator; False if other processes wait for the step's end.

    Attributes:
        finding: the first operator with a non-finite result of finite operands; None if there is none.
        suspect: the first use of a non-finite value that no operator has computed. If `finding` is None, this is the
            cause of a non-finite loss.
    """

    supports_higher_order_operators = True

    def __init__(self, model: nn.Module, scale: float | None = None, stop: bool = True) -> None:
        super().__init__()
        self.finding: NonFinite | None = None
        self.suspect: NonFinite | None = None
        self._shape, self._scale, self._stop = (0, 0), scale, stop
        self._weights: dict[int, str] = {}
        self._inputs: dict[int, str] = {}
        # Storages by address. While a weak reference to a storage exists, its address is not used again.
        self._constant: dict[int, StorageWeakRef] = {}
        self._unset: dict[int, StorageWeakRef] = {}
        self._passed: dict[int, StorageWeakRef] = {}
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            layer = model.get_submodule(name.rpartition(".")[0])
            for part in (tensor, *state_tensors(tensor, layer)):
                self._weights[_address(part)] = name
        for buffer in model.buffers():
            _add(self._constant, buffer)  # it may be a mask

    def begin_batch(self, batch: Mapping[str, Any]) -> None:
        """Start the next micro-batch; `batch` contains its tensors by name."""
        self._shape = _rows_and_length(batch)
        for name, value in batch.items():
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                self._inputs[_address(value)] = name
                if "mask" in name or "bias" in name:
                    _add(self._constant, value)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.finding is not None or not isinstance(func, OpOverload):
            return run_in_mode(func, args, kwargs)
        self._turn()
        call = TensorCall(func, args, kwargs, self._place())
        result = run_in_mode(func, args, kwargs)
        if func in LIFTS:
            _add(self._constant, result)  # `torch.tensor(0.0)` in the code
        elif not is_view(func):
            self.finding = self._check(call, result)
            if self.finding is not None and self._stop:
                raise FoundError
        return result

    def _turn(self) -> None:
        if current_node() is not None:
            self.phase = "backward"
        elif self.phase == "backward":
            self.phase = "forward"

    def _check(self, call: TensorCall, result: Any) -> NonFinite | None:
        """Return a finding if a result of an operator is not finite and has to be reported; else None."""
        name = call.name
        outputs = [leaf for leaf in leaves(result) if isinstance(leaf, torch.Tensor)]
        outputs += [tensor for tensor in call.written if all(tensor is not output for output in outputs)]
        outputs = [tensor for tensor in outputs if tensor.is_floating_point()]
        if name.startswith(_UNSET):
            for tensor in outputs:
                _add(self._unset, tensor)
            return None
        # Gradients start from a constant, too, but they are no masks. Values that a backward recomputes may be masks.
        gradient = self.phase == "backward" and not torch.is_grad_enabled()
        by_code = [
            not gradient and (operand.original is None or _alive(self._constant, _address(operand.original)))
            for operand in call.operands
        ]
        constant = all(by_code) and not gradient
        statistics = outputs[1:] if has_statistics(name) and "backward" not in name else []
        for tensor in statistics:
            _add(self._passed, tensor)
        for tensor in outputs:
            if any(tensor is statistic for statistic in statistics) or is_finite(tensor):
                continue
            finding = self._of_result(call, tensor, by_code)
            if finding is not None:
                return finding
            _add(self._passed, tensor)
        for tensor in outputs:
            if constant:
                _add(self._constant, tensor)
            else:
                self._constant.pop(_address(tensor), None)
        return None

    def _of_result(self, call: TensorCall, result: torch.Tensor, by_code: Sequence[bool]) -> NonFinite | None:
        """Return a finding for a non-finite result; None if the result is intended, or follows from an earlier value."""
        fresh = fresh_elements(call, result, by_code)
        if fresh is not None:
            exact, entries = exact_result(call, fresh, result.dtype), entries_at(call, fresh)
            finding = self._finding(call, result, cause_of(call, result, exact, entries))
            return replace(finding, rows=self._rows(fresh), exact=exact, entries=entries)
        for operand in call.operands:
            if is_finite(operand.tensor):
                continue
            if operand.original is None:
                self._suspect(self._finding(call, result, "constant"))
            elif (other := self._of_operand(call, result, operand)) is not None:
                return other
        return None

    def _of_operand(self, call: TensorCall, result: torch.Tensor, operand: TensorOperand) -> NonFinite | None:
        address, nan = _address(operand.original), bool(operand.tensor.isnan().any())
        if address in self._weights:
            is_mask = address in self._constant and not nan
            return None if is_mask else self._from_operand(call, result, "weight", operand)
        if address in self._inputs:
            return self._from_operand(call, result, "input", operand) if nan else None
        if _alive(self._passed, address) or not nan:
            return None
        finding = self._from_operand(call, result, "outside", operand)
        if not _alive(self._unset, address):
            return finding
        if call.func not in _COPIES:  # the code may copy uninitialized memory before it has filled all of it
            self._suspect(finding)
        return None

    def _suspect(self, finding: NonFinite) -> None:
        if self.suspect is None or (finding.result.nan and not self.suspect.result.nan):
            self.suspect = finding

    def _from_operand(
        self, call: TensorCall, result: torch.Tensor, cause: Cause, operand: TensorOperand
    ) -> NonFinite:
        assert operand.original is not None
        rows = self._rows(~operand.original.isfinite()) if cause == "input" else ()
        return replace(self._finding(call, result, cause), culprit=self._value(operand), rows=rows)

    def _finding(self, call: TensorCall, result: torch.Tensor, cause: Cause) -> NonFinite:
        return NonFinite(
            op=call.name,
            module=call.place.module,
            phase=self.phase,
            source=shown(call.place.source),
            operands=tuple(self._value(operand) for operand in call.operands if operand.original is not None),
            result=value_of("result", result),
            cause=cause,
            batch=self._shape[0],
            scale=self._scale if self.phase == "backward" else None,
        )

    def _value(self, operand: TensorOperand) -> Value:
        address = _address(operand.original)
        name = self._weights.get(address) or self._inputs.get(address, "")
        return value_of(operand.role, operand.tensor, name)

    def _rows(self, bad: torch.Tensor) -> tuple[int, ...]:
        """Return the rows of the batch in which the mask `bad` has a True; () if `bad` has another number of rows."""
        rows, length = self._shape
        if not rows or not bad.dim() or bad.shape[0] not in (rows, rows * length):
            return ()
        return tuple(bad.reshape(rows, -1).any(1).nonzero().flatten().tolist())


def _add(storages: dict[int, StorageWeakRef], tensor: torch.Tensor) -> None:
    storage = _storage(tensor)
    if storage is not None:
        storages[storage_key(storage)] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]


_COPIES = frozenset({torch.ops.aten.clone.default, torch.ops.aten._to_copy.default})


def _storage(tensor: Any) -> Any:
    try:
        return local(tensor).untyped_storage()
    except (NotImplementedError, RuntimeError):  # sparse and opaque tensors have no storage
        return None


def _address(tensor: Any) -> int:
    storage = _storage(tensor)
    return 0 if storage is None else int(storage_key(storage))


def _alive(storages: dict[int, StorageWeakRef], address: int) -> bool:
    reference = storages.get(address)
    return reference is not None and not reference.expired()  # type: ignore[no-untyped-call]


def _rows_and_length(batch: Mapping[str, Any]) -> tuple[int, int]:
    """Return (rows, tokens per row), the shape of a batch's first two-dimensional tensor; (0, 0) without tensors."""
    shapes = [tuple(value.shape) for value in batch.values() if isinstance(value, torch.Tensor)]
    flat = [shape for shape in shapes if len(shape) == 2]
    if flat:
        return flat[0]
    return (shapes[0][0], 1) if shapes and shapes[0] else (0, 0)

"""Frozen data of a traced step, for rules and reports."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import Literal

import torch

from isotype.core.dtypes import FLOATS, dtype_name
from isotype.core.names import short, with_parents
from isotype.records.memory import Memory, Phase
from isotype.records.reach import Reach, Unreached
from isotype.records.request import Setup

CASTS = frozenset({"aten._to_copy.default", "aten.copy_.default", "prims.convert_element_type.default"})
"""Operators of `.to(dtype)` and similar calls."""
CAST_FUNCTIONS = frozenset(
    {"to", "float", "half", "bfloat16", "double", "type", "type_as", "copy_", "_to_copy"}
)
"""Python names of `.to(dtype)` and similar calls. A cast in any other Python function comes from autocast."""

OriginKind = Literal[
    "parameter",  # `name` is its fully qualified name
    "buffer",  # `name` is its fully qualified name
    "input",  # `name` is the argument's name
    "state",  # a tensor of a quantization state; `name` is the layer's
    "outside",  # a tensor that the code stores outside of the model: a scratch buffer, a table
    "scratch",  # uninitialized memory that the module `name` allocated and another module wrote
    "attribute",  # a tensor attribute of a module, neither parameter nor buffer; `name` is its name
    "data",  # a tensor that the code of the loss creates
    "constant",  # a tensor that the model's code creates from no other tensor (`torch.zeros`, `arange`)
    "cast",  # `.to()`, `.float()`, written at `source`
    "autocast",  # a cast by autocast
    "promotion",  # operands of two dtypes; `before` is the operand whose dtype the result has
    "operator",  # an operator that sets its result's dtype (`dequantize_4bit`, a comparison)
    "gradient",  # a gradient by autograd
    "conversion",  # a conversion by the recorder after a breach; `before` is never another conversion
]

FROM_NUMPY = "a tensor from NumPy"
"""`Origin.name` of a tensor that shares its memory with an array. `Origin.source` is the first line that uses it."""
SHARED = ("outside", "scratch")
"""Values of `Origin.kind` for tensors that the model and other code share."""

COPY_OF_WEIGHT = "a tensor with the shape of a trained weight"
"""Name of a tensor outside of the model that the script changes between steps, such as a moving average."""
MERGED_WEIGHT = "the base weight"
"""Name of a weight into which PEFT merges an adapter between steps."""

PARAM_DTYPE, OUTPUT_DTYPE = FSDP_CASTS = "FSDP's param_dtype", "FSDP's output_dtype"
"""Names of the origins of dtypes to which FSDP casts inputs and outputs of modules."""

UNSAFE = "is unsafe to autocast"
"""Part of torch's error for a function that is forbidden under autocast; the message of the `Breach` contains it."""

ONLY_WIDE = "types other than float and double"
"""Part of torch's error for a function without 16-bit kernels (`torch.linalg.lstsq`)."""

ATTENTION = "torch.scaled_dot_product_attention"
NO_ATTENTION_KERNEL = "No available kernel. Aborting execution."
"""Message of a `Breach` if no enabled kernel of attention accepts the operands."""


@dataclass(frozen=True, slots=True, eq=False)
class Origin:
    """The origin of a value's dtype.

    Attributes:
        kind: kind of the value or operator that set the dtype.
        name: name of the parameter, buffer or argument, or else of the operator.
        module: fully qualified name of the module that set the dtype ("" is the model itself).
        source: `file:line` of the code; "" if there is none.
        before: origin of the operand of a cast. For a promotion or conversion, origin of the operand that had `dtype`.
        like: origin of the tensor whose dtype the code copies (`x` in `y.to(x.dtype)`); None if the code names the dtype.
    """

    kind: OriginKind
    dtype: torch.dtype
    name: str
    module: str = ""
    source: str = ""
    before: Origin | None = None
    like: Origin | None = None

    def path(self) -> tuple[Origin, ...]:
        """Return this origin and all earlier origins, back to the first."""
        steps: list[Origin] = [self]
        while (earlier := steps[-1].like or steps[-1].before) is not None:
            steps.append(earlier)
        return tuple(steps)

    @property
    def cause(self) -> Origin:
        """The origin that chose this dtype.

        The cause of a promotion is the cause of the operand that already had the resulting dtype. The cause of a cast
        to the dtype of another tensor is the cause of that other tensor. A parameter, an input, and a cast to a dtype
        in the code are their own causes.
        """
        cause = self
        while earlier := cause.like or (cause.before if cause.kind in ("promotion", "gradient") else None):
            cause = earlier
        return cause


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor operand.

    Attributes:
        role: name of the operator's argument (`self`, `mat2`, `weight`), or `tensors[1]` for an element of a list.
    """

    role: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    origin: Origin


@dataclass(frozen=True, slots=True)
class Breach:
    """A requirement (contract) of an operator on its operands that a call broke.

    Attributes:
        message: the error message that the device prints.
        assumed: True if the dtypes that the device accepts were assumed, and not measured.
        converted: the dtype to which the recorder converted the operands to continue the trace; None if it did not convert
            them.
        consequence: True for a backward call whose forward call already broke a contract.
    """

    message: str
    assumed: bool
    converted: torch.dtype | None
    consequence: bool = False


@dataclass(frozen=True, slots=True)
class Call:
    """An operator call of the step.

    Attributes:
        op: `aten.mm.default`, or the name of a call that is not a torch operator, such as `GradScaler.unscale_`.
        module: fully qualified name of the module that runs the call. A backward call has the module of its forward call.
        source: `file:line` in the model's (or the user's) code.
        operands: tensor arguments of all dtypes, before any conversion.
        results: (dtype, shape) of each returned tensor.
        flops: FLOPs of a matmul-like operator, two per multiply-add; 0 for other operators.
        repeats: number of calls in the real step (more than 1 inside a folded layer).
        recomputed: True if gradient checkpointing runs this forward call again in the backward.
        off: error by rounding to 16 bits; 0 if unknown. It is the error of a sine's or cosine's angle, of the integers that an
            `arange` or a cast returns, or (relative) of the argument of a root, power, logarithm or reciprocal.
        rounded_at: `file:line` where the values of `off` were rounded, or the name of a 16-bit input or buffer.
        emptied: number of rows whose finite values all became minus infinity in a cast; 0 if values are unknown.
        numbers: names and values of Python float arguments: `(("min", 1e-12),)`.
        outside: (an index that is out of range, the size of the indexed table); None if there is none.
        undefined: number of results that are NaN for all values of the weights: fully masked rows of a softmax, or a mean over
            zero labels. -1 means a sum over zero labels, whose result is 0.
        by_script: True if a traced script, not a library, made this call (such as clipping) after the backward.
        by_default: True if the call creates a tensor without a dtype argument, in torch's default dtype.
        cuts: True if an operand requires a gradient, but the operator has no backward (repacked 4-bit weights).
    """

    op: str
    phase: Phase
    module: str
    source: str
    operands: tuple[Operand, ...]
    results: tuple[tuple[torch.dtype, tuple[int, ...]], ...]
    flops: int = 0
    repeats: int = 1
    breach: Breach | None = None
    recomputed: bool = False
    autocast: torch.dtype | None = None
    off: float = 0.0
    rounded_at: str = ""
    emptied: int = 0
    numbers: tuple[tuple[str, float], ...] = ()
    outside: tuple[int, int] | None = None
    undefined: int = 0
    by_script: bool = False
    by_default: bool = False
    cuts: bool = False

    @property
    def floats(self) -> list[Operand]:
        return [operand for operand in self.operands if operand.dtype in FLOATS]

    @property
    def run_dtype(self) -> torch.dtype | None:
        """The dtype in which a matmul-like call multiplies; None for other calls. `mm.dtype` widens only its result."""
        if not self.flops or not self.results:
            return None
        return self.operands[1].dtype if ".dtype" in self.op else self.results[0][0]

    @property
    def dtypes(self) -> set[torch.dtype]:
        return {operand.dtype for operand in self.operands} | {dtype for dtype, _ in self.results}

    @property
    def of_gradient(self) -> bool:
        return bool(self.operands) and self.operands[0].origin.kind == "gradient"

    @property
    def refusal(self) -> str:
        """The error message of the device; "" if the operands satisfy the contract of the operator."""
        return "" if self.breach is None else self.breach.message

    @property
    def is_cast(self) -> bool:
        """True if the call converts a float tensor to another float dtype."""
        before = {operand.dtype for operand in self.operands[-1:]} & FLOATS
        return self.op in CASTS and bool(before) and not before & {dtype for dtype, _ in self.results}


@dataclass(frozen=True, slots=True)
class Quantization:
    """The quantization state of a layer.

    Attributes:
        format: `nf4`, `fp4`, `int8`, or the method's name.
        compute: the layer's compute dtype; None if unset.
        state: dtype to which the quantization state dequantizes; None if the state is missing.
        present: True if the layer still has a quantization state.
        absmax: dtype of the scales.
        packed: current dtype of the packed bytes.
        storage: dtype of the packed bytes when they were packed.
        repacking: the error when an evaluation on a CPU repacks 4-bit weights; "" if repacking works; None if nothing is
            repacked.
        repacked: True if bitsandbytes has repacked the weight for this CPU. The new layout has no backward.
        bounded: True if isotype.model.boundary wraps the layer. A copy of an int8 weight then keeps its scales.
    """

    format: str
    compute: torch.dtype | None
    state: torch.dtype | None
    present: bool
    absmax: torch.dtype | None
    packed: torch.dtype
    storage: torch.dtype | None
    repacking: str | None = None
    repacked: bool = False
    bounded: bool = False


@dataclass(frozen=True, slots=True)
class Weight:
    """A parameter or a buffer of the model.

    Attributes:
        name: fully qualified name, without the parts that wrappers add.
        shape: stored shape (packed, for 4-bit weights).
        adapter: True if the parameter belongs to a PEFT adapter or to a trained copy of a module.
        kind: kind of the module, see `isotype.model.walk.Place.kind`.
        pinned: True if the author of the model keeps the parameter in float32.
        quantization: quantization state of the layer; None if the weight is not quantized.
        tied: other names of the same tensor.
        repeats: number of equal weights in equal layers that this weight represents, if equal layers are traced once.
        largest: largest absolute value; None if values are unknown.
        median_magnitude: median absolute value of the nonzero values; None if values are unknown.
        exact_in: a 16-bit dtype that represents every value of a float32 weight exactly; None if none is known.
        unit: the module with which FSDP2 gathers the weight ("" for the model); None if the weight is not sharded.
        gathered: the dtype in which FSDP2 gathers the weight for a forward; None if FSDP2 casts no weights.
        was: the dtype that the weight had before the step's code cast it; None if the code does not cast it.
        reader: class of another module whose code reads the weight without calling the weight's layer; else "".
        set_on: attribute (name, value) that code set without effect, such as (`encoder.requires_grad`, False); else None.
        set_at: how a script's line set the dtype: `cast at train.py:12`; "" if unknown.
        codes_set_at: how a script's line replaced packed codes without their quantization state; "" if none is known.
        emptied_at: the script's line that called `to_empty`, if nothing has set the values since; else "".
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    buffer: bool = False
    trainable: bool = False
    adapter: bool = False
    module: str = ""
    module_class: str = ""
    kind: str = "other"
    pinned: bool = False
    quantization: Quantization | None = None
    tied: tuple[str, ...] = ()
    repeats: int = 1
    largest: float | None = None
    median_magnitude: float | None = None
    exact_in: torch.dtype | None = None
    unit: str | None = None
    gathered: torch.dtype | None = None
    was: torch.dtype | None = None
    reader: str = ""
    set_on: tuple[str, bool] | None = None
    set_at: str = ""
    codes_set_at: str = ""
    emptied_at: str = ""

    @property
    def dtype_text(self) -> str:
        """`NAME is DTYPE`, with the reason or the line that set the dtype."""
        kept = self.pinned and self.dtype == torch.float32
        how = ", which the model's author keeps in float32" if kept else self.by_line
        return f"{self.name} is {dtype_name(self.dtype)}{how}"

    @property
    def by_line(self) -> str:
        """`set_at` after a comma; "" if `set_at` is unknown."""
        return self.set_at and f", {self.set_at}"

    @property
    def bytes(self) -> int:
        """Bytes of one of the `repeats` equal weights."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Failure:
    """The error that ended a trace early.

    Attributes:
        phase, module, source: place of the error.
        error: class name and message of the error.
        dtype_related: True if operands of different dtypes were involved.
        operands: float tensors in the local variables of the code that raised the error, by name.
        recomputed: True if the error was raised while gradient checkpointing recomputed the forward.
        condition: the code of the condition that failed, in an `assert` or above a `raise`; else "".
    """

    phase: Phase
    module: str
    source: str
    error: str
    dtype_related: bool = False
    operands: tuple[Operand, ...] = ()
    recomputed: bool = False
    condition: str = ""


GRADIENTLESS = ("torch.autograd.backward", "GradScaler.step")
"""Calls that raise one of the errors in `GRADIENT_ERRORS`, whatever the dtypes are."""
NO_GRADIENT = "element 0 of tensors does not require grad and does not have a grad_fn"
NOT_SCALAR = "grad can be implicitly created only for scalar outputs"
NOTHING_UNSCALED = "No inf checks were recorded for this optimizer."
GRADIENT_ERRORS = (NO_GRADIENT, NOT_SCALAR, NOTHING_UNSCALED)
"""Error messages of the calls in `GRADIENTLESS`: there are no gradients, or the loss is not a scalar."""


@dataclass(frozen=True, eq=False)
class Trace:
    """The trace of a training step.

    Attributes:
        calls: all operators in order of execution.
        modules: fully qualified name -> class name.
        failure: the error that ended the trace early; None if the step was traced to its end.
        notes: other facts, such as the effect of a setting.
        untraced: part of the step that was not traced -> reason, or "". Findings do not cover these parts.
        left: sentences about state that the trace could not restore.
        model: name or class of the model.
        input_dtypes: dtypes of the step's float inputs by name.
        by_ranges: modules whose values do not fit into float16: name in the base model -> exponent. The input is multiplied by
            2^-exponent, and the output by 2^exponent. 0 means computing in float32.
        reached: number of trainable parameters with a gradient; None if no backward finished.
        unreached: trainable parameters that the forward uses, but that get no gradient.
        partial: True if the traced loss uses only one of several outputs, because the model returns no loss.
        without_effect: inputs that no chain of operators connects to the loss.
        reach: dependence of predictions on inputs; None if not measured.
        stale_casts: True if a forward used old casts of weights, because autocast cached them before an optimizer step.
        repeated: the lines of two optimizer steps that use the same gradients, without a backward between them; else None.
        scaled: True if the optimizer used gradients that were still multiplied by a loss scale.
        unscaled: True if a GradScaler divided gradients by the loss scale, although the loss was not multiplied by it.
        unequal: (reason, line) if processes make different updates; else ("", ""). The reason is "no_sync" (DDP has not
            averaged the gradients) or "scaler" (each process has a GradScaler that decides alone).
        unmoved: 16-bit parameters that have a gradient, but did not change in the optimizer's step.
        spoiled: 16-bit parameters that became NaN or infinite in the optimizer's step.
        state_casts: (state, dtype before, after, number of parameters, line) for casts by an optimizer's `load_state_dict`.
        compensated: whether an optimizer keeps the digits that rounding to 16 bits takes from its updates.
        lost_terms: terms of the loss without a graph, as (line that drops the graph, line that adds the term).
        unheld: trainable parameters that have a gradient, but are in no optimizer of the step.
        orphans: number of optimizer parameters that have no gradient and belong to no traced module. In a check, it is 0 if an
            optimizer has any parameter of the model.
        idle_step: (number of parameters, line) of an optimizer step without the gradients that these parameters had in an
            earlier step; None if there is no such step.
        unmatched: names in PEFT's `target_modules` and `modules_to_save` that match no module.
        reasons: dtype -> the reason why weights have it, if code outside of the model chose it.
        misspelt: (config, misspelt argument, intended argument, line) for each call in the script that passes an argument
            without effect to a config.
        idle_checkpoints: trained modules whose gradient checkpointing has no effect, because they are in eval mode.
        no_autocast: the reason why this step needs autocast, although autocast is off; "" if it needs none.
    """

    setup: Setup
    calls: tuple[Call, ...]
    weights: tuple[Weight, ...]
    modules: Mapping[str, str]
    memory: Memory
    failure: Failure | None = None
    notes: tuple[str, ...] = ()
    untraced: Mapping[str, str] = field(default_factory=dict)
    left: tuple[str, ...] = ()
    model: str = ""
    input_dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)
    by_ranges: Mapping[str, int] = field(default_factory=dict)
    reached: int | None = None
    unreached: tuple[Unreached, ...] = ()
    partial: bool = False
    without_effect: tuple[str, ...] = ()
    reach: Reach | None = None
    stale_casts: bool = False
    repeated: tuple[str, str] | None = None
    scaled: bool = False
    unscaled: bool = False
    unequal: tuple[str, str] = ("", "")
    unmoved: tuple[str, ...] = ()
    spoiled: tuple[str, ...] = ()
    state_casts: tuple[tuple[str, torch.dtype, torch.dtype, int, str], ...] = ()
    compensated: bool = False
    lost_terms: tuple[tuple[str, str], ...] = ()
    unheld: tuple[str, ...] = ()
    orphans: int = 0
    idle_step: tuple[int, str] | None = None
    unmatched: tuple[str, ...] = ()
    reasons: Mapping[torch.dtype, str] = field(default_factory=dict)
    misspelt: tuple[tuple[str, str, str, str], ...] = ()
    idle_checkpoints: tuple[str, ...] = ()
    no_autocast: str = ""

    @cached_property
    def flops(self) -> dict[torch.dtype, int]:
        """FLOPs of matmul-like operators by the dtype in which they multiply."""
        total: Counter[torch.dtype] = Counter()
        for call in self.calls:
            if call.run_dtype is not None:
                total[call.run_dtype] += call.flops * call.repeats
        return dict(total)

    @cached_property
    def owners(self) -> Mapping[str, Weight]:
        """Weights by name, with an entry for each name of a tied weight."""
        return {name: weight for weight in self.weights for name in (weight.name, *weight.tied)}

    def __str__(self) -> str:
        """Return the step as text: its phases, modules as a tree, and a line for each operator."""
        return "\n".join(_lines(self))

    def untraced_parts(self) -> Iterator[str]:
        """Yield the name of each part of the step that was not traced, with the reason."""
        return (f"{part}: {why}" if why else part for part, why in self.untraced.items())

    def breaches(self) -> Iterator[Call]:
        """Return the calls whose operands break the operator's contract."""
        return (call for call in self.calls if call.breach is not None)


def _lines(trace: Trace) -> Iterator[str]:
    setup = trace.setup
    model = trace.model or trace.modules.get("", "a step")
    autocast = "off" if setup.autocast is None else dtype_name(setup.autocast)
    scaler = "on" if setup.scaler else "off"
    yield f"{model} on {setup.profile.title}   autocast {autocast}   scaler {scaler}"
    for phase, calls in groupby(trace.calls, lambda call: call.phase):
        yield phase
        entered: tuple[str, ...] = ()
        for call in calls:
            path = tuple(filter(trace.modules.__contains__, reversed(with_parents(call.module)[:-1])))
            for depth, name in enumerate(path, 1):
                if path[:depth] != entered[:depth]:
                    times = f"   represents {call.repeats}" if depth == len(path) and call.repeats > 1 else ""
                    yield f"{'  ' * depth}{name} ({trace.modules[name]}){times}"
            entered = path
            yield f"{'  ' * (len(path) + 1)}{_words(call)}"
    if trace.failure is not None:
        yield f"ended in {trace.failure.phase} at {trace.failure.module or 'the model'}: {trace.failure.error}"
    yield from (f"not traced: {part}" for part in trace.untraced_parts())
    yield from (f"note: {note}" for note in trace.notes)


def _words(call: Call) -> str:
    operands = ", ".join(f"{item.role}: {_tensor(item.dtype, item.shape)}" for item in call.operands)
    results = ", ".join(_tensor(*result) for result in call.results)
    remarks = [short(call.source)] if call.source else []
    if call.breach is not None:
        converted = f", converted to {dtype_name(dtype)}" if (dtype := call.breach.converted) else ""
        remarks.append(f"refused{converted}: {call.breach.message}")
    elif call.is_cast:
        remarks.append("cast" if call.autocast is None else f"cast, autocast to {dtype_name(call.autocast)}")
    elif len({operand.dtype for operand in call.operands} & FLOATS) > 1:
        remarks.append("operands of several dtypes")
    if call.recomputed:
        remarks.append("recomputed")
    return "   ".join((f"{call.op}({operands}) -> {results or 'None'}", *remarks))


def _tensor(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    return f"{dtype_name(dtype)}{list(shape)}"

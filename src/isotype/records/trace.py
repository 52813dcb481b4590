"""Frozen data of a trace. Rules read it, reports render it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch

from isotype.core.dtypes import dtype_name
from isotype.core.names import short
from isotype.precision.devices.profile import DeviceProfile
from isotype.precision.devices.room import Room, room_of
from isotype.precision.policy import PrecisionPolicy
from isotype.precision.ranges import Ranges
from isotype.precision.versions import Incompatibility
from isotype.records.memory import Memory, Phase
from isotype.records.reach import Reach, Unreached

FLOATS = frozenset(
    {
        torch.float64,
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
    }
)
"""Float dtypes of a step."""

CASTS = frozenset({"aten._to_copy.default", "aten.copy_.default", "prims.convert_element_type.default"})
"""Operators of `.to(dtype)` and similar calls."""

OriginKind = Literal[
    "parameter",  # `name` is its fully qualified name
    "buffer",  # likewise
    "input",  # `name` is the argument's name
    "state",  # a tensor of a quantization state; `name` is the layer's
    "outside",  # a tensor that the code stores outside of the model: a scratch buffer, a table
    "scratch",  # uninitialized memory that the module `name` allocated and another one wrote
    "attribute",  # a tensor attribute of a module, neither parameter nor buffer; `name` is its name
    "data",  # a tensor that the loss's code brings
    "constant",  # created by the model's code from no other tensor (`torch.zeros`, `arange`)
    "cast",  # `.to()`, `.float()`, written at `source`
    "autocast",  # a cast that autocast made
    "promotion",  # operands of two dtypes; `before` is the operand that won
    "operator",  # an operator that sets its result's dtype (`dequantize_4bit`, a comparison)
    "gradient",  # made by autograd
    "conversion",  # a conversion by the recorder after a breach, as the policy would
]

SHARED = ("outside", "scratch")
"""Kinds of origins of tensors that a model shares with other code."""

UNSAFE = "is unsafe to autocast"
"""Part of a breach's message if a function is refused because of autocast."""


@dataclass(frozen=True, slots=True, eq=False)
class Origin:
    """The origin of a value's dtype.

    Attributes:
        kind: see `OriginKind`.
        dtype: the dtype it set.
        name: name of the parameter, buffer or argument; else the operator.
        module: fully qualified name of the module it happened in ("" is the model itself).
        source: `file:line` of the code; "" if there is none.
        before: the origin of its operand: the operand of a cast, or the one that won a promotion.
        like: of a cast, or of a tensor created from no other: the origin of the dtype if the code names
            another tensor's (`y.to(x.dtype)`); None if the code names the dtype itself.
    """

    kind: OriginKind
    dtype: torch.dtype
    name: str
    module: str = ""
    source: str = ""
    before: Origin | None = None
    like: Origin | None = None

    def path(self) -> tuple[Origin, ...]:
        """Return this origin and all earlier ones, back to the first."""
        steps: list[Origin] = [self]
        while (earlier := steps[-1].like or steps[-1].before) is not None:
            steps.append(earlier)
        return tuple(steps)

    @property
    def cause(self) -> Origin:
        """The origin to blame for the dtype: the first one on the path back that chose it.

        A promotion passes the blame to the operand that won, a cast to another tensor's dtype to that tensor.
        A cast to an explicit dtype, a parameter or an input is to blame itself.
        """
        blamed = self
        while True:
            passes_on = blamed.kind in ("promotion", "gradient")
            earlier = blamed.like or (blamed.before if passes_on else None)
            if earlier is None:
                return blamed
            blamed = earlier


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor operand.

    Attributes:
        role: name of the operator's argument (`self`, `mat2`, `weight`); `tensors[1]` inside a list.
        dtype: its dtype.
        shape: its shape.
        origin: the origin of its dtype.
    """

    role: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    origin: Origin


@dataclass(frozen=True, slots=True)
class Breach:
    """A contract that a call broke.

    Attributes:
        message: the real device's error.
        assumed: whether the contract is a family's rule instead of a measurement on that device.
        converted: the dtype to which the recorder converted the operands to continue; None if it could
            not.
        consequence: whether the same call already broke a contract in the forward: the same cause.
    """

    message: str
    assumed: bool
    converted: torch.dtype | None
    consequence: bool = False


@dataclass(frozen=True, slots=True)
class Call:
    """An operator call of the step.

    Attributes:
        op: `aten.mm.default`, or `GradScaler.unscale_` and similar calls that are no torch operators.
        phase: phase of the step.
        module: fully qualified name of the module it runs in; in the backward, the module of the forward
            call.
        source: `file:line` in the model's (or the user's) code.
        operands: its tensor arguments, all dtypes, before any conversion.
        results: (dtype, shape) of each tensor it returns.
        flops: two per multiply-add, of matmul-like operators; 0 for others.
        repeats: number of calls of the real step (more than 1 inside a folded layer).
        breach: the contract it broke, or None.
        recomputed: whether it is a forward call that gradient checkpointing runs again in the backward.
        autocast: the autocast dtype it ran under, None if autocast was off.
        off: error in radians of a sine's or cosine's argument from rounding to 16 bits since the inputs;
            0 if unknown.
        rounded_at: `file:line` of that rounding, or the name of a 16-bit input.
        emptied: of a cast, the number of finite rows that it turned entirely into minus infinity; 0 if
            values are unknown.
        numbers: its Python float arguments by schema name: `(("min", 1e-12),)`.
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

    @property
    def is_cast(self) -> bool:
        """True if it converts a float tensor to another float dtype."""
        before = {each.dtype for each in self.operands[-1:]} & FLOATS
        return self.op in CASTS and bool(before) and not before & {dtype for dtype, _ in self.results}


@dataclass(frozen=True, slots=True)
class Quantization:
    """The quantization state of a layer.

    Attributes:
        format: `nf4`, `fp4`, `int8`, or the method's name.
        compute: the layer's compute dtype, None if unset.
        state: dtype its quantization state dequantizes to; None if the state is missing.
        present: whether the layer still has its state.
        absmax: dtype of its scales.
        packed: current dtype of the packed bytes.
        storage: dtype of the packed bytes when they were packed.
        repacking: error of an evaluation on a CPU that repacks 4-bit weights, "" if it is repacked; None
            if its layout stays.
    """

    format: str
    compute: torch.dtype | None
    state: torch.dtype | None
    present: bool
    absmax: torch.dtype | None
    packed: torch.dtype
    storage: torch.dtype | None
    repacking: str | None = None


@dataclass(frozen=True, slots=True)
class Weight:
    """A parameter or a buffer of the model.

    Attributes:
        name: fully qualified name, without the parts that wrappers add.
        dtype: the current one.
        shape: as stored (packed, for 4-bit weights).
        buffer: whether it is a buffer.
        trainable: whether it requires a gradient.
        adapter: whether it belongs to an adapter (PEFT) or is a trained copy of a module.
        module: fully qualified name of its module.
        module_class: class name of its module.
        kind: kind of its module, see `isotype.model.walk.Place.kind`.
        pinned: whether the model's author keeps it in float32.
        quantization: the state of the quantized layer it is the weight of.
        tied: other names of the same tensor.
        repeats: number of weights it represents in a folded model.
        largest: largest absolute value; None if the values are not known.
        median_magnitude: median absolute value of the nonzero values; None if they are not known.
        exact_in: a 16-bit dtype that represents every value of a float32 weight; None if there is none or
            the values are unknown.
        was: its dtype before the step, if the step's code has cast it; else None.
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
    was: torch.dtype | None = None

    @property
    def bytes(self) -> int:
        """Bytes of one such tensor."""
        elements = 1
        for size in self.shape:
            elements *= size
        return elements * self.dtype.itemsize


@dataclass(frozen=True)
class Setup:
    """Settings of the step.

    Attributes:
        profile: the device.
        autocast: autocast dtype around forward and loss, or None.
        scaler: whether gradients are unscaled by a GradScaler.
        optimizer: name of the optimizer.
        learning_rate: of the optimizer, None if unknown.
        phases: the requested phases, in order.
        policy: the intended policy; None if it was derived from the model.
        compute: dtype to which breached operands are converted unless a part of the model decides
            otherwise: the policy's, autocast's, or that of most modules.
        fsdp: whether the run is sharded by FSDP: 0 no, else the version (1 or 2).
        devices: number of devices that train together, sharded (`fsdp`) or each with all weights (DDP).
        reshard: whether FSDP frees a block's gathered weights after its forward.
        zero3: version of the DeepSpeed whose ZeRO-3 shards the run; "" for none.
        find_unused: whether DDP looks for parameters without a gradient.
        shard_integers: whether frozen integer weights are sharded; else every process holds them all.
        gradient_checkpointing: arguments for the model's `gradient_checkpointing_enable`; None keeps it
            as it is.
        autocast_eval: whether autocast is on in evaluation and generation too.
        checkpoint_dtype: dtype that the model's config names as its checkpoint's; None if it names none.
        attention: attention implementation of the model's config (`sdpa`, `flash_attention_2`, …); None
            if unknown.
        accumulates: number of micro-batches in an optimizer step; gradients exist from the second one on.
        ahead: batches of inputs in the device's memory beside the one that is computed.
        room: device memory available to the step, and why; None: its share of all of it, see `limit`.
        batch: shapes of the inputs by argument name, for the report.
        details: rank, scale and targets of the adapters, and gradient checkpointing, in words.
        towers: names of the parts of the model that process only pictures or sound.
        data: known facts about the data set's rows in words; "" if none was opened.
        incompatible: incompatible versions of installed libraries; empty if the device is not in this
            machine.
        ranges: measured value ranges; None if they were not measured.
        family_ranges: published facts about the values of the model's family, with the source; "" if
            there are none.
    """

    profile: DeviceProfile
    autocast: torch.dtype | None
    scaler: bool
    optimizer: str
    compute: torch.dtype
    learning_rate: float | None = None
    phases: tuple[Phase, ...] = ("forward", "backward", "unscale", "optimizer")
    policy: PrecisionPolicy | None = None
    fsdp: int = 0
    devices: int = 1
    reshard: bool = True
    zero3: str = ""
    find_unused: bool = False
    shard_integers: bool = True
    gradient_checkpointing: Mapping[str, Any] | None = None
    autocast_eval: bool = False
    checkpoint_dtype: torch.dtype | None = None
    attention: str | None = None
    accumulates: int = 1
    ahead: int = 0
    room: Room | None = None
    batch: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    details: tuple[str, ...] = ()
    towers: tuple[str, ...] = ()
    data: str = ""
    incompatible: tuple[Incompatibility, ...] = ()
    ranges: Ranges | None = None
    family_ranges: str = ""

    @property
    def limit(self) -> Room:
        """Device memory available to the step."""
        return self.room or room_of(self.profile, all_free=True)


@dataclass(frozen=True)
class Failure:
    """The error that ended a trace early and that no dtype explains.

    Attributes:
        phase, module, source: where.
        error: class name and message.
        dtype_related: whether operands of different dtypes were involved.
        operands: float tensors among the local variables of the raising code, by name.
        recomputed: whether gradient checkpointing was recomputing the forward.
        condition: the code that decided to raise: an `assert`, or the line above a `raise`; else "".
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
"""Calls that raise if no gradient arrives, independent of dtypes."""
NO_GRADIENT = "element 0 of tensors does not require grad and does not have a grad_fn"
NOTHING_UNSCALED = "No inf checks were recorded for this optimizer."
"""Their messages."""


@dataclass(frozen=True, eq=False)
class Trace:
    """The trace of a training step.

    Attributes:
        setup: its settings.
        calls: every operator in order of execution.
        weights: every parameter and buffer.
        modules: fully qualified name -> class name.
        memory: peaks.
        failure: the error that ended it early, or None.
        notes: untraced parts with the reason, and other facts, such as the effect of a setting.
        left: state that the trace could not restore, a sentence each.
        model: name of the model or its class.
        input_dtypes: float dtypes of the step's inputs.
        by_ranges: modules that compute differently because of value ranges, by base model name: the
            exponent of a layer that computes on 2^-exponent times its values, 0 for a module in float32.
        reached: number of trainable parameters with a gradient; None if no backward finished.
        unreached: those without one because they are used with gradients off.
        without_effect: inputs that no operator of the forward passes on to the loss.
        reach: dependence of predictions on inputs; None if it was not measured.
        stale_casts: whether a forward used autocast's cached casts of weights from before an optimizer
            step.
    """

    setup: Setup
    calls: tuple[Call, ...]
    weights: tuple[Weight, ...]
    modules: Mapping[str, str]
    memory: Memory
    failure: Failure | None = None
    notes: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    model: str = ""
    input_dtypes: frozenset[torch.dtype] = frozenset()
    by_ranges: Mapping[str, int] = field(default_factory=dict)
    reached: int | None = None
    unreached: tuple[Unreached, ...] = ()
    without_effect: tuple[str, ...] = ()
    reach: Reach | None = None
    stale_casts: bool = False

    @property
    def flops(self) -> dict[torch.dtype, int]:
        """FLOPs of the matmul-like operators by dtype."""
        total: Counter[torch.dtype] = Counter()
        for call in self.calls:
            if call.flops and call.results:
                total[call.results[0][0]] += call.flops * call.repeats
        return dict(total)

    @cached_property
    def owners(self) -> Mapping[str, Weight]:
        """Weights by each of their names."""
        return {name: weight for weight in self.weights for name in (weight.name, *weight.tied)}

    def __str__(self) -> str:
        """Return the step as text: its operators in order, under their modules."""
        return "\n".join(_lines(self))

    def breaches(self) -> Iterator[Call]:
        """Return the calls that broke a contract."""
        return (call for call in self.calls if call.breach is not None)


def _lines(trace: Trace) -> Iterator[str]:
    """Yield the phases, the modules of each as a tree, and one line per operator."""
    setup = trace.setup
    autocast = "off" if setup.autocast is None else dtype_name(setup.autocast)
    yield f"{trace.model or trace.modules.get('', 'a step')} on {setup.profile.title}   autocast {autocast}   scaler {'on' if setup.scaler else 'off'}"
    phase = ""
    entered: tuple[str, ...] = ()
    for call in trace.calls:
        if call.phase != phase:
            phase, entered = call.phase, ()
            yield phase
        names = call.module.split(".") if call.module else []
        path = tuple(name for i in range(len(names)) if (name := ".".join(names[: i + 1])) in trace.modules)
        for depth, name in enumerate(path, 1):
            if path[:depth] != entered[:depth]:
                times = f"   stands for {call.repeats}" if depth == len(path) and call.repeats > 1 else ""
                yield f"{'  ' * depth}{name} ({trace.modules[name]}){times}"
        entered = path
        yield f"{'  ' * (len(path) + 1)}{_words(call)}"
    if trace.failure is not None:
        yield f"ended in {trace.failure.phase} at {trace.failure.module or 'the model'}: {trace.failure.error}"
    yield from (f"note: {note}" for note in trace.notes)


def _words(call: Call) -> str:
    """Return an operator, its operands, results and remarks on one line."""
    operands = ", ".join(f"{each.role}: {_tensor(each.dtype, each.shape)}" for each in call.operands)
    results = ", ".join(_tensor(*each) for each in call.results)
    remarks = [short(call.source)] if call.source else []
    if call.breach is not None:
        converted = call.breach.converted
        remarks.append(
            f"refused{'' if converted is None else f', converted to {dtype_name(converted)}'}: {call.breach.message}"
        )
    elif call.is_cast:
        remarks.append("cast" if call.autocast is None else f"cast, autocast to {dtype_name(call.autocast)}")
    elif len({each.dtype for each in call.operands if each.dtype in FLOATS}) > 1:
        remarks.append("operands of several dtypes")
    if call.recomputed:
        remarks.append("recomputed")
    return "   ".join((f"{call.op}({operands}) -> {results or 'None'}", *remarks))


def _tensor(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    return f"{dtype_name(dtype)}{list(shape)}"

"""What a trace is: frozen data, no behaviour beyond sums. Rules read it, reports render it."""

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
from isotype.records.reach import Reach

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
"""The float dtypes that a step may meet."""

CASTS = frozenset({"aten._to_copy.default", "aten.copy_.default", "prims.convert_element_type.default"})
"""What `.to(dtype)` and its kind come to."""

OriginKind = Literal[
    "parameter",  # `name` is its fully qualified name
    "buffer",  # likewise
    "input",  # `name` is the argument's name
    "state",  # a tensor of a quantization state; `name` is the layer's
    "outside",  # a tensor that the code keeps outside of the model: a scratch buffer, a table
    "scratch",  # unset memory that the module `name` allocated, and another one wrote into
    "attribute",  # a plain tensor that a module holds, neither parameter nor buffer; `name` is its name
    "data",  # a tensor that the loss's own code brings with it
    "constant",  # made by the model's code from no other tensor (`torch.zeros`, `arange`)
    "cast",  # `.to()`, `.float()`, written at `source`
    "autocast",  # a cast that autocast made
    "promotion",  # operands of two dtypes; `before` is the operand that won
    "operator",  # an operator whose result has a dtype of its own (`dequantize_4bit`, a comparison)
    "gradient",  # made by autograd
    "conversion",  # by the recorder after a breach, as the policy would
]

SHARED = ("outside", "scratch")
"""Kinds of origins of tensors that a model shares with other code."""

UNSAFE = "is unsafe to autocast"
"""What a breach says where a function is refused for autocast's sake."""


@dataclass(frozen=True, slots=True, eq=False)
class Origin:
    """Who made the dtype of a value.

    Attributes:
        kind: see `OriginKind`.
        dtype: the dtype it made.
        name: name of the parameter, buffer or argument; else the operator.
        module: fully qualified name of the module it happened in ("" is the model itself).
        source: `file:line` of the code that asked for it, "" where there is none.
        before: what it was made from: a cast's operand, the operand that won a promotion.
        like: of a cast, or a tensor made from no other: who made the dtype that it takes, where the code names another
            tensor's (`y.to(x.dtype)`); None where the code chose the dtype itself.
    """

    kind: OriginKind
    dtype: torch.dtype
    name: str
    module: str = ""
    source: str = ""
    before: Origin | None = None
    like: Origin | None = None

    def path(self) -> tuple[Origin, ...]:
        """From this origin back to the first."""
        steps: list[Origin] = [self]
        while (earlier := steps[-1].like or steps[-1].before) is not None:
            steps.append(earlier)
        return tuple(steps)

    @property
    def cause(self) -> Origin:
        """The origin to blame for the dtype: the first one on the path back that chose it.

        A promotion passes the blame on to the operand that won, a cast to another tensor's dtype to that tensor; a
        cast to a dtype that the code writes out, a parameter or an input chose.
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
    """A tensor that an operator was given.

    Attributes:
        role: name of the operator's argument (`self`, `mat2`, `weight`); `tensors[1]` inside a list.
        dtype: its dtype.
        shape: its shape.
        origin: who made its dtype.
    """

    role: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    origin: Origin


@dataclass(frozen=True, slots=True)
class Breach:
    """A contract that a call broke.

    Attributes:
        message: what the real device says.
        assumed: whether the contract is a family's rule and was not measured on that device.
        converted: the dtype the recorder converted the operands to in order to go on; None where it could not.
        consequence: whether it is the backward of a call that broke a contract in the forward: the same cause.
    """

    message: str
    assumed: bool
    converted: torch.dtype | None
    consequence: bool = False


@dataclass(frozen=True, slots=True)
class Call:
    """One operator of the step.

    Attributes:
        op: `aten.mm.default`, or `GradScaler.unscale_` and the like for what is no operator of torch's.
        phase: where in the step.
        module: fully qualified name of the module it runs in; in the backward, the module of the forward call.
        source: `file:line` in the model's (or the user's) code.
        operands: its tensor arguments, all dtypes, before any conversion.
        results: (dtype, shape) of each tensor it returns.
        flops: multiply-adds counted twice, of matmul-like operators; 0 for others.
        repeats: how many calls of the real step it stands for (more than 1 inside a folded layer).
        breach: the contract it broke, or None.
        recomputed: whether it is a forward call that gradient checkpointing runs again in the backward.
        autocast: the autocast dtype it ran under, None where autocast was off.
        off: of a sine or cosine, by how many radians its argument is off because something was rounded to 16 bit on
            the way from the inputs; 0 where that is not known.
        rounded_at: `file:line` that did that, or the name of the input that came in 16 bit.
        emptied: of a cast, how many rows of finite numbers it made minus infinity from end to end; 0 where values are not
            known.
        numbers: the Python floats among its arguments, by the names of the operator's schema: `(("min", 1e-12),)`.
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
        """Whether it brings one float tensor into another float dtype."""
        before = {each.dtype for each in self.operands[-1:]} & FLOATS
        return self.op in CASTS and bool(before) and not before & {dtype for dtype, _ in self.results}


@dataclass(frozen=True, slots=True)
class Quantization:
    """The quantization state of a layer.

    Attributes:
        format: `nf4`, `fp4`, `int8`, or the method's own name.
        compute: the layer's compute dtype, None where unset.
        state: dtype its quantization state dequantizes to; None where the state is missing.
        present: whether the layer still has its state.
        absmax: dtype of its scales.
        packed: dtype of the packed bytes now.
        storage: dtype of the packed bytes as they were packed.
        repacking: what an evaluation on a CPU that repacks 4-bit weights raises for it, "" where it is repacked; None
            where its layout is kept or never changes.
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
        repeats: how many weights it stands for in a folded model.
        largest: largest absolute value; None where the values are not known.
        median_magnitude: median absolute value of the nonzero values; None where they are not known.
        exact_in: a 16-bit dtype in which every value of a float32 weight is exact; None where there is none, or where
            the values are not known.
        was: its dtype before the step, where the step's own code has cast it; else None.
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
    """How the step is run.

    Attributes:
        profile: the device it is judged for.
        autocast: autocast dtype around forward and loss, or None.
        scaler: whether gradients are unscaled by a GradScaler.
        optimizer: name of the optimizer.
        learning_rate: of the optimizer, None where unknown.
        phases: what was asked for, in order.
        policy: the policy the model is meant to follow, None where it was read off the model.
        compute: dtype that breached operands are converted to: the policy's, autocast's, or that of most modules, where no part
            of the model decides otherwise.
        fsdp: whether the run is sharded by FSDP: 0 no, else the version (1 or 2).
        devices: how many devices train together, a process each: sharded over them (`fsdp`), or each with all weights (DDP).
        reshard: whether FSDP frees a block's gathered weights after its forward.
        shard_integers: whether frozen weights that are stored as integers are sharded; else every process holds them all.
        gradient_checkpointing: arguments for the model's `gradient_checkpointing_enable`; None leaves it as it is.
        autocast_eval: whether autocast is on in evaluation and generation too.
        checkpoint_dtype: dtype that the model's config names as its checkpoint's; None where it names none.
        attention: attention implementation of the model's config (`sdpa`, `flash_attention_2`, …); None where unknown.
        accumulates: whether an optimizer step takes several micro-batches: gradients are there from the second one's beginning.
        room: what the step may take of the device's memory, and why; None: its share of all of it, see `limit`.
        batch: shapes of the inputs by argument name, for the report.
        details: rank, scale and targets of the adapters, and gradient checkpointing, in words.
        towers: names of the parts of the model that only pictures or sound go through.
        data: what is known about the rows of the data set in words, "" where none was opened.
        incompatible: what of the installed libraries does not fit together; nothing where the device is elsewhere.
        ranges: what was measured of the model's values; None where nobody measured them.
        family_ranges: what is publicly known of the values of the model's family, with the source; "" where nothing is.
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
    shard_integers: bool = True
    gradient_checkpointing: Mapping[str, Any] | None = None
    autocast_eval: bool = False
    checkpoint_dtype: torch.dtype | None = None
    attention: str | None = None
    accumulates: bool = False
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
        """The device's memory that the step may take."""
        return self.room or room_of(self.profile, all_free=True)


@dataclass(frozen=True)
class Failure:
    """Why a step could not be traced to its end: an error that no dtype explains.

    Attributes:
        phase, module, source: where.
        error: class name and message.
        dtype_related: whether operands of different dtypes were involved.
        operands: float tensors that the code which raised had at hand, by the names of its variables.
        recomputed: whether gradient checkpointing was running the forward again.
        condition: the code that decided to raise, where it is an `assert` or stands right above a `raise`; else "".
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
"""What raises where no gradient arrives: calls of these names have broken no contract about dtypes."""
NO_GRADIENT = "element 0 of tensors does not require grad and does not have a grad_fn"
NOTHING_UNSCALED = "No inf checks were recorded for this optimizer."
"""What they say."""


@dataclass(frozen=True, slots=True)
class Unreached:
    """A trainable parameter that the forward uses, and that gets no gradient.

    Attributes:
        weight: its name.
        module, source: where it is used first.
        function: the `torch.autograd.Function` whose forward that is in, "" outside of any.
        behind: modules that had returned before it where gradients were on, in order.
        ignored: whether it is used with gradients on: the loss depends on nothing that is made of it.
    """

    weight: str
    module: str
    source: str
    function: str
    behind: tuple[str, ...]
    ignored: bool = False


@dataclass(frozen=True, eq=False)
class Trace:
    """One training step.

    Attributes:
        setup: how it was run.
        calls: every operator in order of execution.
        weights: every parameter and buffer.
        modules: fully qualified name -> class name.
        memory: peaks.
        failure: where it ended early, or None.
        notes: what was not traced, and why; what else is to be known of the step, such as what a setting decided.
        left: what the trace could not put back as it was, a sentence each.
        model: name of the model or its class.
        input_dtypes: float dtypes of the step's inputs.
        by_ranges: modules that do not compute as the others because of value ranges, by their names in the base model:
            the exponent of a layer that computes on 2^-exponent times its values, 0 of a module in float32.
        reached: how many trainable parameters got a gradient; None where no backward ran to its end.
        unreached: those that got none because they are used where gradients are off.
        reach: which inputs reach which predictions; None where that was not measured.
        stale_casts: whether a forward was seen to use casts that autocast made of weights before an optimizer step.
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
    reach: Reach | None = None
    stale_casts: bool = False

    @property
    def flops(self) -> dict[torch.dtype, int]:
        """FLOPs of the matmul-like operators by the dtype they run in."""
        total: Counter[torch.dtype] = Counter()
        for call in self.calls:
            if call.flops and call.results:
                total[call.results[0][0]] += call.flops * call.repeats
        return dict(total)

    @cached_property
    def owners(self) -> Mapping[str, Weight]:
        """Every weight by each of its names."""
        return {name: weight for weight in self.weights for name in (weight.name, *weight.tied)}

    def __str__(self) -> str:
        """The step as a person reads it: its operators in order, under the modules that they run in."""
        return "\n".join(_lines(self))

    def breaches(self) -> Iterator[Call]:
        """The calls that broke a contract."""
        return (call for call in self.calls if call.breach is not None)


def _lines(trace: Trace) -> Iterator[str]:
    """Phases, the modules of each as a tree, and a line for each operator."""
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
    """An operator in one line, as `aten.mm.default(self: float32[10, 16], mat2: bfloat16[16, 16]) -> float32[10, 16]`, and what is to be seen of it."""
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

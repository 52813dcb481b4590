"""Broken contracts, grouped by cause."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, wraps
from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType
from typing import Any, Literal, TypeVar, get_args
from weakref import WeakKeyDictionary

import torch

from isotype.core.dtypes import HALVES, dtype_name
from isotype.core.names import grouped, starred
from isotype.records.trace import ONLY_WIDE, SHARED, Call, Operand, Origin, Trace, Weight
from isotype.trace.sides import Sides, is_adapter, sides_of

Stage = Literal[
    "tensor",  # the owner of the mismatched tensor
    "step",  # a fact that does not depend on operands: a phase, or a function that is always refused
    "value",  # the number that is written
    "dtype",  # no kernel takes the dtype, whatever the other operands are
    "phase",  # the phase of the call
    "operator",  # the family of operators
    "operand",  # the kind of weight
    "rest",
]
"""The criterion by which a claim selects broken contracts. Claims are checked in the order of this list, and then in the order of the rules' codes."""

Refused = Literal["mixture", "dtype", "by the model"]
"""Kinds of refusal: the operands mix dtypes, the device does not support a dtype, or the model's code does not accept it."""


@dataclass(frozen=True)
class Broken:
    """A broken contract: the call, the operand with the wrong dtype, and the trace."""

    call: Call
    mismatched: Operand
    trace: Trace

    @cached_property
    def floats(self) -> frozenset[torch.dtype]:
        return frozenset(operand.dtype for operand in self.call.floats)

    @property
    def lacks_kernel(self) -> bool:
        """True if no kernel supports the dtype of `mismatched`, whatever the dtypes of the other float operands are.

        False for an operator whose operands autocast promotes: it refuses bfloat16 under float16 autocast, or the
        reverse.
        """
        alone = len(self.floats) < 2 and "autocast" not in self.call.refusal
        return alone or self.mismatched in _without_kernel(self.call)

    @property
    def packed(self) -> bool:
        """True if the call has both float operands and 8-bit integers, which are the packed codes of quantized weights."""
        codes = any(operand.dtype in (torch.uint8, torch.int8) for operand in self.call.operands)
        return codes and bool(self.floats)

    def runs(self, *names: str) -> bool:
        return any(name in self.call.op for name in names)


@dataclass(frozen=True)
class Claim:
    """Decides which broken contracts a rule reports. The file of a rule lists the claims of the rule in `CLAIMS`.

    Attributes:
        stage: the criterion of `takes`, such as the kind of operator. Claims of earlier stages are checked first.
        takes: function that returns whether the rule reports a broken contract.
        headline: message of the findings. In the message, {given} and {expected} stand for dtypes, and {op} for the operator.
            "" if only the rule's `find` creates the findings.
        refused: the kind of refusal, which decides the possible fixes.
        settled: True if the finding depends only on the first call of a group, and not on later calls.
    """

    stage: Stage
    takes: Callable[[Broken], bool]
    headline: str = ""
    refused: Refused = "mixture"
    settled: bool = True


def rule_modules() -> Mapping[str, ModuleType]:
    """Return a dictionary from the code of each rule to its module, in the order of the codes."""
    package = import_module("isotype.rules")
    names = sorted(info.name for info in iter_modules(package.__path__) if info.name.startswith("ist"))
    return {code_of(name): import_module(f"{package.__name__}.{name}") for name in names}


def code_of(module: str) -> str:
    """Return the code of a rule's module, as in `isotype.rules.ist101_operands` -> `IST101`."""
    return module.rpartition(".")[2].split("_", 1)[0].upper()


@cache
def all_claims() -> tuple[tuple[str, Claim], ...]:
    """Return all claims with the codes of their rules, in the order in which they are checked."""
    modules = rule_modules().items()
    claims = [(code, claim) for code, module in modules for claim in getattr(module, "CLAIMS", ())]
    return tuple(sorted(claims, key=lambda claim: get_args(Stage).index(claim[1].stage)))


T = TypeVar("T")


def per_trace(function: Callable[[Trace], T]) -> Callable[[Trace], T]:
    """Return `function` with a cache that stores one result for each trace. The cache does not keep a trace in memory."""
    results: WeakKeyDictionary[Trace, Any] = WeakKeyDictionary()

    @wraps(function)
    def once(trace: Trace) -> T:
        if trace not in results:
            results[trace] = function(trace)
        result: T = results[trace]
        return result

    return once


SCATTERS = ("index_put", "index_add", "index_copy", "scatter", "masked_scatter", "index_reduce")
"""Substrings of the names of operators that write rows into a tensor."""


@dataclass(frozen=True)
class Group:
    """Calls that break a contract and have the same cause.

    Attributes:
        mismatched: the operand with the wrong dtype in the first call.
        causes: origins of the mismatched operands' dtypes without duplicates, in the order of the calls.
        expected: the dtype that `mismatched` should have had.
        side: the dtype of the part of the model that contains the first of these calls.
        refused: the kind of refusal of the first call.
        code: code of the rule that claims the first call; "" for a group that a rule's `find` created.
    """

    calls: tuple[Call, ...]
    mismatched: Operand
    causes: tuple[Origin, ...]
    expected: torch.dtype
    side: torch.dtype
    refused: Refused = "mixture"
    code: str = ""
    headline: str = ""

    @property
    def cause(self) -> Origin:
        return self.causes[0]

    def weights(self, trace: Trace) -> list[Weight]:
        return [trace.owners[cause.name] for cause in self.causes if cause.name in trace.owners]


@per_trace
def groups(trace: Trace) -> tuple[Group, ...]:
    """Return the broken contracts of a trace, grouped by cause, in order of appearance."""
    owners, sides = trace.owners, sides_in(trace)
    by_cause: dict[tuple[str, ...], list[tuple[str, Claim, Broken]]] = {}
    forward: set[tuple[str, str, str]] = set()
    for call in trace.breaches():
        if call.breach is None or call.breach.consequence:
            continue
        place = (call.op, call.module, call.source)
        if call.phase == "forward":
            forward.add(place)
        elif call.recomputed and place in forward:
            continue  # a breach of the forward occurs again in recomputation
        mismatched = mismatched_operand(call, side_at(call, sides), owners)
        broken = Broken(call, mismatched, trace)
        code, claim = next((code, claim) for code, claim in all_claims() if claim.takes(broken))
        if claim.headline:
            # A number that is too large has to be changed in its line, so the tensor's origin does not matter.
            key = (call.source,) if claim.stage == "value" else _key(mismatched.origin.cause, owners)
            by_cause.setdefault(key, []).append((code, claim, broken))
    return tuple(_group(trace, rows) for rows in by_cause.values())


def _group(trace: Trace, rows: Sequence[tuple[str, Claim, Broken]]) -> Group:
    code, claim, first = rows[0]
    calls = tuple(broken.call for _, _, broken in rows)
    causes = distinct(broken.mismatched.origin.cause for _, _, broken in rows)
    expected, side = _expected(calls[0], trace.setup.compute), side_at(calls[0], sides_in(trace))
    side = expected if _wrong_in_batch_norm(calls[0]) else side
    return Group(calls, first.mismatched, causes, expected, side, claim.refused, code, claim.headline)


@per_trace
def sides_in(trace: Trace) -> Sides:
    """Return the `Sides` of a trace. They decide which operand has the wrong dtype."""
    return sides_of(trace.setup, trace.weights, trace.input_dtypes.values())


def side_at(call: Call, sides: Sides) -> torch.dtype:
    # A tensor without dimensions does not change the dtype of other operands.
    deciding = [operand for operand in call.floats if operand.shape] or call.floats
    return sides.at(call.module, [operand.origin.cause for operand in deciding])


def distinct(causes: Iterable[Origin]) -> tuple[Origin, ...]:
    """Return one cause for each source line and name, ignoring layer numbers in names."""
    by_place = grouped(causes, lambda cause: (starred(cause.name), cause.source))
    return tuple(first for first, *_ in by_place.values())


def _wrong_in_batch_norm(call: Call) -> list[Operand]:
    """Return the operands of a batch norm that should be float32, because its other weights or statistics are
    float32.

    The kernels need weights and statistics in the same dtype: the dtype of the input, or float32.
    """
    stored = [operand for operand in call.floats if operand.role in BATCH_NORM_STORED]
    if "batch_norm" not in call.op or len(stored) == len(call.floats):
        return []
    dtypes = {operand.dtype for operand in stored}
    as_input = call.floats[0].dtype in dtypes and torch.float32 not in dtypes
    return [] if as_input else [operand for operand in stored if operand.dtype != torch.float32]


STATISTICS = ("running_mean", "running_var")
BATCH_NORM_STORED = ("weight", "bias", *STATISTICS)


def _expected(call: Call, compute: torch.dtype) -> torch.dtype:
    if _wrong_in_batch_norm(call):
        return torch.float32
    refused = {operand.dtype for operand in call.floats} == {compute}  # a device without this dtype
    return (call.breach and call.breach.converted) or (torch.float32 if refused else compute)


def mismatched_operand(call: Call, side: torch.dtype, owners: Mapping[str, Weight]) -> Operand:
    """Return the operand with the wrong dtype: the first float operand in another dtype than `side`.

    If trained float32 weights of an adapter are combined with a frozen 16-bit weight, return the frozen weight.
    """
    expected = _expected(call, side)
    if wrong := _wrong_in_batch_norm(call):
        return wrong[0]
    floats = _without_kernel(call) or call.floats
    scales = [o for o in floats if o.role in _SCALES and o.dtype != torch.float32]
    if scales and call.op.startswith("bitsandbytes."):
        return scales[0]
    frozen = [o for o in floats if o.dtype.itemsize < 4 and _is_frozen_part(o.origin, owners)]
    if frozen and any(_is_master(operand, owners) for operand in floats):
        return frozen[0]
    if len({operand.dtype for operand in floats}) < 2:
        chosen = [operand for operand in floats if operand.origin.cause.kind != "constant"]
        return (chosen or floats or list(call.operands))[0]
    scratch = [operand for operand in floats if operand.origin.cause.kind == "scratch"]
    if scratch:
        return scratch[0]  # another module that uses the tensor may have another dtype
    foreign = [operand for operand in floats if operand.dtype != side]
    if len(foreign) == len(floats):
        # The trace converts to the dtype of the operands that belong to the model.
        foreign = [operand for operand in foreign if operand.origin.cause.kind in SHARED] or foreign
    foreign = foreign or [operand for operand in floats if operand.dtype != expected]
    # A tensor without dimensions does not change the dtype of other operands.
    foreign = [operand for operand in foreign if operand.shape] or foreign
    # An origin in the model's code explains more than a gradient or a conversion of the trace.
    telling = [o for o in foreign if o.origin.cause.kind not in ("conversion", "gradient", "constant")]
    first = (telling or foreign or floats)[0]
    # Blame the layer's matrix, because the first operand of `addmm` is the bias.
    weights = [o for o in telling if _layer(o) == _layer(first) != ""]
    return max(weights, key=lambda operand: len(operand.shape), default=first)


def _without_kernel(call: Call) -> list[Operand]:
    """Return the float operands with the dtype that the device's error names, as in `not implemented for 'BFloat16'`."""
    lacking = _NO_KERNEL.search(call.refusal)
    named = frozenset(HALVES) if ONLY_WIDE in call.refusal else dtypes_in(lacking)
    return [operand for operand in call.floats if operand.dtype in named]


_NO_KERNEL = re.compile(r"not implemented for '(?!Complex)(\w+)'")
_NAMES = {
    torch.float32: r"float[ -]?32|fp[ -]?32|(?<!b)float(?![ -]?\d)",
    torch.float64: r"double|float[ -]?64|fp[ -]?64",
    torch.float16: r"(?<!b)float[ -]?16|fp[ -]?16|half",
    torch.bfloat16: r"bfloat[ -]?16|bf[ -]?16",
}


def dtypes_in(part: re.Match[str] | None) -> frozenset[torch.dtype]:
    """Return the dtypes that the first group of a match names, such as `float32` or `Half`; none without a match."""
    return frozenset(d for d, name in _NAMES.items() if part and re.search(name, part[1], re.IGNORECASE))


_SCALES = ("absmax", "absmax_code", "code")
"""Operands of bitsandbytes' kernels that are always float32."""


def _layer(operand: Operand) -> str:
    """Return the module's name if an operand is a parameter or a plain tensor of a module; else ""."""
    return operand.origin.name.rpartition(".")[0] if operand.origin.kind in ("parameter", "attribute") else ""


def _is_frozen_part(origin: Origin, owners: Mapping[str, Weight]) -> bool:
    """Return True if `origin` is a frozen tensor of an adapter, such as a shared matrix of VeRA."""
    owner = owners.get(origin.name) if origin.kind in ("parameter", "buffer") else None
    return owner is not None and not owner.trainable and is_adapter(origin.name, owner)


def _is_master(operand: Operand, owners: Mapping[str, Weight]) -> bool:
    """Return True if an operand is float32 and comes from a trained weight or from a cast."""
    trained = any(
        step.kind == "parameter" and step.name in owners and owners[step.name].trainable
        for step in operand.origin.path()
    )
    return operand.dtype == torch.float32 and (trained or operand.origin.cause.kind == "cast")


def _key(cause: Origin, owners: Mapping[str, Weight]) -> tuple[str, ...]:
    if cause.kind == "state":
        return (cause.kind, dtype_name(cause.dtype))
    if cause.kind in ("parameter", "buffer"):
        owner = owners.get(cause.name)
        # One loop may have cast all norms and biases: `if parameter.ndim == 1`.
        vector = owner is not None and not (owner.adapter or owner.buffer) and len(owner.shape) == 1
        kind = "vector" if vector else owner.module_class if owner else ""
        return (cause.kind, dtype_name(cause.dtype), kind)
    if cause.kind == "input":
        return (cause.kind, starred(cause.name))
    return (cause.kind, cause.source, dtype_name(cause.dtype))

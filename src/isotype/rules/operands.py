"""What the rules on broken contracts (IST1xx) share: one cause is one group, whatever it breaks.

A group knows the operand to blame, how its dtype came about, where it surfaces, and what would mend it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch

from isotype.dtypes import dtype_name
from isotype.rules.finding import Action, ActionKind, Finding, Fix
from isotype.trace.record import FLOATS, Breach, Call, Failure, Operand, Origin, Trace, Weight

_SCATTERS = ("index_put", "index_add", "index_copy", "scatter", "masked_scatter", "index_reduce")
_ATTENTION = ("scaled_dot_product", "flash_attn", "_efficient_attention", "_flash_attention")
_NORMS = ("layer_norm", "group_norm", "batch_norm", "rms_norm", "instance_norm")


@dataclass(frozen=True)
class Group:
    """Calls that break a contract for one cause.

    Attributes:
        code: which rule it belongs to: that of the first call.
        calls: in order of execution.
        odd: the operand to blame in the first call.
        causes: who made the dtypes of all odd operands, one for each name or source; the first made the first's.
        expected: the dtype it should have had.
    """

    code: str
    calls: tuple[Call, ...]
    odd: Operand
    causes: tuple[Origin, ...]
    expected: torch.dtype

    @property
    def cause(self) -> Origin:
        """Who made the dtype of the first odd operand."""
        return self.causes[0]


@lru_cache(maxsize=4)
def groups(trace: Trace) -> tuple[Group, ...]:
    """The broken contracts of a trace by cause, in the order in which they surface."""
    owners = trace.owners
    found: dict[tuple[str, ...], list[tuple[str, Call, Operand]]] = {}
    forward: set[tuple[str, str, str]] = set()
    for call in trace.breaches():
        if call.breach is None or call.breach.consequence:
            continue
        here = (call.op, call.module, call.source)
        if call.phase == "forward":
            forward.add(here)
        elif call.recomputed and here in forward:
            continue  # what broke in the forward breaks again when checkpointing recomputes it
        odd = odd_operand(call, trace.setup.compute)
        code = "IST406" if odd.origin.cause.kind == "outside" else code_of(call, owners)
        if code is None or (code == "IST108" and trace.setup.autocast is None):
            code = code and _by_operator(call, owners)
        if code is None:
            continue
        found.setdefault(_key(odd.origin.cause, owners), []).append((code, call, odd))
    return tuple(
        Group(
            broken[0][0],
            tuple(call for _, call, _ in broken),
            broken[0][2],
            _distinct(odd.origin.cause for _, _, odd in broken),
            _expected(broken[0][1], trace.setup.compute),
        )
        for broken in found.values()
    )


def _distinct(causes: Iterable[Origin]) -> tuple[Origin, ...]:
    """One for each name, numbers of layers aside, and source."""
    kept: dict[tuple[str, str], Origin] = {}
    for cause in causes:
        kept.setdefault((starred(cause.name), cause.source), cause)
    return tuple(kept.values())


def _expected(call: Call, compute: torch.dtype) -> torch.dtype:
    converted = call.breach.converted if call.breach is not None else None
    return converted or compute


def odd_operand(call: Call, compute: torch.dtype) -> Operand:
    """The operand to blame: the first float one that is not in the compute dtype."""
    expected = _expected(call, compute)
    floats = [operand for operand in call.operands if operand.dtype in FLOATS]
    if len({operand.dtype for operand in floats}) < 2:
        return (floats or list(call.operands))[0]
    foreign = [operand for operand in floats if operand.dtype != compute]
    foreign = foreign or [operand for operand in floats if operand.dtype != expected]
    # What the model itself did explains more than a gradient or a conversion that came of it.
    telling = [o for o in foreign if o.origin.cause.kind not in ("conversion", "gradient", "constant")]
    return (telling or foreign or floats)[0]


def code_of(call: Call, owners: Mapping[str, Weight]) -> str | None:
    """The rule that a broken contract belongs to; None where a rule of its own judges it (IST3xx, IST4xx)."""
    floats = {operand.dtype for operand in call.operands if operand.dtype in FLOATS}
    if call.phase in ("unscale", "optimizer"):
        return None
    if call.breach is not None and "without overflow" in call.breach.message:
        return "IST802"
    if any(dtype.itemsize == 1 for dtype in floats):
        return "IST109"  # float8 is for storage: no operator promotes it
    if len(floats) < 2 and not _refused_by_autocast(call):
        packed = any(operand.dtype in (torch.uint8, torch.int8) for operand in call.operands)
        return None if packed and floats else "IST109"
    if call.recomputed:
        return "IST107"
    if call.phase == "backward":
        return "IST105"
    return "IST108" if call.phase == "generate" else _by_operator(call, owners)


def _by_operator(call: Call, owners: Mapping[str, Weight]) -> str:
    families = (("IST103", _SCATTERS), ("IST104", _ATTENTION), ("IST106", ("conv",)), ("IST110", _NORMS))
    for code, names in families:
        if any(name in call.op for name in names):
            return code
    adapters = any(
        operand.origin.kind == "parameter" and _is_adapter(operand.origin.name, owners)
        for operand in call.operands
    )
    return "IST102" if adapters else "IST101"


def _refused_by_autocast(call: Call) -> bool:
    """Whether a 16-bit dtype met an autocast to the other one where it promotes (`at::autocast::prioritize`)."""
    return call.breach is not None and "autocast" in call.breach.message


_ADAPTER_NAMES = re.compile(
    r"lora|lokr|loha|dora|adapter|magnitude|prompt|ia3|vera|modules_to_save", re.IGNORECASE
)


def _is_adapter(name: str, owners: Mapping[str, Weight]) -> bool:
    weight = owners.get(name)
    return bool(_ADAPTER_NAMES.search(name)) or (weight is not None and weight.adapter)


def starred(name: str) -> str:
    """A fully qualified name with `*` for the numbers of layers."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def _key(cause: Origin, owners: Mapping[str, Weight]) -> tuple[str, ...]:
    if cause.kind == "state":
        return (cause.kind, dtype_name(cause.dtype))
    if cause.kind in ("parameter", "buffer"):
        owner = owners.get(cause.name)
        leaf = cause.name.rpartition(".")[2] if cause.kind == "parameter" else ""
        return (cause.kind, dtype_name(cause.dtype), owner.module_class if owner else "", leaf)
    if cause.kind == "input":
        return (cause.kind, cause.name)
    return (cause.kind, cause.source, dtype_name(cause.dtype))


# ------------------------------------------------------------------------------------------------------ telling


def short(source: str) -> str:
    """`modeling_llama.py:64`: the file's name is enough for a reader who knows the module."""
    return source.rpartition("/")[2]


def cause_text(cause: Origin, owners: Mapping[str, Weight] | None = None) -> str:
    """What introduced the dtype, in one line."""
    dtype, where = dtype_name(cause.dtype), f" at {short(cause.source)}" if cause.source else ""
    inside = f" in {cause.module}" if cause.module else ""
    weight = (owners or {}).get(cause.name)
    if cause.kind == "parameter":
        pinned = ", which the model's author keeps in float32" if weight is not None and weight.pinned else ""
        return f"{cause.name} is {dtype}{pinned}"
    texts = {
        "buffer": f"the buffer {cause.name} is {dtype}",
        "input": f"the input {cause.name} is {dtype}",
        "outside": f"a tensor that the code keeps outside of the model is {dtype}{where}{inside}",
        "state": f"the quantization state of {cause.name} dequantizes to {dtype}",
        "cast": f"a cast to {dtype}{where}{inside}",
        "autocast": f"autocast returns {dtype} from {cause.name}{where}{inside}",
        "gradient": f"the gradient of {cause.name} is {dtype}",
        "conversion": f"{cause.name}{where}{inside} was given mixed dtypes",
    }
    return texts.get(cause.kind, f"{cause.name} makes {dtype}{where}{inside}")


def evidence(origin: Origin) -> tuple[str, ...]:
    """The way of a dtype from where it was made to the operand, first step first."""
    lines = []
    for step in reversed(origin.way()):
        line = cause_text(step)
        if step.kind == "promotion":
            line = (
                f"{step.name} with another dtype promotes to {dtype_name(step.dtype)} at {short(step.source)}"
            )
            line += f" in {step.module}" if step.module else ""
        lines.append(line)
    return tuple(lines)


def find(trace: Trace, code: str, headline: str) -> Iterator[Finding]:
    """The findings of one code; `headline` may use {odd} and {expected}, names of dtypes, and {op}."""
    owners = trace.owners
    for group in groups(trace):
        if group.code == code:
            yield _finding(trace, group, headline, owners)


def of_failure(trace: Trace, failure: Failure) -> Finding | None:
    """The finding for a check of the model's own code that refused a dtype; None where no tensor at hand is odd."""
    compute = trace.setup.compute
    odd = [o for o in failure.operands if o.dtype != compute and o.origin.cause.kind != "constant"]
    if not odd:
        return None
    owners = trace.owners
    call = Call(
        "",
        failure.phase,
        failure.module,
        failure.source,
        failure.operands,
        (),
        breach=Breach(failure.error, False, None),
    )
    group = Group("IST199", (call,), odd[0], _distinct(o.origin.cause for o in odd), compute)
    return _finding(trace, group, "the model's own code refuses {odd}", owners)


def _finding(trace: Trace, group: Group, headline: str, owners: Mapping[str, Weight]) -> Finding:
    first = group.calls[0]
    assert first.breach is not None
    others = [dtype_name(o.dtype) for o in first.operands if o.dtype in FLOATS and o.dtype != group.odd.dtype]
    places = tuple(dict.fromkeys(call.module for call in group.calls))
    return Finding(
        code=group.code,
        severity="error",
        message=headline.format(
            odd=dtype_name(group.odd.dtype), expected=(others or [dtype_name(group.expected)])[0], op=first.op
        ),
        module=first.module,
        op=first.op,
        phase=first.phase,
        source=first.source,
        cause=cause_text(group.cause, owners),
        evidence=evidence(group.odd.origin),
        notes=_notes(group, places),
        fixes=tuple(candidates(trace, group, owners)),
        operands=first.operands,
        places=places,
    )


def _notes(group: Group, places: Sequence[str]) -> tuple[str, ...]:
    first = group.calls[0]
    assert first.breach is not None
    notes = []
    more = sum(call.repeats for call in group.calls) - 1
    if more:
        where = f" in {len(places)} modules" if len(places) > 1 else ""
        plural = "s" if more > 1 else ""
        notes.append(f"{more} more operator{plural}{where} fail{'' if more > 1 else 's'} for the same cause")
    notes.append(f"the device says: {first.breach.message}")
    if first.breach.assumed:
        notes.append("assumed from the operator's family: not measured on this device")
    return tuple(notes)


# -------------------------------------------------------------------------------------------------------- fixes


def candidates(trace: Trace, group: Group, owners: Mapping[str, Weight]) -> Iterator[Fix]:
    """What may mend a group, in order of preference; a second trace decides."""
    expected = dtype_name(group.expected if group.code == "IST109" else trace.setup.compute)
    names = tuple(dict.fromkeys(starred(cause.name) for cause in group.causes))
    blamed = [owners[cause.name] for cause in group.causes if cause.name in owners]
    if group.cause.kind == "parameter" and blamed:
        yield from _parameter_fixes(blamed, expected)
    if group.cause.kind == "buffer":
        yield _fix(f"cast the buffer {_listed(names)} to {expected}", "unsafe", "buffer", names, expected)
    if group.cause.kind == "state":
        stale = [
            starred(weight.module)
            for weight in trace.weights
            if weight.quantization is not None and weight.quantization.state == group.cause.dtype
        ]
        yield _fix(
            f"let the quantization states dequantize to {expected}", "safe", "state", stale or names, expected
        )
    yield from _hook_fixes(group, expected)
    written = tuple(
        cause.source for cause in group.causes if cause.kind in ("cast", "constant") and cause.source
    )
    if written:
        where = _listed([short(source) for source in dict.fromkeys(written)])
        yield _fix(
            f"write {expected} instead of {dtype_name(group.odd.dtype)} at {where}",
            "safe",
            "line",
            written,
            expected,
        )
    called = tuple(dict.fromkeys(call.source for call in group.calls if call.source))
    if called and len(called) <= 3:
        where = _listed([short(source) for source in called], 3)
        yield _fix(f"cast the operands to {expected} at {where}", "safe", "line", called, expected)
    if trace.setup.autocast is None and trace.setup.compute != torch.float32 and group.code != "IST109":
        yield _fix(f"run the step under autocast to {expected}", "safe", "setting", ("autocast",), expected)


def _fix(
    description: str,
    safety: Literal["safe", "unsafe"],
    kind: ActionKind,
    targets: Iterable[str],
    value: str,
) -> Fix:
    """The same action on each target once."""
    return Fix(
        description, safety, actions=tuple(Action(kind, target, value) for target in dict.fromkeys(targets))
    )


def _parameter_fixes(weights: Sequence[Weight], expected: str) -> Iterator[Fix]:
    modules = [starred(weight.module) for weight in weights]
    names = tuple(dict.fromkeys(starred(weight.name) for weight in weights))
    first = weights[0]
    lossless = all(_keeps_digits(weight, expected) for weight in weights)
    cast = _fix(
        f"cast {_listed(names)} to {expected}", "safe" if lossless else "unsafe", "parameter", names, expected
    )
    if lossless:
        yield cast
    if all(weight.kind == "norm" for weight in weights):
        yield _fix(
            f"return each {first.module_class}'s output in {expected}", "safe", "output", modules, expected
        )
    elif all(modules):
        what = f"each {first.module_class}" if len(modules) > 1 or "*" in modules[0] else modules[0]
        yield _fix(
            f"let {what} cast at its border and compute in {expected}",
            "safe",
            "boundary",
            modules,
            f"compute:{expected}",
        )
    if not lossless:
        yield cast


def _keeps_digits(weight: Weight, expected: str) -> bool:
    """Whether casting a frozen weight loses nothing: to a wider dtype, or values that the narrow one holds."""
    if weight.trainable or weight.pinned:
        return False
    if expected == "float32" and weight.dtype.itemsize < 4:
        return True
    return weight.holds is not None and dtype_name(weight.holds) == expected


def _hook_fixes(group: Group, expected: str) -> Iterator[Fix]:
    made_in = [step.module for step in group.odd.origin.way() if step.module and step.kind != "conversion"]
    made_in += [cause.module for cause in group.causes if cause.module]
    makers = tuple(dict.fromkeys(map(starred, made_in)))
    for targets in (*([makers] if len(makers) > 1 else []), *((module,) for module in makers)):
        yield _fix(
            f"return the outputs of {_listed(targets)} in {expected}", "safe", "output", targets, expected
        )
    if group.cause.kind == "input":
        yield _fix(f"give the model {group.cause.name} in {expected}", "safe", "input", ("",), expected)
    places = [starred(call.module) for call in group.calls]
    yield _fix(
        f"take the inputs of {_listed(dict.fromkeys(places))} in {expected}",
        "safe",
        "input",
        places,
        expected,
    )


def _listed(names: Iterable[str], shown: int = 2) -> str:
    names = [name or "the model" for name in names]
    rest = len(names) - shown
    return ", ".join(names[:shown]) + (f" and {rest} more" if rest > 0 else "")

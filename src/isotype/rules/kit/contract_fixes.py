"""Possible fixes of a broken contract: casts of weights, buffers, inputs and outputs, other lines, autocast."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

import torch

from isotype.core.dtypes import dtype_name
from isotype.core.names import distinct_names, grouped, listed, short, starred
from isotype.records.finding import Fix
from isotype.records.trace import FLOATS, Call, Operand, Trace, Weight
from isotype.rules.kit.groups import SCATTERS, Group, per_trace
from isotype.rules.kit.words import fix


def candidates(trace: Trace, group: Group, owners: Mapping[str, Weight]) -> Iterator[Fix]:
    """Yield possible fixes of a group; a second trace decides."""
    expected = dtype_name(_wanted(group))
    names = weights_meant(trace, (cause.name for cause in group.causes))
    blamed = [owners[cause.name] for cause in group.causes if cause.name in owners]
    yield from _adapter_fixes(trace, group, owners)
    if group.cause.kind == "parameter" and blamed:
        yield from _parameter_fixes(trace, blamed, expected)
    if group.cause.kind in ("buffer", "attribute"):
        what = "the buffer" if group.cause.kind == "buffer" else "the unregistered tensor"
        safety: Literal["safe", "unsafe"] = (
            "safe" if blamed and all(_keeps_digits(weight, expected) for weight in blamed) else "unsafe"
        )
        yield fix(f"cast {what} {listed(names, 2)} to {expected}", "buffer", names, expected, safety)
        beside = tuple(name for name in _beside(trace, group) if name not in names)
        if beside:
            every = (*names, *beside)
            yield fix(f"cast {what}s {listed(every, 2)} to {expected}", "buffer", every, expected, "unsafe")
    if group.cause.kind == "state":
        stale = [
            starred(weight.module)
            for weight in trace.weights
            if weight.quantization is not None and weight.quantization.state == group.cause.dtype
        ]
        yield fix(f"let the quantization states dequantize to {expected}", "state", stale or names, expected)
    yield from _hook_fixes(trace, group, expected)
    written = tuple(
        cause.source for cause in group.causes if cause.kind in ("cast", "constant") and cause.source
    )
    if written:
        where = listed(map(short, dict.fromkeys(written)), 2)
        yield fix(
            f"write {expected} instead of {dtype_name(group.mismatched.dtype)} at {where}",
            "line",
            written,
            expected,
        )
    if trace.setup.autocast is None and expected in ("bfloat16", "float16") and group.refused != "dtype":
        yield fix(f"run the step under autocast to {expected}", "setting", ("autocast",), expected)
    called = tuple(dict.fromkeys(call.source for call in group.calls if call.source))
    yield from _call_fixes(group, called, expected)


def _beside(trace: Trace, group: Group) -> Iterator[str]:
    """Yield buffers and plain tensors beside the mismatched ones in the same dtype: a scale and its zero point."""
    homes = {cause.name.rpartition(".")[0] for cause in group.causes}
    dtypes = {weight.name: weight.dtype for weight in trace.weights if weight.buffer}
    for operand in (operand for call in trace.calls for operand in call.operands):
        if operand.origin.cause.kind == "attribute":
            dtypes[operand.origin.cause.name] = operand.origin.cause.dtype
    for name, dtype in dtypes.items():
        if name.rpartition(".")[0] in homes and dtype == group.cause.dtype:
            yield starred(name)


def _call_fixes(group: Group, called: Sequence[str], expected: str) -> Iterator[Fix]:
    if called and len(called) <= 3:
        where = listed(map(short, called))
        into = _written_into(group)
        what = f"the operands to {expected}" if into is None else f"what is written to {into}"
        yield fix(f"cast {what} at {where}", "line", called, into or expected)


def _written_into(group: Group) -> str | None:
    """Return the dtype that all calls of a group write into, which casts at the line do not change."""
    writes = any(name in group.calls[0].op for name in SCATTERS) or _in_place(group.calls[0].op)
    dtypes = {call.operands[0].dtype for call in group.calls if call.operands}
    return dtype_name(dtypes.pop()) if writes and len(dtypes) == 1 else None


def _in_place(op: str) -> bool:
    """Return whether an overload's name (`aten.lerp_.Scalar`) means that it writes into its first operand."""
    name = op.split(".")[1] if op.count(".") > 1 else ""
    return name.endswith("_") and not name.endswith("__")


def _wanted(group: Group) -> torch.dtype:
    """Return the dtype for the mismatched operand: that of its side, or the other operands' if it has that
    already.
    """
    if group.refused != "mixture":
        return group.expected
    if group.mismatched.dtype != group.side:
        return group.side
    met = (o.dtype for o in group.calls[0].operands if o.dtype in FLOATS and o.dtype != group.side)
    return next(met, group.side)


def _adapter_fixes(trace: Trace, group: Group, owners: Mapping[str, Weight]) -> Iterator[Fix]:
    """Yield fixes of the few trained adapters in another dtype than most."""
    counts: Counter[torch.dtype] = Counter()
    for weight in trace.weights:
        if weight.adapter and weight.trainable and weight.dtype in FLOATS:
            counts[weight.dtype] += weight.repeats
    most = max(counts, key=lambda dtype: counts[dtype], default=None)
    if most is None or 2 * counts[most] <= counts.total():
        return
    steps = (step for call in group.calls for operand in call.operands for step in operand.origin.path())
    met = {step.name for step in steps if step.kind == "parameter"}
    layers = {
        _adapted(owners[name].module, trace.modules)
        for name in met
        if name in owners and owners[name].adapter
    }
    beside = [
        weight
        for weight in trace.weights
        if weight.adapter and weight.trainable and weight.dtype in FLOATS and weight.dtype != most
        and _adapted(weight.module, trace.modules) in layers
    ]  # fmt: skip
    # PEFT's cast to an adapter's dtype hides which of its weights caused it.
    few = [weight for weight in beside if weight.name in met] or beside
    if not few:
        return
    value, names = dtype_name(most), distinct_names(weight.name for weight in few)
    exact = all(weight.dtype.itemsize < most.itemsize or weight.exact_in == most for weight in few)
    what = f"cast {listed(names, 2)} to {value}, the dtype of the other adapters"
    yield fix(what, "parameter", names, value, "safe" if exact else "unsafe")


def _adapted(module: str, modules: Mapping[str, str]) -> str:
    """Return the layer to which the adapter `module` belongs: the parent with the base layer, else the direct
    parent.
    """
    parts = module.split(".")
    around = (".".join(parts[:end]) for end in range(len(parts) - 1, 0, -1))
    return next((name for name in around if f"{name}.base_layer" in modules), module.rpartition(".")[0])


def _parameter_fixes(trace: Trace, blamed: Sequence[Weight], expected: str) -> Iterator[Fix]:
    # A layer's weight and bias belong together: with only one of them cast it accepts no dtype.
    beside = {(weight.module, weight.dtype) for weight in blamed if weight.module}
    others = (w for w in trace.weights if (w.module, w.dtype) in beside and not w.buffer)
    weights = list({weight.name: weight for weight in (*blamed, *others)}.values())
    names = weights_meant(trace, (weight.name for weight in weights))
    modules = tuple(dict.fromkeys(name.rpartition(".")[0] for name in names))
    first = weights[0]
    lossless = all(_keeps_digits(weight, expected) for weight in weights)
    cast = fix(
        f"cast {listed(names, 2)} to {expected}",
        "parameter",
        names,
        expected,
        "safe" if lossless else "unsafe",
    )
    if lossless:
        yield cast
    if all(weight.kind == "norm" for weight in weights):
        yield fix(f"return each {first.module_class}'s output in {expected}", "output", modules, expected)
    elif all(modules):
        what = listed(modules, 2)
        if (len(modules) > 1 or "*" in what) and len({weight.module_class for weight in weights}) == 1:
            what = f"each {first.module_class} of {what}"
        yield fix(
            f"let {what} cast at its border and compute in {expected}",
            "boundary",
            modules,
            f"compute:{expected}",
        )
    if not lossless:
        yield cast


def _keeps_digits(weight: Weight, expected: str) -> bool:
    """Return whether casting a frozen weight loses nothing: to a wider dtype, or exactly representable values."""
    if weight.trainable or weight.pinned:
        return False
    if expected == "float32" and weight.dtype.itemsize < 4:
        return True
    return weight.exact_in is not None and dtype_name(weight.exact_in) == expected


def _hook_fixes(trace: Trace, group: Group, expected: str) -> Iterator[Fix]:
    owners = trace.owners
    made_in = [
        step.module for step in group.mismatched.origin.path() if step.module and step.kind != "conversion"
    ]
    made_in += [cause.module for cause in group.causes if cause.module]
    # A layer's output has the dtype of its weight; for norms see `_parameter_fixes`.
    blamed = [owners[cause.name] for cause in group.causes if cause.name in owners]
    meant = weights_meant(trace, (weight.name for weight in blamed))
    # If one layer of many has another dtype, only its consequences are meant.
    alone = len(meant) == 1 and "*" not in meant[0]
    made_in = made_in if alone else list(map(starred, made_in))
    if not _is_own(group.mismatched, group.calls[0]):
        flow = [w.name for w in blamed if w.module and not w.buffer and w.kind != "norm"]
        made_in += [name.rpartition(".")[0] for name in weights_meant(trace, flow)]
    makers = tuple(dict.fromkeys(made_in))
    for targets in (*([makers] if len(makers) > 1 else []), *((module,) for module in makers)):
        yield fix(f"return the outputs of {listed(targets, 2)} in {expected}", "output", targets, expected)
    if group.cause.kind == "input":
        yield fix(f"give the model {group.cause.name} in {expected}", "input", ("",), expected)
    # The whole model's input is handled above if it is the cause; a loss's operations come after it.
    called = [call.module for call in group.calls if call.module and not _is_own(group.mismatched, call)]
    places = modules_meant(trace, called)
    if places:
        yield fix(f"take the inputs of {listed(places, 2)} in {expected}", "input", places, expected)


def _is_own(mismatched: Operand, call: Call) -> bool:
    """Return whether an operand is a parameter, buffer or plain tensor of the calling module itself."""
    stored = mismatched.origin.kind in ("parameter", "buffer", "attribute")
    return stored and mismatched.origin.name.rpartition(".")[0] == call.module


@per_trace
def _weights(trace: Trace) -> Mapping[str, list[Weight]]:
    return grouped(trace.weights, lambda weight: starred(weight.name))


@per_trace
def _modules(trace: Trace) -> Mapping[tuple[str, str], set[str]]:
    modules: dict[tuple[str, str], set[str]] = {}
    for name, kind in trace.modules.items():
        modules.setdefault((starred(name), kind), set()).add(name)
    return modules


def weights_meant(trace: Trace, names: Iterable[str]) -> tuple[str, ...]:
    """Return weights with their numbered siblings of the same dtype: with `*` if all siblings have it, else
    by name.

    A folded layer represents others of unknown names: these are written with `*`.
    """

    def each(name: str) -> Iterator[str]:
        weight = trace.owners.get(name)
        siblings = _weights(trace).get(starred(name), [])
        alike = [other for other in siblings if weight is not None and other.dtype == weight.dtype]
        if weight is None or len(alike) == len(siblings) or any(other.repeats > 1 for other in alike):
            yield starred(name)
        else:
            yield from (other.name for other in alike)

    return tuple(dict.fromkeys(meant for name in names for meant in each(name)))


def modules_meant(trace: Trace, modules: Iterable[str]) -> tuple[str, ...]:
    """Return modules with `*` for layer numbers if all siblings of the class are included, else by name.

    In a step that ended early, or a folded model, the other modules are unknown, so `*` is used.
    """
    names = tuple(dict.fromkeys(modules))
    unknown = trace.failure is not None or any(weight.repeats > 1 for weight in trace.weights)

    def each(name: str) -> str:
        siblings = _modules(trace).get((starred(name), trace.modules.get(name, "")), set())
        return starred(name) if unknown or siblings <= set(names) else name

    return tuple(dict.fromkeys(map(each, names)))

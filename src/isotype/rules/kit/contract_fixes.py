"""Possible fixes of wrong operand dtypes: casts of weights, buffers, inputs or outputs, changed lines, and autocast."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from isotype.core.dtypes import FLOATS, HALVES, dtype_name
from isotype.core.names import distinct_names, grouped, in_module, listed, short, starred, with_parents
from isotype.records.finding import Fix, in_library
from isotype.records.trace import Call, Operand, Origin, Trace, Weight
from isotype.rules.kit.findings import actions, advice, fix
from isotype.rules.kit.groups import SCATTERS, STATISTICS, Group, per_trace
from isotype.rules.kit.weight_sets import count, main_dtype, quantized, statistics_of, trained


def candidates(trace: Trace, group: Group) -> Iterator[Fix]:
    """Yield the possible fixes of a group of broken contracts. Further traces verify them."""
    expected = dtype_name(_wanted(group))
    names = weights_meant(trace, (cause.name for cause in group.causes))
    blamed = group.weights(trace)
    yield from _adapter_fixes(trace, group)
    if group.mismatched.dtype == _wanted(group):
        return  # a number is refused, not a dtype
    if group.cause.kind == "parameter" and blamed and _decide(group, {w.module for w in blamed}):
        yield from _parameter_fixes(trace, group, blamed, expected)
    if group.cause.kind in ("buffer", "attribute"):
        what = "the buffer" if group.cause.kind == "buffer" else "the unregistered tensor"
        exact = bool(blamed) and all(_keeps_digits(weight, expected) for weight in blamed)
        yield fix(f"cast {what} {listed(names, 2)} to {expected}", "buffer", names, expected, exact)
        together = tuple(dict.fromkeys((*names, *_neighbours(trace, group))))
        if len(together) > len(names):
            text = f"cast {what}s {listed(together, 2)} to {expected}"
            widens = expected == "float32" and group.cause.dtype in HALVES
            yield fix(text, "buffer", together, expected, safe=widens)
    if group.cause.kind == "state":
        stale = [starred(w.module) for w, state in quantized(trace) if state.state == group.cause.dtype]
        yield fix(
            f"set the dtype of the quantization states to {expected}", "state", stale or names, expected
        )
    if group.mismatched.dtype == torch.float32 and (own := _combined(trace, group)):
        yield from _parameter_fixes(trace, group, own, "float32")
    yield from _hook_fixes(trace, group, expected)
    written = tuple(c.source for c in group.causes if c.kind in ("cast", "constant") and c.source)
    if written:
        where = listed(map(short, dict.fromkeys(written)), 2)
        text = f"write {expected} instead of {dtype_name(group.mismatched.dtype)} at {where}"
        yield fix(text, "line", written, expected)
    low = expected if group.refused != "dtype" else ""
    if group.refused == "dtype" and in_library(group.calls[0].source):
        # Autocast computes many operators without a 16-bit kernel in float32.
        low = dtype_name(group.mismatched.dtype)
    if trace.setup.autocast is None and low in ("bfloat16", "float16"):
        yield fix(f"run the step under autocast to {low}", "setting", ("autocast",), low)
    called = tuple(dict.fromkeys(call.source for call in group.calls if call.source))
    to_cast = [
        (call, operand) for call in group.calls for operand in call.floats if operand.dtype != _wanted(group)
    ]
    stored = any(_is_stored(trace, call, operand) for call, operand in to_cast)
    if called and not stored and (len(called) <= 3 or group.refused == "dtype"):
        into = _written_into(group)
        what = f"the operands to {expected}" if into is None else f"the tensor that is written to {into}"
        back = group.refused == "dtype" and group.mismatched.dtype in HALVES
        back = back and not any(name in group.calls[0].op for name in _OTHER_RESULTS)
        after = ", and the result back" if back else ""
        yield fix(f"cast {what} at {listed(map(short, called), 3)}{after}", "line", called, into or expected)


def _is_stored(trace: Trace, call: Call, operand: Operand) -> bool:
    """Return True if a cast at the call's line cannot cast the operand, because a norm of torch reads its own weight
    there.

    The statistics of a batch norm also count, because the call would update copies of them.
    """
    of_norm = "norm" in call.op and hasattr(torch.nn, trace.modules.get(call.module, ""))
    return (of_norm and _is_own(operand, call)) or operand.role in STATISTICS


def _combined(trace: Trace, group: Group) -> list[Weight]:
    """Return a module's 16-bit weights that its code combines with tensors cast to float32, as in `linear(x.float(), self.weight)`."""
    by_code = (c for c in group.calls if group.cause.kind == "cast" and c.module == group.cause.module)
    own = (o.origin.name for call in by_code for o in call.floats if o.dtype in HALVES and _is_own(o, call))
    return [trace.owners[name] for name in dict.fromkeys(own) if name in trace.owners]


_OTHER_RESULTS = ("fft", "numpy")
"""Words in the names of functions that return complex numbers or arrays. A cast to 16 bits would discard the
imaginary parts, and an array has no such cast."""


def _neighbours(trace: Trace, group: Group) -> Iterator[str]:
    """Yield the buffers and plain tensors that have the same module and the same dtype as a mismatched tensor."""
    homes = {cause.name.rpartition(".")[0] for cause in group.causes}
    dtypes = {weight.name: weight.dtype for weight in trace.weights if weight.buffer}
    for operand in (operand for call in trace.calls for operand in call.operands):
        if operand.origin.cause.kind == "attribute":
            dtypes[operand.origin.cause.name] = operand.origin.cause.dtype
    for name, dtype in dtypes.items():
        if name.rpartition(".")[0] in homes and dtype == group.cause.dtype:
            yield starred(name)


def _written_into(group: Group) -> str | None:
    """Return the dtype of the tensors that the calls of the group write into; None without such tensors, or if their dtypes differ."""
    op = group.calls[0].op
    name = op.split(".")[1] if op.count(".") > 1 else ""
    in_place = name.endswith("_") and not name.endswith("__")  # `aten.lerp_.Scalar`
    dtypes = {call.operands[0].dtype for call in group.calls if call.operands}
    writes = in_place or any(scatter in op for scatter in SCATTERS)
    return dtype_name(dtypes.pop()) if writes and len(dtypes) == 1 else None


def _wanted(group: Group) -> torch.dtype:
    if group.refused != "mixture":
        return group.expected
    if group.mismatched.dtype != group.side:
        return group.side
    return next((o.dtype for o in group.calls[0].floats if o.dtype != group.side), group.side)


def _adapter_fixes(trace: Trace, group: Group) -> Iterator[Fix]:
    """Yield a fix that casts trained adapters of other dtypes to the most common dtype of the adapters."""
    adapters = [weight for weight in trained(trace) if weight.adapter and weight.dtype in FLOATS]
    most = main_dtype(adapters, lambda weight: weight.repeats)
    if most is None or 2 * count(w for w in adapters if w.dtype == most) <= count(adapters):
        return
    steps = (step for call in group.calls for operand in call.operands for step in operand.origin.path())
    used = {step.name for step in steps if step.kind == "parameter" and step.name in trace.owners}
    sources = (trace.owners[name] for name in used)
    layers = {_adapted(weight.module, trace.modules) for weight in sources if weight.adapter}
    others = (weight for weight in adapters if weight.dtype != most)
    in_layers = [weight for weight in others if _adapted(weight.module, trace.modules) in layers]
    # If PEFT casts to an adapter's dtype, the operands' origins do not contain the adapter's weight.
    few = [weight for weight in in_layers if weight.name in used] or in_layers
    if not few:
        return
    value, names = dtype_name(most), distinct_names(weight.name for weight in few)
    exact = all(weight.dtype.itemsize < most.itemsize or weight.exact_in == most for weight in few)
    what = f"cast {listed(names, 2)} to {value}, the dtype of the other adapters"
    yield fix(what, "parameter", names, value, exact)


def _adapted(module: str, modules: Mapping[str, str]) -> str:
    """Return the layer that the adapter `module` adapts: its nearest parent with a `base_layer`, or else its direct parent."""
    _, *around = with_parents(module)
    return next((name for name in around if f"{name}.base_layer" in modules), module.rpartition(".")[0])


def _parameter_fixes(trace: Trace, group: Group, blamed: Sequence[Weight], expected: str) -> Iterator[Fix]:
    # A layer's weight and bias belong together. If only one is cast, the layer accepts no dtype.
    places = {(weight.module, weight.dtype) for weight in blamed if weight.module}
    others = (w for w in trace.weights if (w.module, w.dtype) in places and not w.buffer)
    weights = list({weight.name: weight for weight in (*blamed, *others)}.values())
    names = weights_meant(trace, (weight.name for weight in weights))
    modules = tuple(dict.fromkeys(name.rpartition(".")[0] for name in names))
    first = weights[0]
    statistics = [s for s in statistics_of(trace, weights) if dtype_name(s.dtype) != expected]
    lossless = all(_keeps_digits(weight, expected) for weight in (*weights, *statistics))
    buffers = weights_meant(trace, (weight.name for weight in statistics))
    changes = *actions("parameter", names, expected), *actions("buffer", buffers, expected)
    cast = Fix(
        f"cast {listed((*names, *buffers), 2)} to {expected}",
        "safe" if lossless else "unsafe",
        actions=changes,
    )
    if lossless:
        yield cast
    if all(weight.kind == "norm" for weight in weights):
        yield fix(f"return each {first.module_class}'s output in {expected}", "output", modules, expected)
    elif any(weight.module_class.startswith("Parameter") for weight in weights):
        pass  # a ParameterDict or ParameterList has no forward that could cast
    elif all(modules) and (group.refused != "dtype" or _runs_in(group, modules)):
        norms = {starred(weight.module) for weight in weights if weight.kind == "norm"}
        norms -= {starred(call.module) for call in group.calls}  # norms that accept these dtypes
        inside = [module for module in modules if starred(module) not in norms]
        what = listed(inside, 2)
        classes = {weight.module_class for weight in weights if starred(weight.module) not in norms}
        if (len(inside) > 1 or "*" in what) and len(classes) == 1:
            what = f"each {classes.pop()} of {what}"
        its = "their" if len(inside) > 1 and not what.startswith("each") else "its"
        text = f"let {what} compute in {expected} and cast {its} inputs and outputs"
        compute = actions("boundary", inside, f"compute:{expected}")
        if norms:
            text += f", and return each norm's output in {expected}"
        outputs = actions("output", [module for module in modules if module not in inside], expected)
        yield Fix(text, "safe", actions=(*compute, *outputs))
    if not lossless:
        yield cast


def _runs_in(group: Group, modules: Sequence[str]) -> bool:
    """Return True if one of `modules` runs a call of the group. If no module does, a cast in `modules` fixes nothing."""
    return any(call.module and starred(call.module) in map(starred, modules) for call in group.calls)


def _keeps_digits(weight: Weight, expected: str) -> bool:
    """Return True if a weight is frozen, is not pinned to float32, and keeps all values in a cast to `expected`."""
    if weight.trainable or weight.pinned:
        return False
    if expected == "float32" and weight.dtype.itemsize < 4:
        return True
    return weight.exact_in is not None and dtype_name(weight.exact_in) == expected


def _hook_fixes(trace: Trace, group: Group, expected: str) -> Iterator[Fix]:
    steps = group.mismatched.origin.path()
    makers = [step.module for step in steps if step.module and step.kind != "conversion"]
    makers += [cause.module for cause in group.causes if cause.module]
    # A layer's output has the dtype of its weight; for norms see `_parameter_fixes`.
    blamed = group.weights(trace)
    meant = weights_meant(trace, (weight.name for weight in blamed))
    # If a single layer has another dtype, the fixes name only this layer.
    alone = len(meant) == 1 and "*" not in meant[0]
    makers = makers if alone else list(map(starred, makers))
    if not _is_own(group.mismatched, group.calls[0]):
        flow = [w.name for w in blamed if w.module and not w.buffer and w.kind != "norm"]
        makers += [name.rpartition(".")[0] for name in weights_meant(trace, flow)]
    # A cast of a module's inputs or outputs changes no dtype that the module's own code chooses.
    kinds = "autocast", "cast", "constant", "operator"
    by_code = {cause.module for cause in group.causes if cause.kind in kinds}
    chosen = {trace.modules.get(call.module) for call in group.calls if call.module in by_code}
    abroad = [call for call in group.calls if trace.modules.get(call.module) not in chosen]
    makers = [module for module in dict.fromkeys(makers) if abroad and _leads_to(trace, module, group)]
    owner, layers, _ = group.cause.name.partition(".layers[")
    if group.cause.kind == "input" and layers:  # no fix can cast the tensors of a cache
        yield advice(owner, f"create {owner} in {expected}")
        return
    for targets in (*([makers] if len(makers) > 1 else []), *([module] for module in makers)):
        if _decide(group, targets):
            yield fix(f"cast the outputs of {listed(targets, 2)} to {expected}", "output", targets, expected)
    if group.cause.kind == "input":
        others = [name for name, dtype in trace.input_dtypes.items() if dtype_name(dtype) != expected]
        names = dict.fromkeys((group.cause.name, *others))
        # If a matrix is cast, vectors (timesteps, lengths) keep their dtype: see `preflight.apply._cast_input`.
        matrices = [name for name in names if len(trace.setup.batch.get(name, (0, 0))) > 1]
        inputs = listed(matrices or names, 8)
        yield fix(f"pass {inputs} to the model in {expected}", "input", ("",), expected)
    # An operator of the loss has no module whose inputs a fix could cast.
    called = [call.module for call in abroad if call.module and not _is_own(group.mismatched, call)]
    places = modules_meant(trace, called)
    if places:
        yield fix(f"cast the inputs of {listed(places, 2)} to {expected}", "input", places, expected)


def _leads_to(trace: Trace, module: str, group: Group) -> bool:
    """Return True if `module` runs, and a call of the group is outside of `module`. The call may then use the output of `module`."""
    outside = (not in_module(starred(call.module), module) for call in group.calls)
    return starred(module) in _running(trace) and ("*" in module or any(outside))


@per_trace
def _running(trace: Trace) -> set[str]:
    modules = {starred(call.module) for call in trace.calls}
    return {name for module in modules for name in with_parents(module)}


def _decide(group: Group, modules: Iterable[str]) -> bool:
    """Return True if `modules` decide the dtype of all operands that have no kernel, or if the operands mix dtypes."""
    if group.refused != "dtype":
        return True
    names = set(map(starred, modules))
    refused = (operand for operand in group.calls[0].floats if operand.dtype == group.mismatched.dtype)
    paths = (operand.origin.path() for operand in refused)
    return all(any(_home(step) in names for step in path) for path in paths)


def _home(step: Origin) -> str | None:
    """Return the module that chose a dtype, or that has the weight with this dtype; None outside of the model."""
    if step.kind in ("parameter", "buffer"):
        return starred(step.name.rpartition(".")[0])
    return None if step.kind in ("data", "input", "outside") else starred(step.module)


def _is_own(mismatched: Operand, call: Call) -> bool:
    stored = mismatched.origin.kind in ("parameter", "buffer", "attribute")
    return stored and mismatched.origin.name.rpartition(".")[0] == call.module


@per_trace
def _weights(trace: Trace) -> Mapping[str, list[Weight]]:
    return grouped(trace.weights, lambda weight: starred(weight.name))


@per_trace
def _modules(trace: Trace) -> Mapping[tuple[str, str], list[str]]:
    return grouped(trace.modules, lambda name: (starred(name), trace.modules[name]))


def weights_meant(trace: Trace, names: Iterable[str]) -> tuple[str, ...]:
    """Add the weights with the same name and dtype in other layers. If all layers have them, `*` replaces the layer number."""

    def written(name: str) -> Iterator[str]:
        weight = trace.owners.get(name)
        siblings = _weights(trace).get(starred(name), [])
        alike = [other for other in siblings if weight is not None and other.dtype == weight.dtype]
        if weight is None or len(alike) == len(siblings) or any(other.repeats > 1 for other in alike):
            yield starred(name)
        else:
            yield from (other.name for other in alike)

    return tuple(dict.fromkeys(text for name in names for text in written(name)))


def modules_meant(trace: Trace, modules: Iterable[str]) -> tuple[str, ...]:
    """Return module names. If `modules` contains this module of every traced layer, `*` replaces the layer number."""
    names = dict.fromkeys(modules)
    unknown = trace.failure is not None or any(weight.repeats > 1 for weight in trace.weights)

    def written(name: str) -> str:
        siblings = _modules(trace).get((starred(name), trace.modules.get(name, "")), [])
        return starred(name) if unknown or names.keys() >= set(siblings) else name

    return tuple(dict.fromkeys(map(written, names)))

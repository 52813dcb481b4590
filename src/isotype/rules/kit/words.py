"""Phrases for names, places and causes in findings."""

from collections.abc import Iterable, Mapping

from isotype.core.dtypes import dtype_name
from isotype.core.names import distinct_names, plural, short
from isotype.records.trace import FROM_NUMPY, Call, Origin, Weight

TRANSFORMERS = "/transformers/models/"
LIBRARIES = (TRANSFORMERS, "/diffusers/")
"""Folders with the code of transformers and diffusers. Many trainings run this code successfully, so findings about it would be false alarms."""


def cause_text(cause: Origin, owners: Mapping[str, Weight] | None = None) -> str:
    """Describe the origin of a dtype in one line."""
    dtype, where = dtype_name(cause.dtype), at(cause.source)
    inside = f" in {cause.module}" if cause.module else ""
    weight = (owners or {}).get(cause.name)
    if cause.kind == "state":
        packed = (owners or {}).get(f"{cause.name}.weight")
        line = "" if packed is None else packed.by_line
        return f"the quantization state of {cause.name} dequantizes to {dtype}{line}"
    if weight is not None and weight.dtype == cause.dtype and cause.kind in ("parameter", "buffer"):
        return f"{'the buffer ' if weight.buffer else ''}{weight.dtype_text}"
    if cause.kind == "parameter":
        return f"{cause.name} is {dtype}"
    if cause.name == FROM_NUMPY:
        return f"{cause.name} is {dtype}, first used{where}{inside}"
    texts = {
        "buffer": f"the buffer {cause.name} is {dtype}",
        "input": f"the {'argument' if cause.name in ('input', 'inputs') else 'input'} {cause.name} is {dtype}",
        "outside": f"{cause.name} is {dtype}{where}{inside}",
        "scratch": f"the scratch tensor that {cause.name} allocated is {dtype}{where}",
        "attribute": f"{cause.name}, an unregistered tensor that model.to() does not cast, is {dtype}",
        "data": f"{cause.name or 'a tensor'} in the loss function is {dtype}{where}",
        "cast": f"a cast to {dtype}{where}{inside}",
        "autocast": f"autocast returns {dtype} from {cause.name}{where}{inside}",
        "gradient": f"the gradient of {cause.name} is {dtype}",
        "conversion": f"{cause.name}{where}{inside} gets operands of several dtypes",
    }
    return texts.get(cause.kind, f"{cause.name} returns {dtype}{where}{inside}")


def evidence(origin: Origin) -> tuple[str, ...]:
    """Return a line for each step on a dtype's path from its origin to the operand."""
    lines = []
    for step in reversed(origin.path()):
        line = cause_text(step)
        where = f" at {short(step.source)}" + (f" in {step.module}" if step.module else "")
        if step.like is not None:
            line = f"{step.name} takes that dtype{where}"
        elif step.kind == "promotion":
            line = f"{step.name} with an operand of another dtype returns {dtype_name(step.dtype)}{where}"
        lines.append(line)
    return tuple(lines)


def device_error(message: str) -> tuple[str, ...]:
    """Return a note with the error that the device raises; () for an empty message."""
    return (f"the device raises: {message}",) if message else ()


def at(source: str) -> str:
    """Return ` at modeling_llama.py:64` for a source line, and "" without a line."""
    return f" at {short(source)}" if source else ""


ANGLES = frozenset({"sin", "cos"})
"""Operators whose `Call.off` is the error of an angle."""
COUNTS = frozenset({"arange", "_to_copy"})
"""Operators whose `Call.off` is the error of integers."""


def op_name(call: Call) -> str:
    """Return `mm` for the operator `aten.mm.default`; "" for an operator of another library than torch."""
    return call.op.split(".")[1] if call.op.startswith("aten.") else ""


def place(call: Call) -> str:
    """Return the line that makes a call, or the module if the line is unknown."""
    return call.source or call.module


def more(count: int, noun: str, then: str = "") -> tuple[str, ...]:
    """Return a note about the number of further places, such as `3 more casts`; () if there are none."""
    return (f"{plural(count, f'more {noun}')}{then}",) if count else ()


def and_others(names: Iterable[str]) -> str:
    """Return the first name with `*` for layer numbers, and "and others" if there are more names."""
    first, *others = distinct_names(names)
    return f"{first} and others" if others else first

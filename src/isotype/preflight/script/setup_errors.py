"""Explains errors while a script loads, moves or quantizes a model, adds an adapter, or builds a trainer."""

from __future__ import annotations

import re
from traceback import walk_tb

from torch import nn

from isotype.core.dtypes import dtype_name
from isotype.core.names import agree, base_name
from isotype.core.source import line_of
from isotype.core.tables import table
from isotype.preflight.script.outside import Outside

_KNOWN: list[dict[str, str]] = table(__file__)
"""(Pattern of an error, kind of the weights in its cause ("codes", "meta" or ""), cause, help)."""


def explained(error: BaseException) -> Outside | None:
    """Return cause and help of a known error; None for other errors."""
    for known in _KNOWN:
        match = re.search(known["error"], str(error), re.DOTALL)
        words = None if match is None else _weight_words(error, known["weights"])
        if match is not None and words is not None:
            cause, how = (known[part].format(**match.groupdict(), **words) for part in ("cause", "help"))
            return Outside(line_of(error), (), how, cause)
    return None


def _weight_words(error: BaseException, kind: str) -> dict[str, str] | None:
    """Return name, dtype and count of the weights of a kind, in the largest model in the traceback's variables.

    Returns {} for the kind "", and None if the model has no such weight.
    """
    if not kind:
        return {}
    variables = [value for frame, _ in walk_tb(error.__traceback__) for value in frame.f_locals.values()]
    modules = [value for value in variables if isinstance(value, nn.Module)]
    model = max(modules, key=lambda module: sum(1 for _ in module.parameters()), default=nn.Module())
    names = {id(module): name for name, module in model.named_modules()}
    # PEFT's copy of a layer is not in the model yet; the original layer is.
    inner = (getattr(module, "original_module", module) for module in reversed(modules))
    inside = next((names[id(module)] for module in inner if id(module) in names), "")
    fits = {
        name: parameter.dtype
        for name, parameter in model.named_parameters()
        if (parameter.is_meta if kind == "meta" else not parameter.is_floating_point())
    }
    first = min(fits, key=lambda name: not name.startswith(inside), default="")
    count = agree(len(fits), "parameter", "are")
    return {"name": base_name(first), "dtype": dtype_name(fits[first]), "count": count} if first else None

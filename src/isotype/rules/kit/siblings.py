"""Which of a model's numbered layers a fix names: all at once (`layers.*.up`), or each that is out of place."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from isotype.core.grouping import grouped
from isotype.core.names import starred
from isotype.records.trace import Trace, Weight
from isotype.rules.kit.per_trace import per_trace


@per_trace
def _weights(trace: Trace) -> Mapping[str, list[Weight]]:
    return grouped(trace.weights, lambda weight: starred(weight.name))


@per_trace
def _modules(trace: Trace) -> Mapping[tuple[str, str], set[str]]:
    found: dict[tuple[str, str], set[str]] = {}
    for name, kind in trace.modules.items():
        found.setdefault((starred(name), kind), set()).add(name)
    return found


def weights_meant(trace: Trace, names: Iterable[str]) -> tuple[str, ...]:
    """Weights with their numbered siblings of the same dtype: with a `*` where every sibling has it, else by name.

    A folded layer stands for others whose names are not known: these are named with a `*`.
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
    """Modules with a `*` for the number of a layer where all siblings of the class are among them, else by name.

    Of a step that ended early nobody knows which of them come later, of a folded model which stand for others.
    """
    given = tuple(dict.fromkeys(modules))
    unknown = trace.failure is not None or any(weight.repeats > 1 for weight in trace.weights)

    def each(name: str) -> str:
        siblings = _modules(trace).get((starred(name), trace.modules.get(name, "")), set())
        return starred(name) if unknown or siblings <= set(given) else name

    return tuple(dict.fromkeys(map(each, given)))

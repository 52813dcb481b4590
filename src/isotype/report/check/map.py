"""The dtype map of a model is a table of its parts, with the storage dtypes and the compute dtypes of each part.

Modules whose names are equal up to the first number (`layers.0`, `layers.1`) form a stack of layers. A later number
in a name, such as the number of an expert, is replaced by `*`. Successive layers with equal dtypes share their rows
in the table.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from isotype.core.dtypes import dtype_name
from isotype.core.names import plain_name, with_parents
from isotype.records.finding import Finding
from isotype.records.trace import Call, Trace, Weight

Dtypes = tuple[str, ...]

_LAYER = re.compile(r"(?:(?P<stack>.*?)\.)?(?P<number>\d+)\.(?P<part>.+)")


@dataclass(frozen=True)
class Row:
    """A row of the dtype map: a part of the model, or the same part of several equal layers.

    Attributes:
        part: name within the layer, or within the model for a part outside of layers. In this name, `*` replaces a number.
        stack: name of the layers without their number, such as `model.layers`, or "" for a part outside of layers.
        first, last: numbers of the row's first and last layer, or None for a part outside of layers.
        layers: number of layers that this row describes, even if the trace is folded.
        module_class: class of the module, or "" for a part without weights.
        count: number of modules with this name in one layer, such as the number of experts.
        stored: storage dtypes of the base weights; the most frequent dtype is first.
        runs: dtypes of the matmuls; the dtype with the most FLOPs is first. Without matmuls, dtypes of the part's outputs.
        adapters: dtypes of the adapters' weights.
        adapter_runs: dtypes of the adapters' matmuls.
        bytes: total bytes of the weights, adapters and buffers in all layers of the row.
        findings: indices in `Report.findings` of the findings about this part.
    """

    part: str
    stack: str = ""
    first: int | None = None
    last: int | None = None
    layers: int = 1
    module_class: str = ""
    count: int = 0
    stored: Dtypes = ()
    buffers: Dtypes = ()
    runs: Dtypes = ()
    adapters: Dtypes = ()
    adapter_runs: Dtypes = ()
    trainable: bool = False
    pinned: bool = False
    bytes: int = 0
    findings: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """Name of the row, with the range of layers that it describes: `model.layers.0–29.mlp.up_proj`."""
        last = "" if self.last == self.first else f"–{self.last}"
        number = "" if self.first is None else f"{self.first}{last}"
        return ".".join(filter(None, (self.stack, number, self.part)))


def split_layer(name: str) -> tuple[str, int, str] | None:
    """Split `model.layers.3.mlp.up_proj` into `("model.layers", 3, "mlp.up_proj")`. Return None without a layer number."""
    match = _LAYER.fullmatch(name)
    return match and (match["stack"] or "", int(match["number"]), match["part"])


def layer_counts(trace: Trace) -> dict[tuple[str, int], int]:
    """Return a dictionary from (stack, layer number) of each traced layer to the number of layers that the traced layer represents."""
    counts: dict[tuple[str, int], int] = {}
    for weight in trace.weights:
        split = split_layer(plain_name(weight.module))
        if split is not None:
            # Experts in a layer may be folded, too. Then they repeat more often than the layer.
            counts[split[:2]] = min(weight.repeats, counts.get(split[:2], weight.repeats))
    return counts


def dtype_map(trace: Trace, findings: Sequence[Finding]) -> tuple[Row, ...]:
    """Return a row for each part of a layer in order of execution, and then a row for each finding about a whole layer."""
    parts = _gather(trace)
    for call in trace.calls:
        _add_call(parts, call)
    marks = _marks(findings, parts)
    layers = layer_counts(trace)
    groups: dict[tuple[str, str], dict[int | None, list[str]]] = {}
    for name in sorted(parts, key=lambda name: parts[name].order):
        stack, number, part = split_layer(name) or ("", None, name)
        starred = ".".join("*" if step.isdigit() and stack else step for step in part.split("."))
        groups.setdefault((stack, starred), {}).setdefault(number, []).append(name)
    rows: list[Row] = []
    for (stack, part), by_layer in groups.items():
        joined: list[Row] = []
        for number, names in sorted(by_layer.items()):
            repeats = 1 if number is None else layers.get((stack, number), 1)
            row = _row(Row(part, stack, number, number, repeats), [parts[name] for name in names])
            positions = {position for name in names for position in marks.pop(name, ())}
            row = replace(row, findings=tuple(sorted(positions)))
            if joined and _without_layers(joined[-1]) == _without_layers(row):
                before = joined.pop()
                layers_of_both, bytes_of_both = before.layers + row.layers, before.bytes + row.bytes
                row = replace(row, first=before.first, layers=layers_of_both, bytes=bytes_of_both)
            joined.append(row)
        rows += joined
    return (*rows, *(Row(name, findings=tuple(positions)) for name, positions in marks.items()))


@dataclass
class _Part:
    order: tuple[int, int]
    module_class: str = ""
    repeats: int = 1
    stored: Counter[str] = field(default_factory=Counter)
    buffers: Counter[str] = field(default_factory=Counter)
    products: Counter[str] = field(default_factory=Counter)
    returns: str = ""
    adapters: Counter[str] = field(default_factory=Counter)
    adapter_runs: Counter[str] = field(default_factory=Counter)
    trainable: bool = False
    pinned: bool = False
    bytes: int = 0


def _host(module: str, parts: Mapping[str, _Part]) -> str | None:
    """Return the first of these names that is in `parts`: the module's, its parents' from the nearest on. Else return None."""
    return next((name for name in with_parents(plain_name(module)) if name in parts), None)


def _gather(trace: Trace) -> dict[str, _Part]:
    first: dict[str, int] = {}
    for position, call in enumerate(trace.calls):
        if call.phase in ("forward", "generate"):
            first.setdefault(plain_name(call.module), position)
    parts: dict[str, _Part] = {}
    before = -1
    # A module that is never called is placed after its predecessor in the model.
    for position, weight in enumerate(weight for weight in trace.weights if not weight.adapter):
        name = plain_name(weight.module)
        before = first.get(name, before)
        parts.setdefault(name, _Part((before, position), weight.module_class, weight.repeats))
        _add_weight(parts[name], weight)
    for position, call in enumerate(trace.calls):
        name = plain_name(call.module)
        if call.flops and name and not _host(name, parts):
            parts[name] = _Part((position, -1), repeats=call.repeats)
    for position, weight in enumerate(weight for weight in trace.weights if weight.adapter):
        owner = _host(weight.module, parts)
        if owner is None:
            owner = plain_name(weight.module)
            parts[owner] = _Part((first.get(owner, before), position), weight.module_class, weight.repeats)
        _add_weight(parts[owner], weight)
    return parts


def _add_weight(part: _Part, weight: Weight) -> None:
    dtype = weight.quantization.format if weight.quantization is not None else dtype_name(weight.dtype)
    counts = part.adapters if weight.adapter else part.buffers if weight.buffer else part.stored
    counts[dtype] += 1
    part.bytes += weight.bytes * weight.repeats
    part.trainable |= weight.trainable and not weight.adapter
    part.pinned |= weight.pinned


def _add_call(parts: dict[str, _Part], call: Call) -> None:
    if call.phase not in ("forward", "generate") or not call.results:
        return
    name = _host(call.module, parts)
    if name is None:
        return
    part, (dtype, _) = parts[name], call.results[0]
    inside = plain_name(call.module) != name
    if call.flops:
        (part.adapter_runs if inside and part.adapters else part.products)[dtype_name(dtype)] += call.flops
    elif dtype.is_floating_point and not inside:
        part.returns = dtype_name(dtype)


def _marks(findings: Sequence[Finding], parts: Mapping[str, _Part]) -> dict[str, list[int]]:
    """Return a dictionary from each part to the indices of its findings. A finding that belongs to no part is listed under its layer."""
    marks: dict[str, list[int]] = {}
    for position, finding in enumerate(findings):
        for place in dict.fromkeys((finding.module, *finding.places)):
            layer = _host(place, parts) or None
            if not layer and (split := split_layer(f"{plain_name(place)}.part")) is not None:
                layer = f"{split[0]}.{split[1]}".strip(".")
            if layer is not None and position not in marks.setdefault(layer, []):
                marks[layer].append(position)
    return marks


def _row(place: Row, parts: Sequence[_Part]) -> Row:
    called = sum((part.products for part in parts), Counter[str]())
    returned = Counter(part.returns for part in parts if part.returns)
    return replace(
        place,
        module_class=parts[0].module_class,
        count=sum(part.repeats for part in parts) // max(1, place.layers),
        stored=_ranked(part.stored for part in parts),
        buffers=_ranked(part.buffers for part in parts),
        runs=_ranked([called or returned]),
        adapters=_ranked(part.adapters for part in parts),
        adapter_runs=_ranked(part.adapter_runs for part in parts),
        trainable=any(part.trainable for part in parts),
        pinned=any(part.pinned for part in parts),
        bytes=sum(part.bytes for part in parts),
    )


def _ranked(counters: Iterable[Counter[str]]) -> Dtypes:
    return tuple(name for name, _ in sum(counters, Counter[str]()).most_common())


def _without_layers(row: Row) -> Row:
    return replace(row, first=0, last=0, layers=0, bytes=0)

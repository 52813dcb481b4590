"""The dtype map of a model as data: layers down, their parts across, each part with the dtypes it holds and runs in.

Nothing here knows an architecture. A stack is whatever shares a name up to its first number; a layer's columns are
the names of its parts as the model's author gave them; numbers further inside (experts) become `*`. Layers that look
alike and follow each other are one row.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from isotype.core.dtypes import dtype_name
from isotype.core.names import plain_name
from isotype.records.finding import Finding
from isotype.records.trace import Call, Trace, Weight

Dtypes = tuple[str, ...]

_LAYER = re.compile(r"(?:(?P<stack>.*?)\.)?(?P<number>\d+)\.(?P<part>.+)")


@dataclass(frozen=True)
class Cell:
    """One part of the model, or the same part of several equal layers.

    Attributes:
        name: fully qualified name of the first such module, without the parts that wrappers add.
        module_class: its class, "" for a part without weights.
        count: how many modules of one layer it is: experts count here, layers do not.
        stored: storage dtypes of its frozen or fully trained weights, the commonest first.
        buffers: dtypes of its buffers.
        runs: dtypes its products run in, the most FLOPs first; without products, what it returns.
        adapters: dtypes of its adapters' parameters.
        adapter_runs: dtypes the adapters' products run in.
        trainable: whether one of its own weights is trained.
        pinned: whether the author keeps one of its weights in float32.
        bytes: of all its weights, adapters and buffers in all the layers it stands for.
        findings: positions in `Report.findings` of those that surface here.
    """

    name: str
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
    def look(self) -> tuple[object, ...]:
        """What two cells must share to be drawn as one."""
        return (
            self.module_class, self.count, self.stored, self.buffers, self.runs, self.adapters,
            self.adapter_runs, self.trainable, self.pinned, self.findings,
        )  # fmt: skip


@dataclass(frozen=True)
class Row:
    """Equal layers that follow each other: numbers `first` to `last`, `layers` of them."""

    first: int
    last: int
    layers: int
    cells: Mapping[str, Cell]
    findings: tuple[int, ...] = ()


@dataclass(frozen=True)
class Stack:
    """Layers that share a name up to their number."""

    name: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]

    @property
    def layers(self) -> int:
        """How many layers the real model has here."""
        return sum(row.layers for row in self.rows)


Block = Stack | Cell


def split_layer(name: str) -> tuple[str, int, str] | None:
    """`model.layers.3.mlp.up_proj` -> `("model.layers", 3, "mlp.up_proj")`; None outside of a stack of layers."""
    match = _LAYER.fullmatch(name)
    return match and (match["stack"] or "", int(match["number"]), match["part"])


def layer_counts(trace: Trace) -> dict[tuple[str, int], int]:
    """(stack, number) -> how many layers of the real model that layer stands for."""
    counts: dict[tuple[str, int], int] = {}
    for weight in trace.weights:
        split = split_layer(plain_name(weight.module))
        if split is not None:
            # A stack of experts inside a layer may be folded as well, so the fewest are the layers.
            counts[split[:2]] = min(weight.repeats, counts.get(split[:2], weight.repeats))
    return counts


def dtype_map(trace: Trace, findings: Sequence[Finding]) -> tuple[Block, ...]:
    """The map in order of execution: single parts and stacks of layers."""
    parts = _gather(trace)
    host = _Hosts(parts)
    for call in trace.calls:
        _add_call(parts, host, call)
    marks = _marks(findings, host)
    layers = layer_counts(trace)
    blocks: list[Block] = []
    stacks: dict[str, list[str]] = {}
    for name in sorted(parts, key=lambda name: parts[name].order):
        split = split_layer(name)
        if split is None:
            blocks.append(_cell(name, [parts[name]], 1, marks))
        elif split[0] in stacks:
            stacks[split[0]].append(name)
        else:
            stacks[split[0]] = [name]
            blocks.append(Stack(split[0], (), ()))
    return tuple(
        _stack(block.name, stacks[block.name], parts, layers, marks) if isinstance(block, Stack) else block
        for block in blocks
    )


# --- gathering --------------------------------------------------------------------------------------------


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


class _Hosts:
    """Finds the part that a module belongs to: itself or its nearest ancestor."""

    def __init__(self, parts: dict[str, _Part]) -> None:
        self.parts = parts
        self.hosts: dict[str, str | None] = {}

    def __call__(self, module: str) -> str | None:
        if module not in self.hosts:
            name = plain_name(module)
            while name and name not in self.parts:
                name = name.rpartition(".")[0]
            self.hosts[module] = name if name in self.parts else None
        return self.hosts[module]


def _gather(trace: Trace) -> dict[str, _Part]:
    first: dict[str, int] = {}
    for position, call in enumerate(trace.calls):
        if call.phase in ("forward", "generate"):
            first.setdefault(plain_name(call.module), position)
    parts: dict[str, _Part] = {}
    before = -1
    own = [weight for weight in trace.weights if not weight.adapter]
    # What is never called stays beside the part that the model's author wrote before it.
    for position, weight in enumerate(own):
        name = plain_name(weight.module)
        before = first.get(name, before)
        parts.setdefault(name, _Part((before, position), weight.module_class, weight.repeats))
        _add_weight(parts[name], weight)
    for position, call in enumerate(trace.calls):
        name = plain_name(call.module)
        if call.flops and name and name not in parts and not _under(name, parts):
            parts[name] = _Part((position, -1), repeats=call.repeats)
    host = _Hosts(parts)
    for position, weight in enumerate(weight for weight in trace.weights if weight.adapter):
        owner = host(weight.module)
        if owner is None:
            owner = plain_name(weight.module)
            parts[owner] = _Part((first.get(owner, before), position), weight.module_class, weight.repeats)
            host.hosts.clear()
        _add_weight(parts[owner], weight)
    return parts


def _under(name: str, parts: Mapping[str, _Part]) -> bool:
    while name := name.rpartition(".")[0]:
        if name in parts:
            return True
    return False


def _add_weight(part: _Part, weight: Weight) -> None:
    dtype = weight.quantization.format if weight.quantization is not None else dtype_name(weight.dtype)
    held = part.adapters if weight.adapter else part.buffers if weight.buffer else part.stored
    held[dtype] += 1
    part.bytes += weight.bytes * weight.repeats
    part.trainable |= weight.trainable and not weight.adapter
    part.pinned |= weight.pinned


def _add_call(parts: dict[str, _Part], host: _Hosts, call: Call) -> None:
    name = host(call.module)
    if name is None or call.phase not in ("forward", "generate") or not call.results:
        return
    part, (dtype, _) = parts[name], call.results[0]
    inside = plain_name(call.module) != name
    if call.flops:
        (part.adapter_runs if inside and part.adapters else part.products)[dtype_name(dtype)] += call.flops
    elif dtype.is_floating_point and not inside:
        part.returns = dtype_name(dtype)


# --- findings ---------------------------------------------------------------------------------------------


def _marks(findings: Sequence[Finding], host: _Hosts) -> dict[str, list[int]]:
    """Name of a part, or of a layer where no part of it fits -> positions of its findings."""
    marks: dict[str, list[int]] = {}
    for position, finding in enumerate(findings):
        for place in dict.fromkeys((finding.module, *finding.places)):
            layer = host(place) or _layer_of(plain_name(place))
            if layer is not None and position not in marks.setdefault(layer, []):
                marks[layer].append(position)
    return marks


def _layer_of(name: str) -> str | None:
    split = split_layer(f"{name}.part")
    return None if split is None else ".".join(filter(None, (split[0], str(split[1]))))


# --- drawing together -------------------------------------------------------------------------------------


def _cell(
    name: str, parts: Sequence[_Part], layers: int, marks: Mapping[str, list[int]], *names: str
) -> Cell:
    first = parts[0]
    called = sum((part.products for part in parts), Counter[str]())
    returned = Counter(part.returns for part in parts if part.returns)
    positions = {position for other in (name, *names) for position in marks.get(other, ())}
    return Cell(
        name=name,
        module_class=first.module_class,
        count=sum(part.repeats for part in parts) // max(1, layers),
        stored=_ranked(part.stored for part in parts),
        buffers=_ranked(part.buffers for part in parts),
        runs=_ranked([called or returned]),
        adapters=_ranked(part.adapters for part in parts),
        adapter_runs=_ranked(part.adapter_runs for part in parts),
        trainable=any(part.trainable for part in parts),
        pinned=any(part.pinned for part in parts),
        bytes=sum(part.bytes for part in parts),
        findings=tuple(sorted(positions)),
    )


def _ranked(counters: Iterable[Counter[str]]) -> Dtypes:
    return tuple(name for name, _ in sum(counters, Counter[str]()).most_common())


def _stack(
    name: str,
    members: Sequence[str],
    parts: Mapping[str, _Part],
    layers: Mapping[tuple[str, int], int],
    marks: Mapping[str, list[int]],
) -> Stack:
    by_layer: dict[int, dict[str, list[str]]] = {}
    for member in members:
        split = split_layer(member)
        assert split is not None
        column = ".".join("*" if step.isdigit() else step for step in split[2].split("."))
        by_layer.setdefault(split[1], {}).setdefault(column, []).append(member)
    rows = []
    for number, columns in sorted(by_layer.items()):
        standing = layers.get((name, number), 1)
        cells = {
            column: _cell(names[0], [parts[member] for member in names], standing, marks, *names[1:])
            for column, names in columns.items()
        }
        marked = tuple(marks.get(".".join(filter(None, (name, str(number)))), ()))
        rows.append(Row(number, number, standing, cells, marked))
    return Stack(name, _columns(by_layer.values()), tuple(_merged(rows)))


def _columns(layers: Iterable[Mapping[str, object]]) -> tuple[str, ...]:
    """The columns of all layers; one that the first layers lack goes behind its neighbour on the left."""
    columns: list[str] = []
    for layer in layers:
        at = 0
        for column in layer:
            if column not in columns:
                columns.insert(at, column)
            at = columns.index(column) + 1
    return tuple(columns)


def _merged(rows: Iterable[Row]) -> Iterator[Row]:
    held: Row | None = None
    for row in rows:
        if held is not None and _look(held) == _look(row):
            held = _join(held, row)
            continue
        if held is not None:
            yield held
        held = row
    if held is not None:
        yield held


def _look(row: Row) -> tuple[object, ...]:
    return (row.findings, {column: cell.look for column, cell in row.cells.items()})


def _join(one: Row, other: Row) -> Row:
    cells = {
        column: replace(cell, bytes=cell.bytes + other.cells[column].bytes)
        for column, cell in one.cells.items()
    }
    return Row(one.first, other.last, one.layers + other.layers, cells, one.findings)

"""Bytes of live tensors during a step, by kind: the same book for fake and for real tensors."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from isotype.compat.torch import storage_key, storage_of
from isotype.records.memory import Memory, MemoryKind, MemoryPoint, Phase

_MOST_STEPS = 64  # in which what others of a module's kind add comes and goes
_MOST_POINTS = 512  # of the timeline; from there on two neighbours become one


class Ledger:
    """Counts every storage once, from when it is first seen until the last tensor on it is gone.

    A module that stands for several (`multiply`) counts what its forward keeps for the backward as often as it
    stands. The surplus of a storage goes with the storage; while the backward is in the module it waits until that has
    left, for the other modules' backwards come then. A function that keeps tensors of its own (`ctx.x = x`) lets them go
    later, with the graph.

    Attributes:
        total: bytes alive now.
        kind: of what is seen without one.
        share: of every storage that is seen from now on, what this process holds (less than 1 where it is sharded).
    """

    def __init__(self) -> None:
        self.total = 0
        self.kind: MemoryKind = "activations"
        self.share = 1.0
        self._now: dict[MemoryKind, int] = {}
        # By the storage's address: its reference, bytes, kind and number in the order of their making.
        self._live: dict[int, tuple[Any, int, MemoryKind, int]] = {}
        self._made = 0
        # By the phase, and whether gradients are left out: bytes and kinds of the worst moment.
        self._peaks: dict[tuple[Phase, bool], tuple[int, dict[MemoryKind, int]]] = {}
        self._points: list[MemoryPoint] = []
        self._point_total = -1
        self._stride, self._changes = 1, 0
        self._phase: Phase = "load"
        # Of each module that stands for several: bytes that the others keep, by the address of the storage they are like.
        self._surplus: dict[str, dict[int, int]] = {}
        # Of those whose storage has gone before the backward has left the module.
        self._waiting: dict[str, int] = {}
        self._left: set[str] = set()
        self._times: dict[str, int] = {}
        # Gradients of the others, which come as their activations go; and the highest moment of the backward in the module.
        self._gradients: dict[str, int] = {}
        self._highest: dict[tuple[str, bool], tuple[int, dict[MemoryKind, int]]] = {}
        self._in_backward = ""

    def begin(self, phase: Phase) -> None:
        """What is alive from now on counts towards the peak of `phase`."""
        for module in self._surplus.keys() - self._left:
            if self._waiting.get(module) or self._gradients.get(module):
                self._leave(module)
        self._close_point()
        self._phase = phase
        self._note_peak()

    def seen(
        self,
        tensor: torch.Tensor,
        kind: MemoryKind | None = None,
        repeats: int = 1,
        held: int | None = None,
    ) -> None:
        """A tensor was made; its storage is counted if it is new, and again where its kind is named.

        Args:
            tensor: what is alive.
            kind: what it is booked as from now on; None: as it was, or as the ledger's `kind` where it is new.
            repeats: how many storages of the whole model it stands for.
            held: bytes of it that this process holds; None: its `share`.
        """
        storage = tensor.untyped_storage()
        key = storage_key(storage)
        size = (int(self.share * storage.nbytes()) if held is None else held) * repeats
        if key in self._live:
            if kind is not None:
                self._book_again(key, kind, size)
            return
        kind = kind or self.kind
        self._made += 1
        self._live[key] = (weakref.ref(storage, lambda _: self._freed(key)), size, kind, self._made)
        self._change(kind, size)

    def mark(self) -> int:
        """This moment, for `multiply`."""
        return self._made

    def multiply(
        self,
        module: str,
        since: int,
        times: int,
        inputs: Sequence[torch.Tensor] = (),
        outputs: Sequence[torch.Tensor] = (),
    ) -> None:
        """What was made in `module`'s forward, since that `mark`, and is alive when it ends, is there `times` times.

        An output is the input of the next module like it, which may or may not keep it: whether this one keeps its own
        input says so. What was there before and has gone meanwhile (a weight that moved to other memory) takes nothing off.
        """
        kept = {
            key
            for key, (_, _, kind, number) in self._live.items()
            if number > since and kind == "activations"
        }
        passed_on = [tensor for tensor in inputs if storage_of(tensor) in self._live]
        for output in outputs:
            before = next((each for each in passed_on if _alike(each, output)), None)
            if before is not None:
                passed_on = [each for each in passed_on if each is not before]
                kept -= {storage_of(output)}
                kept |= {storage_of(before)}
        surplus = self._surplus[module] = {key: self._live[key][1] * (times - 1) for key in kept}
        self._left.discard(module)
        self._times[module] = times
        for size in _steps(sum(surplus.values()), times - 1):
            self._change("activations", size)

    def backward_in(self, module: str) -> None:
        """The backward runs in `module` now; the surplus of what has gone in a module that it has left goes too."""
        if module == self._in_backward or not self._surplus:
            return
        before, self._in_backward = self._in_backward, module
        for name in self._surplus:
            if _inside(before, name) and not _inside(module, name):
                self._leave(name)

    def add(self, kind: MemoryKind, size: int, module: str = "") -> None:
        """Bytes that no tensor here stands for (the state of folded layers, what collectives bring); fewer than 0: they go.

        Gradients of a `module` whose backward runs come when those of its kind go through theirs.
        """
        if not size:
            return
        standing = next(
            (name for name in self._surplus if kind == "gradients" and _inside(module, name)), None
        )
        if standing is None or standing in self._left:
            self._change(kind, size)
        else:
            self._gradients[standing] = self._gradients.get(standing, 0) + size

    def resize(self, tensor: torch.Tensor, size: int) -> None:
        """Of a tensor that was seen, only `size` bytes are held from now on."""
        key = storage_of(tensor)
        if key in self._live:
            self._book_again(key, self._live[key][2], size)

    def alive(self, kind: MemoryKind) -> int:
        """Bytes of a kind that are alive now."""
        return self._now.get(kind, 0)

    def record(self, states: int = 0, gradients: int = 0) -> Memory:
        """Return the peaks so far, and how it came to them; of any step, where the bytes are given that a
        later one begins with.

        Args:
            states: of the optimizer, which stay from the first step on.
            gradients: that all micro-batches of a step but its first begin with; 0 where there is one.
        """
        phases: dict[Phase, Mapping[MemoryKind, int]] = {}
        for (phase, bare), (_, kinds) in self._peaks.items():
            later = _later(MemoryPoint(phase, kinds), states, gradients if bare else 0).kinds
            if sum(later.values()) > sum(phases.get(phase, {}).values()) or phase not in phases:
                phases[phase] = later
        return Memory(phases, tuple(_later(point, states, gradients) for point in self._points))

    def _leave(self, module: str) -> None:
        """The other modules' backwards come: in the last one all their gradients are there, and no activations of theirs."""
        self._left.add(module)
        gone, come = self._waiting.pop(module, 0), self._gradients.pop(module, 0)
        for bare in (False, True):
            total, kinds = self._highest.pop((module, bare), (0, {}))
            total += (0 if bare else come) - gone
            if kinds and total > self._peaks.get((self._phase, bare), (-1,))[0]:
                changes: dict[MemoryKind, int] = {"activations": -gone, "gradients": come}
                changed = kinds | {kind: kinds.get(kind, 0) + size for kind, size in changes.items()}
                self._peaks[self._phase, bare] = total, changed
        count = self._times.get(module, 1) - 1
        for less, more in zip(_steps(gone, count), _steps(come, count), strict=True):
            self._change("activations", -less)
            self._change("gradients", more)

    def _book_again(self, key: int, kind: MemoryKind, size: int) -> None:
        reference, booked, before, number = self._live[key]
        if (before, booked) != (kind, size):
            self._live[key] = (reference, size, kind, number)
            self._now[before] -= booked
            self.total -= booked
            self._change(kind, size)

    def _freed(self, key: int) -> None:
        _, size, kind, _ = self._live.pop(key)
        self.total -= size
        self._now[kind] -= size
        self._note_point()
        for module, surplus in self._surplus.items():
            size = surplus.pop(key, 0)
            if self._phase == "backward" and module not in self._left:
                self._waiting[module] = self._waiting.get(module, 0) + size
            elif size:
                self._change("activations", -size)

    def _change(self, kind: MemoryKind, size: int) -> None:
        self.total += size
        self._now[kind] = self._now.get(kind, 0) + size
        if size > 0:
            self._note_peak()
        self._note_point()

    def _note_point(self) -> None:
        """The worst moment of every `_stride` changes is a point of the timeline."""
        self._changes += 1
        if self._changes >= self._stride:
            self._close_point()
        if self.total > self._point_total:
            if self._point_total >= 0:
                self._points.pop()
            self._point_total = self.total
            self._points.append(MemoryPoint(self._phase, dict(self._now)))

    def _close_point(self) -> None:
        self._point_total, self._changes = -1, 0
        if len(self._points) >= _MOST_POINTS:
            self._points, self._stride = _halved(self._points), self._stride * 2

    def _note_peak(self) -> None:
        for bare in (False, True):
            total = self.total - (self._now.get("gradients", 0) if bare else 0)
            if self._phase == "backward":
                for name in self._surplus:
                    inside = name not in self._left and _inside(self._in_backward, name)
                    if inside and total > self._highest.get((name, bare), (0, {}))[0]:
                        self._highest[name, bare] = total, dict(self._now)
            if total > self._peaks.get((self._phase, bare), (-1,))[0]:
                self._peaks[self._phase, bare] = total, dict(self._now)


def _later(point: MemoryPoint, states: int, gradients: int) -> MemoryPoint:
    """Return the same moment of a later step, before its optimizer's."""
    least: dict[MemoryKind, int] = {}
    if states and point.phase in ("forward", "backward", "unscale"):
        least["optimizer"] = states
    if gradients and point.phase in ("forward", "backward"):
        least["gradients"] = gradients
    more = {kind: max(size, point.kinds.get(kind, 0)) for kind, size in least.items()}
    return replace(point, kinds={**point.kinds, **more}) if more else point


def _halved(points: list[MemoryPoint]) -> list[MemoryPoint]:
    """Return the higher of every two neighbours within a phase."""
    kept: list[MemoryPoint] = []
    paired = False
    for point in points:
        paired = bool(kept) and not paired and kept[-1].phase == point.phase
        if not paired:
            kept.append(point)
        elif point.total > kept[-1].total:
            kept[-1] = point
    return kept


def _steps(size: int, count: int) -> list[int]:
    """`size` in as many parts as modules bring it, or take it with them; no more than a picture shows."""
    parts = max(1, min(count, _MOST_STEPS))
    return [size // parts + (part < size % parts) for part in range(parts)]


def _alike(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    return (tensor.shape, tensor.dtype) == (other.shape, other.dtype)


def _inside(module: str, name: str) -> bool:
    return module == name or module.startswith(f"{name}.")

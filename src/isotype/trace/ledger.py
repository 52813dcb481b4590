"""Bytes of live tensors during a step, by kind: the same book for fake and for real tensors."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from isotype.trace.record import Memory, MemoryKind, MemoryPoint, Phase

_MOST_POINTS = 512  # of the timeline; from there on two neighbours become one


class Ledger:
    """Counts every storage once, from when it is first seen until the last tensor on it is gone.

    A module that stands for several (`multiply`) counts what its forward keeps for the backward as often as it
    stands; the surplus goes when the backward has left the module.

    Attributes:
        total: bytes alive now.
    """

    def __init__(self) -> None:
        self.total = 0
        self.kind: MemoryKind = "activations"
        self._now: dict[MemoryKind, int] = {}
        self._live: dict[int, tuple[Any, int, MemoryKind]] = {}
        self._peaks: dict[Phase, dict[MemoryKind, int]] = {}
        self._peak_totals: dict[Phase, int] = {}
        self._points: list[MemoryPoint] = []
        self._point_total = -1
        self._stride, self._changes = 1, 0
        self._phase: Phase = "load"
        self._surplus: dict[str, int] = {}
        self._in_backward = ""

    def begin(self, phase: Phase) -> None:
        """What is alive from now on counts towards the peak of `phase`."""
        self._release_all(phase)
        self._close_point()
        self._phase = phase
        self._note_peak()

    def seen(self, tensor: torch.Tensor, kind: MemoryKind | None = None, repeats: int = 1) -> None:
        """A tensor was made; its storage is counted if it is new."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live:
            if kind is not None:
                self._retag(key, kind)
            return
        size = storage.nbytes() * repeats
        kind = kind or self.kind
        self._live[key] = (weakref.ref(storage, lambda _: self._freed(key)), size, kind)
        self._change(kind, size)

    def multiply(self, module: str, entered: int, times: int) -> None:
        """What `module`'s forward has left alive since `entered` bytes were, is there `times` times."""
        kept = max(0, self.total - entered)
        self._surplus[module] = kept * (times - 1)
        self._change("activations", kept * (times - 1))

    def backward_in(self, module: str) -> None:
        """The backward runs in `module` now; the surplus of a module that it has left goes."""
        if module == self._in_backward or not self._surplus:
            return
        before, self._in_backward = self._in_backward, module
        for name in [name for name in self._surplus if _inside(before, name) and not _inside(module, name)]:
            self._change("activations", -self._surplus.pop(name))

    def add(self, kind: MemoryKind, size: int) -> None:
        """Bytes that no tensor here stands for (the state of folded layers)."""
        self._change(kind, size)

    def record(self) -> Memory:
        """The peaks so far, and how it came to them."""
        return Memory({phase: dict(kinds) for phase, kinds in self._peaks.items()}, tuple(self._points))

    def _release_all(self, phase: Phase) -> None:
        if phase not in ("forward", "backward"):
            for size in self._surplus.values():
                self._change("activations", -size)
            self._surplus.clear()

    def _retag(self, key: int, kind: MemoryKind) -> None:
        reference, size, before = self._live[key]
        if before != kind:
            self._live[key] = (reference, size, kind)
            self._now[before] -= size
            self._now[kind] = self._now.get(kind, 0) + size

    def _freed(self, key: int) -> None:
        _, size, kind = self._live.pop(key)
        self.total -= size
        self._now[kind] -= size
        self._note_point()

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
        if self.total > self._peak_totals.get(self._phase, -1):
            self._peak_totals[self._phase] = self.total
            self._peaks[self._phase] = dict(self._now)


def _halved(points: list[MemoryPoint]) -> list[MemoryPoint]:
    """The higher of every two neighbours within a phase."""
    kept: list[MemoryPoint] = []
    paired = False
    for point in points:
        paired = bool(kept) and not paired and kept[-1].phase == point.phase
        if not paired:
            kept.append(point)
        elif point.total > kept[-1].total:
            kept[-1] = point
    return kept


def _inside(module: str, name: str) -> bool:
    return module == name or module.startswith(f"{name}.")

"""Counts the bytes of all live tensors, fake or real, during a step, by kind of memory."""

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from isotype.compat.torch import dense_parts, storage_key, storage_of
from isotype.core.names import in_module
from isotype.records.memory import Memory, MemoryKind, MemoryPoint, Phase

_MOST_STEPS = 64  # parts in which the memory of represented modules is allocated and freed
_MOST_POINTS = 512  # maximum number of points of the timeline; with more, two neighbours become one


class Ledger:
    """Counts every storage once, from its first use until its last tensor is freed.

    A traced module can represent several equal modules (`multiply`). The activations that its forward saves then count
    once for each of them. The bytes that count for the untraced modules are the surplus of a storage. Freeing a storage
    also frees its surplus. If the traced module's own backward frees a storage, the surplus stays until the end of this
    backward: the untraced modules run their backwards later.

    Attributes:
        kind: kind of memory of new storages, unless `count` is called with another kind.
        share: the part of each new storage that this process holds. It is below 1 if the model is sharded.
    """

    def __init__(self) -> None:
        self.total = 0
        self.kind: MemoryKind = "activations"
        self.share = 1.0
        self._now: dict[MemoryKind, int] = {}
        # Storage address -> its reference, bytes, kind and sequence number.
        self._live: dict[int, tuple[Any, int, MemoryKind, int]] = {}
        self._created = 0
        # (phase, True without gradients) -> bytes at the peak: in total, by kind, and saved by layers.
        self._peaks: dict[tuple[Phase, bool], tuple[int, dict[MemoryKind, int], int]] = {}
        self._saved = self._layers = 0
        self._highest_inside = 0  # of `total`, since the forward of the last representing module began
        self._points: list[MemoryPoint] = []
        self._point_total = -1
        self._stride, self._changes = 1, 0
        self._phase: Phase = "load"
        # Representing module -> storage address -> bytes that the represented modules save.
        self._surplus: dict[str, dict[int, int]] = {}
        # Representing module -> surplus of the storages that its backward has freed.
        self._waiting: dict[str, int] = {}
        self._left: set[str] = set()
        self._times: dict[str, int] = {}
        # Representing module -> bytes of the represented modules' gradients, and peaks during its own backward.
        self._gradients: dict[str, int] = {}
        self._highest: dict[tuple[str, bool], tuple[int, dict[MemoryKind, int]]] = {}
        self._in_backward = ""

    def begin(self, phase: Phase) -> None:
        """Start a phase; the phase's peak includes the memory that is alive now."""
        for module in self._surplus.keys() - self._left:
            if self._waiting.get(module) or self._gradients.get(module):
                self._leave(module)
        self._close_point()
        self._phase = phase
        self._note_peak()

    def count(
        self, tensor: torch.Tensor, kind: MemoryKind | None = None, repeats: int = 1, local: int | None = None
    ) -> None:
        """Add the storage of `tensor` to the ledger, or change the kind and size of a storage that was added before.

        Args:
            kind: kind of memory of the storage; None for its earlier kind, or for the ledger's `kind` if it is new.
            repeats: how many equal storages of the model this storage represents.
            local: bytes of the storage that this process holds; None for the ledger's `share` of the storage.
        """
        *others, last = dense_parts(tensor)
        for part in others:
            self.count(part, kind, repeats)
        storage = last.untyped_storage()
        key = storage_key(storage)
        size = (int(self.share * storage.nbytes()) if local is None else local) * repeats
        if key in self._live:
            if kind is not None:
                self._book_again(key, kind, size)
            return
        kind = kind or self.kind
        self._created += 1
        self._live[key] = (weakref.ref(storage, lambda _: self._freed(key)), size, kind, self._created)
        self._change(kind, size)

    def touch(self, kind: MemoryKind, size: int) -> None:
        """Count `size` bytes that are allocated and freed at once."""
        self.add(kind, size)
        self.add(kind, -size)

    def mark(self) -> int:
        """Return the number of the newest counted storage, for the argument `since` of other methods."""
        return self._created

    def enter_representing(self) -> None:
        """Record the start of the forward of a module that represents several modules."""
        self._highest_inside = self.total

    def multiply(
        self,
        module: str,
        since: int,
        times: int,
        inputs: Sequence[torch.Tensor] = (),
        outputs: Sequence[torch.Tensor] = (),
    ) -> int:
        """Count `times` times the module's live activations that are newer than `since`. Return the added bytes.

        If the module has saved its input, each represented module saves an input, too: the output of the previous one.
        """
        saved = set(self._activations(since))
        alive = [tensor for tensor in inputs if storage_of(tensor) in self._live]
        for output in outputs:
            same = (x for x in alive if (x.shape, x.dtype) == (output.shape, output.dtype))
            if (before := next(same, None)) is not None:
                alive = [tensor for tensor in alive if tensor is not before]
                saved -= {storage_of(output)}
                saved |= {storage_of(before)}
        surplus = {key: self._live[key][1] * (times - 1) for key in saved}
        self._surplus.setdefault(module, {}).update(surplus)
        self._left.discard(module)
        self._times[module] = times
        added, transient = sum(surplus.values()), self._highest_inside - self.total
        for size in _steps(added, times - 1):
            self._change("activations", size)
        self.touch("activations", transient)  # the others have saved theirs when the last one runs
        return added

    def saved_by_layer(self, since: int, added: int, times: int) -> None:
        """Record a layer's forward: it saves activations newer than the mark `since`. `added` is `multiply`'s result for it."""
        self._saved += sum(self._activations(since).values()) + added
        self._layers += times

    def keep(self, module: str, since: int, times: int, outputs: Sequence[torch.Tensor]) -> None:
        """Count `times` times the memory that remains after a forward without a backward (caches), except `outputs`."""
        passed, alive = {storage_of(output) for output in outputs}, self._activations(since)
        kept = {key: size * (times - 1) for key, size in alive.items() if key not in passed}
        self._surplus.setdefault(module, {}).update(kept)
        self._change("activations", sum(kept.values()))

    def _activations(self, since: int) -> dict[int, int]:
        """Return storage -> bytes of the live activations that were counted after the mark `since`."""
        rows = self._live.items()
        return {key: size for key, (_, size, kind, at) in rows if at > since and kind == "activations"}

    def backward_in(self, module: str) -> None:
        """Record that the backward runs in `module`, and free the surplus of modules whose backward has ended."""
        if module == self._in_backward or not self._surplus:
            return
        before, self._in_backward = self._in_backward, module
        for name in self._surplus:
            if in_module(before, name) and not in_module(module, name):
                self._leave(name)

    def add(self, kind: MemoryKind, size: int, module: str = "") -> None:
        """Add `size` bytes (maybe negative) that belong to no tensor: communication buffers, or states of untraced layers.

        Gradients of a module that represents several modules are added at the end of its backward.
        """
        if not size:
            return
        of_gradients = self._surplus if kind == "gradients" else ()
        standing = next((name for name in of_gradients if in_module(module, name)), None)
        if standing is None or standing in self._left:
            self._change(kind, size)
        else:
            self._gradients[standing] = self._gradients.get(standing, 0) + size

    def resize(self, tensor: torch.Tensor, size: int) -> None:
        """Set how many bytes of a counted tensor this process holds."""
        key = storage_of(tensor)
        if key in self._live:
            self._book_again(key, self._live[key][2], size)

    def alive(self, kind: MemoryKind) -> int:
        return self._now.get(kind, 0)

    def record(self, states: int = 0, gradients: int = 0) -> Memory:
        """Return the peak of each phase and the timeline, both for a step after the first step.

        Args:
            states: bytes of the optimizer state that the first step creates.
            gradients: bytes of gradients at the start of each later micro-batch of a step.
        """
        phases: dict[Phase, Mapping[MemoryKind, int]] = {}
        saved: dict[Phase, int] = {}
        for (phase, bare), (_, kinds, of_layers) in self._peaks.items():
            later = _later(MemoryPoint(phase, kinds), states, gradients if bare else 0).kinds
            if sum(later.values()) > sum(phases.get(phase, {}).values()) or phase not in phases:
                phases[phase], saved[phase] = later, of_layers
        points = tuple(_later(point, states, gradients) for point in self._points)
        return Memory(phases, points, saved, self._layers)

    def _leave(self, module: str) -> None:
        """End the backwards of the represented modules: free their activations, and add their gradients."""
        self._left.add(module)
        gone, come = self._waiting.pop(module, 0), self._gradients.pop(module, 0)
        for bare in (False, True):
            total, kinds = self._highest.pop((module, bare), (0, {}))
            total += (0 if bare else come) - gone
            if kinds and total > self._peaks.get((self._phase, bare), (-1,))[0]:
                changes: dict[MemoryKind, int] = {"activations": -gone, "gradients": come}
                changed = kinds | {kind: kinds.get(kind, 0) + size for kind, size in changes.items()}
                self._peaks[self._phase, bare] = total, changed, self._saved
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
        """For every `_stride` changes of memory, add one point to the timeline: the highest total of these changes."""
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
        self._highest_inside = max(self._highest_inside, self.total)
        for bare in (False, True):
            total = self.total - (self._now.get("gradients", 0) if bare else 0)
            if self._phase == "backward":
                for name in self._surplus:
                    inside = name not in self._left and in_module(self._in_backward, name)
                    if inside and total > self._highest.get((name, bare), (0, {}))[0]:
                        self._highest[name, bare] = total, dict(self._now)
            if total > self._peaks.get((self._phase, bare), (-1,))[0]:
                self._peaks[self._phase, bare] = total, dict(self._now), self._saved


def _later(point: MemoryPoint, states: int, gradients: int) -> MemoryPoint:
    """Return the point for a later step or micro-batch, which starts with optimizer states and gradients in memory."""
    least: dict[MemoryKind, int] = {}
    if states and point.phase in ("forward", "backward", "unscale"):
        least["optimizer"] = states
    if gradients and point.phase in ("forward", "backward"):
        least["gradients"] = gradients
    more = {kind: max(size, point.kinds.get(kind, 0)) for kind, size in least.items()}
    return replace(point, kinds={**point.kinds, **more}) if more else point


def _halved(points: list[MemoryPoint]) -> list[MemoryPoint]:
    """Halve the number of points: of two neighbours in the same phase, keep the higher one."""
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
    """Split `size` bytes into one part for each of `count` modules, but into at most `_MOST_STEPS` parts."""
    parts = max(1, min(count, _MOST_STEPS))
    return [size // parts + (part < size % parts) for part in range(parts)]

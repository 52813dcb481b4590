"""A plan as frozen data, and the row that a goal picks. Bytes, seconds and tokens stay numbers until they are written."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from isotype.core.dtypes import parse_dtype
from isotype.core.formats import MIXED, MXFP4
from isotype.core.json_records import Signed
from isotype.precision.policy import PrecisionPolicy
from isotype.train.command.command import Command

GOALS: Mapping[str, str] = {
    "balanced": "the most precise storage of those at most a quarter slower than the fastest",
    "longest": "the longest rows",
    "fastest": "the most tokens a second",
    "best": "the least damage by storage, then the most tokens a second",
}
"""What a row is chosen by."""


@dataclass(frozen=True)
class Time:
    """Foreseen seconds of one step, all of its micro-batches, by the roofline of `isotype.rules.kit.step_time`.

    Attributes:
        seconds: of all operators at the device's rates.
        least: of the products alone.
        bound: what most of the time goes to.
        launches: kernels, at least.
        spread: how many times faster or slower a step may be; 1 where the rates were measured on the device.
    """

    seconds: float
    least: float
    bound: Literal["products", "memory traffic", "launches"]
    launches: int
    spread: float = 1.0

    @property
    def low(self) -> float:
        """Seconds of a step at the fast end of the spread."""
        return self.seconds / self.spread

    @property
    def high(self) -> float:
        """Seconds of a step at the slow end of the spread."""
        return self.seconds * self.spread


@dataclass(frozen=True)
class Workload:
    """A data set as a training takes it.

    Attributes:
        rows: of the data set.
        epochs: of the training.
        steps: of all epochs.
        seconds: of all epochs, steps alone; None where the time of a step is unknown.
        tokens: of all rows of one epoch, cut to the row's length; None where nobody counted them.
        longest: tokens of the longest row; None likewise.
        cut: rows that are longer than the row's length, as a share; None likewise.
        padding: the share of a step's tokens that is padding; None likewise.
        packed_seconds: of all epochs, where rows are packed into full ones (`--packing`); None where it is unknown, or they are packed.
        packs: of an epoch, at least, where rows are packed; None where they are not.
    """

    rows: int
    epochs: float
    steps: int
    seconds: float | None
    tokens: int | None = None
    longest: int | None = None
    cut: float | None = None
    padding: float | None = None
    packed_seconds: float | None = None
    packs: int | None = None


@dataclass(frozen=True)
class Row:
    """One set of settings on one device; everything in it was traced.

    Attributes:
        device: name of the profile.
        devices: how many of them train together.
        storage: how frozen weights are stored; `mixed`: each layer in a format of its own.
        compute: dtype of products.
        checkpointing: which layers are computed again in the backward: `off`, `every layer`, …
        sharding: `""` on one device, else `DDP` or `FSDP2`.
        rows: of a micro-batch on one device; where `fits` is false, of the smallest one.
        length: tokens of a row.
        accumulation: micro-batches of a step.
        fits: whether the step takes no more than `room`.
        peak: bytes at its worst moment.
        room: bytes that it may take; None where nobody knows.
        phase: of the worst moment.
        kinds: what is alive there, kind -> bytes.
        time: foreseen; None where the device's rates are unknown.
        longest: tokens of the longest row that fits, one a micro-batch where their number is not pinned; 0 where none does, None where it was not looked for.
        longest_is_all: whether that is as long as was asked about: the model has no more positions, or none were tried.
        work: what the data set takes by it; None where none is named.
        damage: KL divergence of next-token distributions from those of unquantized weights, in nats, of a mixed base as it is estimated;
            None: unknown.
        base_memory: bytes that a mixed base's weights take at most; None where nothing says it.
        policy: the precision policy.
        command: that trains so.
        on_front: whether no other row of the device takes less memory and is as fast.
    """

    device: str
    devices: int
    storage: str
    compute: str
    checkpointing: str
    sharding: Annotated[str, ("enum", ("", "DDP", "FSDP2"))]
    rows: int
    length: int
    accumulation: int
    fits: bool
    peak: int
    room: int | None
    phase: str
    kinds: Mapping[str, int]
    time: Time | None
    policy: PrecisionPolicy
    command: Command
    longest: int | None = None
    longest_is_all: bool = False
    work: Workload | None = None
    damage: float | None = None
    base_memory: int | None = None
    on_front: bool = False

    @property
    def command_line(self) -> str:
        """The training command, quoted for a shell."""
        return shlex.join(self.command.tokens())

    @property
    def spare(self) -> Signed | None:
        """Bytes of the room that are left; negative where it does not fit."""
        return None if self.room is None else self.room - self.peak

    @property
    def tokens(self) -> int:
        """Tokens of a step, on all devices."""
        return self.rows * self.length * self.accumulation * self.devices

    @property
    def tokens_per_second(self) -> float | None:
        """Of all devices together, what they exchange not counted."""
        return None if self.time is None else self.tokens / self.time.seconds

    @property
    def lowest_speed(self) -> float | None:
        """Tokens a second at the slow end of the spread."""
        return None if self.time is None else self.tokens / self.time.high

    @property
    def highest_speed(self) -> float | None:
        """Tokens a second at the fast end of the spread."""
        return None if self.time is None else self.tokens / self.time.low

    @property
    def speed(self) -> float:
        """Tokens a second to compare by: 0 where they are unknown."""
        return self.tokens_per_second or 0.0

    @property
    def checkpointing_value(self) -> bool | None:
        """What `--gradient_checkpointing` says of it; None of every n-th layer, which takes a number besides."""
        return {"off": False, "every layer": True}.get(self.checkpointing)


@dataclass(frozen=True)
class Device:
    """A device that is planned for.

    Attributes:
        name, title: of its profile.
        memory: bytes that it has; None where that varies.
        room: in words, what a step may take.
        rates: where the rates of its time come from, as a clause; "" where there are none.
        notes: what its dtypes cost.
        chosen: the row by the goal; None where nothing fits.
        rows: every set of settings, with those that do not fit.
        enough: how many of it the smallest step fits on, sharded, where it does not fit on fewer; None where nobody looked, or none are.
    """

    name: str
    title: str
    memory: int | None
    room: str
    rates: str
    notes: tuple[str, ...]
    chosen: Row | None
    rows: tuple[Row, ...] = ()
    enough: int | None = None

    @property
    def chosen_index(self) -> int | None:
        """Index of the row that the goal picks; None where nothing fits."""
        return None if self.chosen is None else self.rows.index(self.chosen)


@dataclass(frozen=True)
class Record:
    """What can be trained on a device, how fast, and which row the goal picks: the data of a `Plan`.

    Attributes:
        model: as it was named.
        method: the training method.
        settings: adapters and optimizer, in words.
        goal: what the row is chosen by, a key of `GOALS`.
        devices: in the order that they were named in.
        refused: storages that cannot be trained on a device, with the reason.
        notes: what is not counted.
    """

    model: str
    method: str
    settings: str
    goal: Annotated[str, ("enum", tuple(GOALS))]
    devices: tuple[Device, ...]
    refused: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def rows(self) -> tuple[Row, ...]:
        """The rows of all devices."""
        return tuple(row for device in self.devices for row in device.rows)

    @property
    def chosen(self) -> Row | None:
        """The row that the goal picks, of the first device on which one fits."""
        return next((device.chosen for device in self.devices if device.chosen is not None), None)

    @property
    def policy(self) -> PrecisionPolicy | None:
        """The chosen row's precision policy."""
        return None if self.chosen is None else self.chosen.policy

    @property
    def command(self) -> str | None:
        """The chosen row's command, quoted for a shell; None where nothing fits."""
        return None if self.chosen is None else self.chosen.command_line


_SLOWER = 1.25
"""How many times slower than the fastest a row may be that `balanced` takes for its precision."""

_CODES = ("int8", MIXED, "nf4", "fp4")
"""Quantization formats, the more precise first."""


def picked(rows: Sequence[Row], goal: str) -> Row | None:
    """The row of one device that a goal picks, see `GOALS`; None where none fits."""
    fitting = [row for row in rows if row.fits and not _gathers_more(row, rows)]
    if not fitting:
        return None
    if goal == "longest":
        return max(fitting, key=lambda row: (row.longest or row.length, -_loss(row), row.speed))
    damage = _damage if all(row.damage is not None or row.storage not in _CODES for row in fitting) else _loss
    if goal == "best":
        return min(fitting, key=lambda row: (damage(row), -row.speed, row.sharding, row.peak))
    if goal == "fastest":
        return min(fitting, key=lambda row: (-row.speed, _loss(row), row.sharding, row.peak))
    fast = max(row.speed for row in fitting)
    near = [row for row in fitting if row.speed * _SLOWER >= fast]
    return min(near, key=lambda row: (damage(row), -row.speed, row.sharding, row.peak))


def front(rows: Sequence[Row]) -> tuple[Row, ...]:
    """Rows that fit and than which no other takes less memory and is as fast."""
    fitting = sorted((row for row in rows if row.fits), key=lambda row: (row.peak, -row.speed))
    kept: list[Row] = []
    for row in fitting:
        if not kept or row.speed > kept[-1].speed:
            kept.append(row)
    return tuple(kept)


def _gathers_more(row: Row, rows: Sequence[Row]) -> bool:
    """Whether a sharded row gathers its weights more often than another of its storage.

    Every micro-batch gathers all of them twice; how long that takes no data sheet of a card says.
    """
    alike = [
        each for each in rows if each.fits and (each.sharding, each.storage) == (row.sharding, row.storage)
    ]
    return row.sharding == "FSDP2" and row.accumulation > min(each.accumulation for each in alike)


def _damage(row: Row) -> float:
    """As it was measured, where that is of every quantized row: a number of bits and a measure cannot be compared."""
    return row.damage or 0.0


def _loss(row: Row) -> float:
    """How much a storage rounds: a rank, no measure."""
    if row.storage in _CODES:
        return 8 + _CODES.index(row.storage)
    # Experts that stay as they are stored lose nothing.
    return 8 - parse_dtype(row.compute if row.storage == MXFP4 else row.storage).itemsize

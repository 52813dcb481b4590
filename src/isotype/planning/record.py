"""The results of a plan as dataclasses, and functions that select a row for a goal."""

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
    "balanced": "the most precise storage at most 25 % slower than the fastest",
    "longest": "the longest rows",
    "fastest": "the most tokens per second",
    "best": "the most precise storage, and then the most tokens per second",
}


@dataclass(frozen=True)
class Time:
    """Estimated time of one step with all its micro-batches, from the roofline model in `isotype.rules.kit.costs`.

    Attributes:
        seconds: seconds that all operators take at the device's rates.
        least: seconds of the matrix products alone.
        bound: the kind of work that takes most of the time.
        launches: minimum number of kernel launches.
        spread: factor by which a real step may be faster or slower; 1 if the rates were measured on the device.
    """

    seconds: float
    least: float
    bound: Literal["products", "memory traffic", "launches"]
    launches: int
    spread: float = 1.0

    @property
    def low(self) -> float:
        """Seconds of a step if the step is as fast as the spread allows."""
        return self.seconds / self.spread

    @property
    def high(self) -> float:
        """Seconds of a step if the step is as slow as the spread allows."""
        return self.seconds * self.spread


@dataclass(frozen=True)
class Workload:
    """A training on the whole data set with the settings of one row of the plan.

    Attributes:
        rows: rows of the data set.
        epochs: epochs of the training.
        steps: optimizer steps of all epochs.
        seconds: seconds of all epochs; None if the time of a step is unknown.
        tokens: tokens of one epoch after rows are cut to the plan's length; None if tokens were not counted.
        longest: tokens of the data set's longest row; None if tokens were not counted.
        cut: share of the data set's rows that are longer than the plan's length; None if tokens were not counted.
        padding: share of padding among a step's tokens; None if tokens were not counted.
        packed_seconds: seconds that all epochs would take with `--packing`. None if the time is unknown, if rows are already
            packed, or if the method has no `--packing`.
        packs: minimum number of packed rows in an epoch; None if rows are not packed.
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
    """A traced step with one set of settings on one device.

    Attributes:
        device: name of the device profile.
        devices: number of devices that train together.
        storage: format of frozen weights; `mixed` means that layers have different formats.
        compute: dtype of products.
        checkpointing: layers recomputed in the backward pass: `off`, `every layer`, …
        sharding: `""` on one device, else `DDP` or `FSDP2`.
        rows: rows of a micro-batch on one device. If `fits` is false, `rows` is the smallest number that was tried.
        length: tokens of a row.
        accumulation: micro-batches of a step.
        peak: bytes at the step's peak.
        room: bytes that the step may use.
        phase: phase of the step with the memory peak.
        kinds: kind -> bytes in memory at the peak.
        time: estimated time; None if the device's rates are unknown.
        longest: length in tokens of the longest row that fits; 0 if no row fits, None if it was not searched. The search uses
            micro-batches of one row, unless the user set `rows`.
        longest_is_all: true if the longest row that was tried fits, or if the model has only `longest` positions.
        work: the training on the data set; None without a data set.
        damage: KL divergence between the next-token distributions of the unquantized and the quantized model, in nats; None if
            unknown. For mixed storage, the damage is an estimate.
        base_memory: maximum bytes of a base model with mixed storage; None if there is no limit.
        policy: the precision policy.
        command: the training command of the row.
        on_front: true if the row fits, and is faster than all rows of the device that need less memory.
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
    peak: int
    room: int
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
        """Training command, quoted for a shell."""
        return shlex.join(self.command.tokens())

    @property
    def fits(self) -> bool:
        """True if the step needs at most `room` bytes."""
        return self.peak <= self.room

    @property
    def spare(self) -> Signed:
        """Bytes of the memory limit that the step does not use; negative if the step does not fit."""
        return self.room - self.peak

    @property
    def tokens(self) -> int:
        """Tokens of a step on all devices."""
        return self.rows * self.length * self.accumulation * self.devices

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second of all devices together, without the time for communication."""
        return None if self.time is None else self.tokens / self.time.seconds

    @property
    def lowest_speed(self) -> float | None:
        """Tokens per second if a step is as slow as the spread allows."""
        return None if self.time is None else self.tokens / self.time.high

    @property
    def highest_speed(self) -> float | None:
        """Tokens per second if a step is as fast as the spread allows."""
        return None if self.time is None else self.tokens / self.time.low

    @property
    def speed(self) -> float:
        """Tokens per second; 0 if unknown."""
        return self.tokens_per_second or 0.0

    @property
    def checkpointing_value(self) -> bool | None:
        """Value of `--gradient_checkpointing`; None if every n-th layer is recomputed, which needs a second argument."""
        return {"off": False, "every layer": True}.get(self.checkpointing)


@dataclass(frozen=True)
class Device:
    """A device of the plan.

    Attributes:
        name, title: name and title of the device profile.
        memory: bytes of the device's memory; None if the size of the memory varies.
        room: memory limit of a step, in words.
        rates: source of the rates that estimate the time; "" without rates.
        notes: warnings about dtypes on this device, such as slow emulation.
        chosen: the row that the goal selects; None if nothing fits.
        rows: rows for all combinations of settings, including rows that do not fit.
        enough: smallest number of devices of this kind on which the sharded step with the least memory fits. None if no number
            is enough, or if no number was tried.
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
        """Index of the row that the goal selects; None if nothing fits."""
        return None if self.chosen is None else self.rows.index(self.chosen)


@dataclass(frozen=True)
class Record:
    """The data of a `Plan`: devices, their rows, and the row that the goal selects.

    Attributes:
        model: the model's name in the request.
        method: the training method.
        settings: a description of adapters and optimizer.
        goal: criterion of the choice, a key of `GOALS`.
        devices: devices in the order of the request.
        refused: storage formats that cannot be trained on a device, each with the reason.
        notes: costs that are not counted, and other remarks.
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
        return tuple(row for device in self.devices for row in device.rows)

    @property
    def chosen(self) -> Row | None:
        """The row that the goal selects on the first device on which a row fits."""
        return next((device.chosen for device in self.devices if device.chosen is not None), None)

    @property
    def policy(self) -> PrecisionPolicy | None:
        """Precision policy of the chosen row; None if nothing fits."""
        return None if self.chosen is None else self.chosen.policy

    @property
    def command(self) -> str | None:
        """Command of the chosen row, quoted for a shell; None if nothing fits."""
        return None if self.chosen is None else self.chosen.command_line


_SLOWER = 1.25
"""The goal `balanced` selects a row that takes at most this many times as long as the fastest row."""

_CODES = ("int8", MIXED, "nf4", "fp4")
"""Quantization formats, the most precise first."""


def picked(rows: Sequence[Row], goal: str) -> Row | None:
    """Return the best of a device's rows for a goal (see `GOALS`); None if no row fits."""
    fitting = [row for row in rows if row.fits and not _gathers_more(row, rows)]
    if not fitting:
        return None
    if goal == "longest":
        return max(fitting, key=lambda row: (row.longest or row.length, -_imprecision(row), row.speed))
    if goal == "fastest":
        return min(fitting, key=lambda row: (-row.speed, _imprecision(row), row.sharding, row.peak))
    measured = all(row.damage is not None or row.storage not in _CODES for row in fitting)
    if goal == "balanced":
        fast = max(row.speed for row in fitting)
        fitting = [row for row in fitting if row.speed * _SLOWER >= fast]

    def preference(row: Row) -> tuple[float, float, str, int]:
        return row.damage or 0.0 if measured else _imprecision(row), -row.speed, row.sharding, row.peak

    return min(fitting, key=preference)


def front(rows: Sequence[Row]) -> tuple[Row, ...]:
    """Return the Pareto front: rows that fit and are faster than all rows that need less memory."""
    best: list[Row] = []
    for row in sorted((row for row in rows if row.fits), key=lambda row: (row.peak, -row.speed)):
        if not best or row.speed > best[-1].speed:
            best.append(row)
    return tuple(best)


def _gathers_more(row: Row, rows: Sequence[Row]) -> bool:
    """Return True if another sharded row that fits has the same storage and fewer micro-batches than `row`.

    Each micro-batch gathers all weights twice, and the estimated time does not include this communication.
    """
    alike = (o for o in rows if o.fits and (o.sharding, o.storage) == ("FSDP2", row.storage))
    return row.sharding == "FSDP2" and row.accumulation > min(other.accumulation for other in alike)


def _imprecision(row: Row) -> float:
    """Return a rank of the row's storage format. More precise formats have a lower rank."""
    if row.storage in _CODES:
        return 8 + _CODES.index(row.storage)
    # Experts that stay in their stored format are not rounded.
    return 8 - parse_dtype(row.compute if row.storage == MXFP4 else row.storage).itemsize

"""A plan as JSON; `schema.json` beside this file describes it, written from the records by `python -m tools.schemas`."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from isotype.core.json_records import Names, text_of
from isotype.planning.goal import front
from isotype.planning.record import Device, Record, Row

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class PlannedRow:
    """One set of settings, traced as it is written.

    Attributes:
        row: the settings.
        command: the training command, quoted for a shell.
        on_front: whether no other row takes less memory and is as fast.
    """

    row: Row
    command: str
    on_front: bool


@dataclass(frozen=True)
class PlannedDevice:
    """A device with its rows.

    Attributes:
        device: what it is.
        chosen: index of the row that the goal picks; null where nothing fits.
        rows: every set of settings.
    """

    device: Device
    chosen: int | None
    rows: tuple[PlannedRow, ...]


@dataclass(frozen=True)
class Planned:
    """What can be trained on a device, as `isotype plan --json` and `Plan.to_json()` write it. Numbers are not rounded.

    Attributes:
        plan: the record.
        devices: in the order that they were named in.
    """

    plan: Record
    devices: tuple[PlannedDevice, ...]


NAMES: Names = {
    Planned: "model=plan.model method=plan.method settings=plan.settings goal=plan.goal devices refused=plan.refused notes=plan.notes "
    "command=plan.command",
    PlannedDevice: "name=device.name title=device.title memory_bytes=device.memory room=device.room rates=device.rates "
    "notes=device.notes chosen rows",
    PlannedRow: "storage=row.storage compute=row.compute checkpointing=row.checkpointing sharding=row.sharding devices=row.devices "
    "rows=row.rows length=row.length accumulation=row.accumulation tokens=row.tokens fits=row.fits peak_bytes=row.peak "
    "room_bytes=row.room spare_bytes=row.spare peak_phase=row.phase peak_kinds=row.kinds time=row.time "
    "tokens_per_second=row.tokens_per_second longest=row.longest longest_is_all=row.longest_is_all work=row.work damage=row.damage "
    "command on_front",
}


def to_json(plan: Record) -> str:
    """Strict JSON; bytes, seconds and tokens stay unrounded numbers."""
    planned = Planned(plan, tuple(_device(device, plan.of(device.name)) for device in plan.devices))
    return text_of(planned, SCHEMA_VERSION, NAMES)


def _device(device: Device, rows: tuple[Row, ...]) -> PlannedDevice:
    best = front(rows)
    chosen = None if device.chosen is None else rows.index(device.chosen)
    return PlannedDevice(
        device, chosen, tuple(PlannedRow(row, shlex.join(row.command), row in best) for row in rows)
    )

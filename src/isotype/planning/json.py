"""A plan as JSON, by `schema.json`."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict
from typing import Any

from isotype.planning.goal import front
from isotype.planning.record import Device, Record, Row

SCHEMA_VERSION = 1


def to_json(plan: Record) -> str:
    """Strict JSON; bytes, seconds and tokens stay unrounded numbers."""
    content = {
        "schema_version": SCHEMA_VERSION,
        "model": plan.model,
        "method": plan.method,
        "settings": plan.settings,
        "goal": plan.goal,
        "devices": [_device(plan, device) for device in plan.devices],
        "refused": list(plan.refused),
        "notes": list(plan.notes),
        "command": plan.command,
    }
    return json.dumps(content, indent=1, allow_nan=False)


def _device(plan: Record, device: Device) -> dict[str, Any]:
    rows = plan.of(device.name)
    best = front(rows)
    return {
        "name": device.name,
        "title": device.title,
        "memory_bytes": device.memory,
        "room": device.room,
        "rates": device.rates,
        "notes": list(device.notes),
        "chosen": rows.index(device.chosen) if device.chosen is not None else None,
        "rows": [{**_row(row), "on_front": row in best} for row in rows],
    }


def _row(row: Row) -> dict[str, Any]:
    return {
        "storage": row.storage,
        "compute": row.compute,
        "checkpointing": row.checkpointing,
        "sharding": row.sharding,
        "devices": row.devices,
        "rows": row.rows,
        "length": row.length,
        "accumulation": row.accumulation,
        "tokens": row.tokens,
        "fits": row.fits,
        "peak_bytes": row.peak,
        "room_bytes": row.room,
        "spare_bytes": row.spare,
        "peak_phase": row.phase,
        "peak_kinds": dict(row.kinds),
        "time": None if row.time is None else asdict(row.time),
        "tokens_per_second": row.tokens_per_second,
        "longest": row.longest,
        "longest_is_all": row.longest_is_all,
        "work": None if row.work is None else asdict(row.work),
        "damage": row.damage,
        "command": shlex.join(row.command),
    }

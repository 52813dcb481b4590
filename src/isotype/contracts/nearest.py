"""Choice of the measured table for a device: same kind, nearest capability or instruction set, nearest torch
version.

Tables are files `KIND[-VARIANT][-torchVERSION].json`: `cuda-sm75-torch2.13`, `cpu-avx2`, `mps-torch2.13`. The
variant is an NVIDIA GPU's compute capability or a CPU's instruction set. If a name has no version, the table
itself has it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.version import Version

_NAME = re.compile(
    r"(?P<kind>cpu|cuda|rocm|xpu|mps)(?:-(?P<variant>(?!torch)[a-z0-9]+))?(?:-torch(?P<torch>\d+\.\d+))?"
)
_FAR = 100


@dataclass(frozen=True)
class TableName:
    """Name of a table: file stem, device kind, variant (`sm75`, `avx2` or ""), major and minor torch version
    (`2.13`).
    """

    name: str
    kind: str
    variant: str
    torch: str

    @property
    def words(self) -> str:
        """Text for a report: `cuda-sm75, torch 2.13`."""
        return f"{self.kind}{f'-{self.variant}' if self.variant else ''}, measured with torch {self.torch}"


def table_name(kind: str, capability: tuple[int, int] | None, torch_version: str) -> str:
    """Return the name of a new table: `cuda-sm75-torch2.13`."""
    variant = f"-sm{capability[0]}{capability[1]}" if capability is not None else ""
    return f"{kind}{variant}-torch{_minor(torch_version)}"


def tables_in(folder: Path) -> tuple[TableName, ...]:
    """Return the tables of a folder, by name."""
    names = []
    for path in sorted(folder.glob("*.json")):
        parts = _NAME.fullmatch(path.stem)
        if parts is not None:
            version = parts["torch"] or _minor(json.loads(path.read_text(encoding="utf-8"))["torch"])
            names.append(TableName(path.stem, parts["kind"], parts["variant"] or "", version))
    return tuple(names)


def nearest(tables: Sequence[TableName], kind: str, variant: str, torch_version: str) -> TableName | None:
    """Return the table to use for a device; None if no device of its kind was measured."""
    own = [table for table in tables if table.kind == kind]
    return min(
        own,
        key=lambda table: (_apart(table.variant, variant), _between(table.torch, torch_version), table.name),
        default=None,
    )


def variant_of(kind: str, capability: tuple[int, int] | None, contracts: str) -> str:
    """Return a device's variant: an NVIDIA GPU's compute capability, else from its table's name (`cpu-avx2`)."""
    if kind == "cuda":
        return "" if capability is None else f"sm{capability[0]}{capability[1]}"
    return contracts.partition("-")[2]


def _apart(one: str, other: str) -> float:
    """Return the distance of two variants: of capabilities by generation first, older before newer."""
    if one == other:
        return 0
    if not (one.startswith("sm") and other.startswith("sm")):
        return _FAR
    (major, minor), (wanted, within) = _capability(one), _capability(other)
    newer = 0.5 if (major, minor) > (wanted, within) else 0
    return 10 * abs(major - wanted) + abs(minor - within) + newer


def _capability(variant: str) -> tuple[int, int]:
    return int(variant[2:-1]), int(variant[-1])


def _between(one: str, other: str) -> int:
    first, second = Version(one), Version(_minor(other))
    return _FAR * abs(first.major - second.major) + abs(first.minor - second.minor)


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])

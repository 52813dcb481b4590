"""Figures that benchmarks print, kept: a line of JSON each in results.jsonl, which README and docs are written from.

A benchmark reads its arguments by `parsed`, and with `--record` calls `append` for every row that it prints. `python -m tools.figures` writes the pages.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import importlib.metadata
import json
import math
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results.jsonl"
PACKAGES = ("torch", "transformers", "peft", "trl", "bitsandbytes", "isotype")
KINDS = {"amx_bf16": "AMX", "avx512_bf16": "AVX512-BF16", "avx512f": "AVX512", "avx2": "AVX2"}
"""Instructions that decide which products a CPU computes, the strongest first, and how a table names them."""
LIMITS = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "CXX", "ISOTYPE_COMPILE")
"""Variables that make one machine compute as another."""


@dataclass(frozen=True)
class Measure:
    """One number (or word) of a row.

    Attributes:
        value: None where only its spread is known.
        unit: `s`, `MiB`, `kernels`, `×`; empty for a word.
        spread: least and most, or quartiles, in the same unit.
    """

    value: float | str | None = None
    unit: str = ""
    spread: tuple[float, float] | None = None


@dataclass(frozen=True)
class Machine:
    """Where a figure was measured; `cores` is 0 where nobody noted them, `note` tells machines of one name apart: the variables of `LIMITS` that were set,
    and whether more ran than its cores take, so that no figure of a quiet machine gives way to one of a busy one."""

    cpu: str
    cores: int
    instructions: tuple[str, ...] = ()
    note: str = ""

    def __str__(self) -> str:
        kind = next((name for flag, name in KINDS.items() if flag in self.instructions), "")
        cores = f"{self.cores} core{'s' * (self.cores > 1)}" if self.cores else ""
        return ", ".join(filter(None, (f"{self.cpu} ({kind})" if kind else self.cpu, cores, self.note)))


@dataclass(frozen=True)
class Record:
    """A line of results.jsonl.

    Attributes:
        figure: which row of which table: `step/nf4 bf16 512 -`.
        measures: the row's numbers by name.
        peer: who ran, where several are compared; `against` is whose numbers a ratio divides.
        machine: where.
        versions: of the packages in `PACKAGES`, and of python.
        commit: of the repository, with `+` where its files were changed.
        date: YYYY-MM-DD.
        script: path in the repository; `arguments` as typed.
        taken_over: whether the line was copied from a page and not written by the script; `source` then says from which.
    """

    figure: str
    measures: Mapping[str, Measure]
    machine: Machine
    versions: Mapping[str, str]
    commit: str
    date: str
    script: str
    arguments: str = ""
    peer: str = ""
    against: str = ""
    taken_over: bool = False
    source: str = ""

    @property
    def command(self) -> str:
        """What to type for the figure."""
        return f"python {self.script} {self.arguments}".strip()


@dataclass
class Book:
    """Records of a file.

    Attributes:
        records: in the order of the file.
    """

    records: list[Record] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path = RESULTS) -> Book:
        """Every line of a file. Raises ValueError with the number of a line that is no record."""
        book = cls()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            try:
                book.records.append(_record(json.loads(line)))
            except (TypeError, KeyError, ValueError) as error:
                raise ValueError(f"{path}:{number}: {error}") from error
        return book

    def newest(self) -> list[Record]:
        """The newest record of each figure, peer and machine, in the order in which the file first has them."""
        found: dict[tuple[str, str, str], Record] = {}
        for record in self.records:
            key = (record.figure, record.peer, str(record.machine))
            if key not in found or record.date >= found[key].date:
                found[key] = record
        return list(found.values())


def _record(line: dict[str, object]) -> Record:
    measures: dict[str, Measure] = {}
    for name, each in line.pop("measures").items():  # type: ignore[attr-defined]
        spread = each.pop("spread", None)
        measures[name] = Measure(**each, spread=tuple(spread) if spread else None)
    machine: dict[str, object] = line.pop("machine")  # type: ignore[assignment]
    instructions: Iterable[str] = machine.pop("instructions", ())  # type: ignore[assignment]
    place = Machine(**machine, instructions=tuple(instructions))  # type: ignore[arg-type]
    made = Record(measures=measures, machine=place, **line)  # type: ignore[arg-type]
    datetime.date.fromisoformat(made.date)
    if not measures or made.taken_over != bool(made.source):
        raise ValueError("a record has measures, and a source if it was taken over")
    return made


def written(record: Record) -> str:
    """The line of a record: what is empty is left out, numbers have six digits."""
    empty = ("", None, ())

    def short(value: object) -> object:
        if isinstance(value, float):
            return float(f"{value:.6g}") if math.isfinite(value) else str(value)  # JSON has no NaN
        if isinstance(value, Mapping):
            return {
                key: short(each) for key, each in value.items() if each is not False and each not in empty
            }
        return [short(each) for each in value] if isinstance(value, (list, tuple)) else value

    return json.dumps(short(asdict(record)), ensure_ascii=False)


def parsed(parser: argparse.ArgumentParser, *parts: str) -> argparse.Namespace:
    """Arguments, `--record` among them, which ends with an error beside options that leave figures out, or make others of them."""
    parser.add_argument("--record", action="store_true", help="add the figures to benchmarks/results.jsonl")
    options = parser.parse_args()
    changed = [name for name in parts if getattr(options, name) not in (parser.get_default(name), [])]
    if options.record and changed:
        parser.error(f"--record is of all figures: leave out {' and '.join(changed)}")
    if options.record:
        commit()  # a commit that comes while this runs is not what is measured
    return options


def measured(row: Mapping[str, Any], **units: str) -> dict[str, Measure]:
    """Entries of a row that a benchmark prints, as measures."""
    return {name: Measure(row[name], unit) for name, unit in units.items()}


def append(
    figure: str, measures: Mapping[str, Measure], peer: str = "", against: str = "", path: Path = RESULTS
) -> Record:
    """Add a row that the running script has measured on this machine."""
    script = Path(sys.argv[0]).resolve()
    record = Record(
        figure=figure,
        measures=measures,
        machine=this_machine(),
        versions={"python": platform.python_version()} | {name: _version(name) for name in PACKAGES},
        commit=commit(),
        date=datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        script=script.relative_to(ROOT).as_posix() if script.is_relative_to(ROOT) else script.name,
        arguments=shlex.join(each for each in sys.argv[1:] if each != "--record"),
        peer=peer,
        against=against,
    )
    with path.open("a", encoding="utf-8") as file:
        file.write(written(record) + "\n")
    return record


def this_machine() -> Machine:
    """CPU, cores and instructions as the system names them."""
    name, flags = platform.processor() or platform.machine(), set[str]()
    about = Path("/proc/cpuinfo")
    if about.is_file():
        for line in about.read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                name = " ".join(value.replace("(R)", "").replace("(TM)", "").split())
            elif key.strip() == "flags":
                flags |= set(value.split())
    wanted = (*KINDS, "avx512_vnni", "avx512_fp16")
    cores = os.cpu_count() or 1
    notes = [f"{each}={os.environ[each]}" for each in LIMITS if each in os.environ]
    notes += ["other programs running"] if os.getloadavg()[0] > 1.5 * cores else []
    return Machine(name, cores, tuple(each for each in wanted if each in flags), " ".join(notes))


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


@functools.cache
def commit() -> str:
    """The commit of the repository where this was first asked, with `+` where what is measured or measures was changed since."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    measured = ("src", "tests", "benchmarks/*.py", "benchmarks/**/*.py")
    changed = git("status", "--porcelain", "--untracked-files=no", "--", *measured)
    return git("rev-parse", "--short=7", "HEAD") + ("+" if changed else "")

"""Part 2: what each operator accepts on this device, a table for `src/isotype/contracts/tables/`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from .commands import ROOT, Options, call
from .runner import Row

_FEW = 6


def limits(options: Options) -> dict[str, float]:
    """Job -> seconds."""
    return {"table": 150.0}


def command(options: Options) -> list[str]:
    """The measurement's command."""
    arguments = ["--device", options.device, "-o", str(table(options))]
    if options.small:
        arguments += ["--examples", str(options.scratch / "few-examples.json")]
    elif options.device == "cpu":
        arguments += ["--base", "cpu-avx2"]
    return [sys.executable, "-m", "isotype.contracts.measure", *arguments]


def table(options: Options) -> Path:
    """Where the table is written, among the results."""
    return Path(options.out) / f"contracts-{options.device}.json"


def run(options: Options, name: str) -> Iterator[Row]:
    """The results of a job."""
    if options.small:
        tables = ROOT / "src" / "isotype" / "contracts" / "tables"
        examples = json.loads((tables / "examples.json").read_text(encoding="utf-8"))
        chosen = dict(list(examples.items())[:: max(1, len(examples) // _FEW)])
        options.scratch.mkdir(parents=True, exist_ok=True)
        (options.scratch / "few-examples.json").write_text(json.dumps(chosen), encoding="utf-8")
    printed = call(command(options))
    measured = json.loads(table(options).read_text(encoding="utf-8"))
    counts = {key: len(value) for key, value in measured.items() if isinstance(value, dict | list)}
    died = measured.get("died", [])
    text = f"{table(options).name}: " + ", ".join(f"{count} {key}" for key, count in counts.items())
    yield {
        "table": table(options).name,
        "counts": counts,
        "died": died,
        "printed": printed[-2000:],
        "text": text,
    }

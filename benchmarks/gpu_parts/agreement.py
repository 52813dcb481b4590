"""Part 6: how 150 sampled set-ups really end on this device, beside what the check says of them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from .commands import Options, call, last_json
from .runner import Row


def limits(options: Options) -> dict[str, float]:
    """Job -> seconds."""
    return {"sample": 180.0}


def command(options: Options) -> list[str]:
    """The benchmark's command."""
    limit, jobs = ("6", "1") if options.small else ("150", "8")
    cases, cache = options.scratch / "agreement.json", options.scratch / "agreement-real.json"
    arguments = ["--device", options.device, "--limit", limit, "--jobs", jobs, "--seconds-a-case", "60"]
    return [
        sys.executable, "benchmarks/agreement.py", *arguments, "--real-cache", str(cache), "--json", str(cases),
    ]  # fmt: skip


def run(options: Options, name: str) -> Iterator[Row]:
    """The results of a job: every disagreement, then the summary."""
    options.scratch.mkdir(parents=True, exist_ok=True)
    arguments = command(options)
    total = last_json(call(arguments, judges=True))
    rows = json.loads(Path(arguments[-1]).read_text(encoding="utf-8"))["rows"]
    for row in rows:
        if row["result"] != "agree":
            case = " ".join(str(value) for value in row["case"].values())
            yield {
                **row,
                "failed": row["result"],
                "text": f"{row['result']}: {case}: {row['real']['detail'][:120]}",
            }
    yield {
        **total,
        "text": f"{total['cases']} cases, {100 * total['agreement']:.1f} % agree, {total['results']}",
    }

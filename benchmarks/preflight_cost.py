"""What a check of a tiny model costs: CPU seconds with fixes tried and without, over a fixed population.

The population: every scenario of tests/corpus, and every `--every`th pair of an architecture of tests/zoo and a fault
of tests/faults. Seconds are CPU time of one thread, so that whatever else the machine does counts little.

Run: python benchmarks/preflight_cost.py [--every 199] [--json FILE] [--against FILE] [NAME …]
Prints the distribution, the slowest cases and one line of JSON. `--json` writes every case with its findings and
fixes; `--against` reads such a file of another version and says where findings and fixes differ. An older version is
measured by putting its `src` on PYTHONPATH.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import sys
import time
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
from tests.corpus.discover import all_scenarios
from tests.corpus.judge import check_broken
from tests.corpus.scenario import Broken
from tests.faults import FAULTS, Setup
from tests.zoo import ARCHITECTURES

from isotype.core.dtypes import parse_dtype

Rows = Mapping[str, Mapping[str, Any]]

_COMBINATIONS: tuple[tuple[str, str | None], ...] = (
    ("float32", None),
    ("float32", "bfloat16"),
    ("float32", "float16"),
    ("bfloat16", None),
    ("bfloat16", "bfloat16"),
    ("float16", None),
    ("float16", "float16"),
)


def population(every: int) -> Iterator[tuple[str, Callable[[], Broken]]]:
    """Each case's name and what builds its set-up again."""
    for case, scenario in all_scenarios().items():
        yield f"corpus {case}", scenario.build
    pairs = [(architecture, fault) for architecture in ARCHITECTURES for fault in FAULTS]
    for architecture, fault in pairs[::every]:
        yield f"zoo {architecture} {fault}", _faulty(architecture, fault)


def _faulty(architecture: str, fault: str) -> Callable[[], Broken]:
    """A model with a fault; the combination of dtype and autocast is drawn by their names."""
    drawn = zlib.crc32(f"{architecture} {fault}".encode()) % len(_COMBINATIONS)
    name, autocast = _COMBINATIONS[drawn]

    def build() -> Broken:
        kind, dtype = ARCHITECTURES[architecture], parse_dtype(name)
        setup = Setup(
            kind.build(dtype), kind.batch(dtype=dtype), dtype, parse_dtype(autocast) if autocast else None
        )
        FAULTS[fault].inject(setup)
        return Broken(setup.model, setup.batch, setup.autocast, setup.scaler, setup.optimizer)

    return build


def measured(build: Callable[[], Broken]) -> dict[str, Any]:
    """CPU seconds of the check of one set-up, and what it says, with fixes tried and without."""
    row: dict[str, Any] = {}
    for key, verify in (("plain", False), ("verified", True)):
        broken = build()
        started = time.process_time()
        report = check_broken(broken, verify=verify)
        row[f"{key}_seconds"] = time.process_time() - started
        row[f"{key}_findings"] = [_said(finding) for finding in report.findings]
    row["operators"] = len(report.trace.calls)
    return row


def _said(finding: Any) -> dict[str, Any]:
    said = {name: getattr(finding, name) for name in ("code", "severity", "message", "module", "cause")}
    return said | {
        "notes": finding.notes,
        "fixes": [(fix.description, fix.safety, fix.verified, fix.outcome) for fix in finding.fixes],
    }


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Median, 90th percentile, worst and sum."""
    ordered = sorted(seconds)
    return {
        "median": statistics.median(ordered),
        "p90": ordered[int(0.9 * (len(ordered) - 1))],
        "worst": ordered[-1],
        "sum": sum(ordered),
    }


def differences(rows: Rows, before: Rows) -> Iterator[str]:
    """Where what is found, or the fixes, differ from another version's."""
    for name in rows:
        for key in ("plain_findings", "verified_findings"):
            now, then = (json.loads(json.dumps(each[name][key])) for each in (rows, before))
            if now != then:
                yield f"{name} {key}"
                yield from (f"    - {json.dumps(each)}" for each in then if each not in now)
                yield from (f"    + {json.dumps(each)}" for each in now if each not in then)


def main() -> None:
    """Measure, print, compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="only cases with one of these in their names")
    parser.add_argument("--every", type=int, default=199, help="every nth pair of architecture and fault")
    parser.add_argument("--json", type=Path, help="where to write every case")
    parser.add_argument("--against", type=Path, help="what another version has written")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    rows: dict[str, dict[str, Any]] = {}
    refused = []
    for number, (name, build) in enumerate(population(options.every)):
        if options.names and not any(part in name for part in options.names):
            continue
        if not rows:
            measured(build)  # what only a first check pays: imports, tables
        try:
            rows[name] = measured(build)
        except Exception as error:  # noqa: BLE001 - a library refuses the set-up by itself, or check raises: said
            refused.append(f"{name}: {type(error).__name__}: {error}"[:200])
        print(f"\r{number + 1} {name:<60}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    _show(rows, refused)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    if options.against:
        before = json.loads(options.against.read_text(encoding="utf-8"))
        print("\n".join(differences({name: row for name, row in rows.items() if name in before}, before)))


def _show(rows: Rows, refused: Sequence[str]) -> None:
    print(f"{'CPU seconds of a check':<26}{'median':>9}{'p90':>9}{'worst':>9}{'sum':>9}")
    summary: dict[str, Any] = {"cases": len(rows), "refused": len(refused), "torch": torch.__version__}
    for key, title in (("verified_seconds", "with fixes tried"), ("plain_seconds", "verify=False")):
        summary[key] = found = spread([row[key] for row in rows.values()])
        print(f"{title:<26}" + "".join(f"{value:>9.2f}" for value in found.values()))
    for name, row in sorted(rows.items(), key=lambda item: -item[1]["verified_seconds"])[:12]:
        print(
            f"  {row['verified_seconds']:>7.2f} {row['plain_seconds']:>6.2f}  {row['operators']:>6} operators  {name}"
        )
    print("\n".join(f"  refused: {line}" for line in refused))
    print(json.dumps(summary))


if __name__ == "__main__":
    main()

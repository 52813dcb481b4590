"""Wiring: are faults in who sees whom found, and are healthy steps left alone?

Every architecture of the zoo (tests/zoo: tiny and random) meets every fault of tests/faults/wiring.py that it has the part for. A fault
that the model itself, in float32, does not show (a model that keeps packed rows apart whatever the mask says) is no case. What
`isotype.check` measures of the step is judged by its rules of the family IST9.

- found: the fault's rule finds it; of faults that a module lets through, it names a module;
- missed: it does not;
- false alarm: a rule finds an error or a warning in a healthy step. A model that sees later tokens by itself (an encoder that is used
  as a decoder) is counted apart: the finding is true.

Run: python benchmarks/wiring.py [--every N] [--jobs 2] [--architectures a,b] [--healthy] [--record]
Prints tables and every miss; exits with 1 below 98 %, and at one false alarm.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
import warnings
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path

# Before torch is loaded: tiny models are slower on several threads, and the jobs share the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from tests.faults.wiring import FAULTS, findings_of, healthy, learns_itself, sees_later, text_rows  # noqa: E402
from tests.zoo import ARCHITECTURES  # noqa: E402
from torch import nn  # noqa: E402

import results  # noqa: E402
from workers import Lost, run_all  # noqa: E402

ENOUGH = 0.98
_PLACED = ("IST901", "IST902", "IST903", "IST907")


@dataclass(frozen=True)
class Case:
    """An architecture with a fault; "" is a healthy step."""

    architecture: str
    fault: str


@dataclass(frozen=True)
class End:
    """How cases of one architecture and fault ended: (verdict, detail) each, and the CPU seconds of the measurements."""

    ends: tuple[tuple[str, str], ...]
    seconds: float = 0.0


def ended(case: Case) -> End:
    """Run one case."""
    warnings.simplefilter("ignore")
    architecture = ARCHITECTURES[case.architecture]
    model, batch = architecture.build(torch.float32), architecture.batch()
    started = time.process_time()
    if not case.fault:
        ends = tuple(_healthy(model, batch))
        return End(ends, time.process_time() - started)
    fault = next(each for each in FAULTS if each.name == case.fault)
    made = fault.inject(model, batch)
    if made is None:
        return End((("absent", ""),))
    try:
        made[0](**made[1])
        if fault.real is not None and not fault.real(*made):
            return End((("harmless", ""),))
    except Exception as error:  # noqa: BLE001 - the architecture refuses the faulty batch: no case
        return End((("refused", f"{type(error).__name__}: {error}"[:200]),))
    started = time.process_time()
    found, undecided = findings_of(*made)
    seconds = time.process_time() - started
    codes = [each.code for each in found]
    if undecided:
        return End((("undecided", "; ".join(undecided)[:200]),), seconds)
    if fault.code not in codes:
        return End((("missed", str(codes)),), seconds)
    first = found[codes.index(fault.code)]
    placed = fault.code not in _PLACED or fault.real is None or bool(first.module)
    return End((("found" if placed else "no place", first.module),), seconds)


def _healthy(model: nn.Module, batch: dict[str, torch.Tensor]):  # type: ignore[no-untyped-def]
    own = text_rows(batch) and (sees_later(model, batch) or learns_itself(model, batch))
    for name, each in healthy(model, batch):
        found, undecided = findings_of(model, each)
        bad = [f"{name}: {finding.code} {finding.message}" for finding in found if finding.severity != "note"]
        if undecided:
            yield "undecided", f"{name}: {undecided[0]}"
        elif bad and own and all("IST903" in text for text in bad):
            yield "true finding", "; ".join(bad)
        else:
            yield ("false alarm", "; ".join(bad)) if bad else ("silent", "")


def prepare() -> None:
    """What a worker does first."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)


def main() -> int:
    """Run the cases and print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--architectures", type=lambda text: text.split(","))
    parser.add_argument("--healthy", action="store_true", help="healthy steps alone")
    arguments = results.parsed(parser, "every", "architectures", "healthy")
    names = [name for name in ARCHITECTURES if not arguments.architectures or name in arguments.architectures]
    faults = [""] if arguments.healthy else ["", *(fault.name for fault in FAULTS)]
    cases = [
        Case(name, fault)
        for row, name in enumerate(names)
        for column, fault in enumerate(faults)
        if not (row + column) % arguments.every
    ]
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    families: dict[str, Counter[str]] = defaultdict(Counter)
    seconds: list[float] = []
    for at, end in run_all(ended, cases, arguments.jobs, prepare=prepare):
        case = cases[at]
        if isinstance(end, Lost):
            end = End((("lost", end.reason),))
        seconds.append(end.seconds)
        for verdict, detail in end.ends:
            counts[case.fault or "healthy"][verdict] += 1
            kind = verdict if case.fault else f"healthy, {verdict}"
            families[ARCHITECTURES[case.architecture].family][kind] += 1
            if verdict not in ("found", "absent", "harmless", "silent"):
                print(
                    f"{verdict:12} {case.architecture:28} {case.fault or 'healthy':36} {detail}", flush=True
                )
    _by_family(families, arguments.record)
    return _tables(counts, seconds, arguments)


def _by_family(families: dict[str, Counter[str]], record: bool) -> None:
    for family, counted in families.items():
        numbers = {
            "cases": _cases(counted),
            "found": counted["found"],
            "undecided": counted["undecided"] + counted["lost"],
            "steps": sum(
                counted[f"healthy, {verdict}"] for verdict in ("silent", "false alarm", "true finding")
            ),
            "true": counted["healthy, true finding"],
            "false": counted["healthy, false alarm"],
            "unread": counted["healthy, undecided"],
        }
        print(f"{family:38} {numbers}")
        if record:
            results.append(
                f"wiring-family/{family}", {name: results.Measure(value) for name, value in numbers.items()}
            )


def _tables(counts: dict[str, Counter[str]], seconds: list[float], arguments: argparse.Namespace) -> int:
    total: Counter[str] = Counter()
    for fault, counted in counts.items():
        print(f"{fault:38} {dict(counted)}")
        if fault != "healthy":
            total += counted
            if arguments.record:
                measures = {
                    "cases": results.Measure(_cases(counted)),
                    "found": results.Measure(counted["found"]),
                }
                results.append(f"wiring/{fault}", measures)
    well, middle = counts.get("healthy", Counter()), sorted(seconds)[len(seconds) // 2]
    share = total["found"] / max(_cases(total), 1)
    looked = well["silent"] + well["false alarm"] + well["true finding"]
    print(
        f"faults: {total['found']} of {_cases(total)} found ({share:.1%}); healthy: {well['false alarm']} false alarms in "
        f"{looked}, {well['true finding']} true findings, {well['undecided']} undecided; median {middle:.2f} CPU s a case"
    )
    if arguments.record:
        numbers = {
            "steps": looked,
            "false": well["false alarm"],
            "true": well["true finding"],
            "undecided": well["undecided"],
        }
        results.append("wiring/healthy", {name: results.Measure(value) for name, value in numbers.items()})
        everything = {
            "cases": _cases(total),
            "found": total["found"],
            "share": 100 * share,
            "seconds": middle,
        }
        results.append("wiring/all", {name: results.Measure(value) for name, value in everything.items()})
    return int((share < ENOUGH and not arguments.healthy) or well["false alarm"] > 0)


def _cases(counted: Counter[str]) -> int:
    return sum(counted[each] for each in ("found", "no place", "missed", "undecided", "lost"))


if __name__ == "__main__":
    sys.exit(main())

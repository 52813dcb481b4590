"""Two checkouts of isotype by turns: the step of `train.py`, the load of `load.py`. Whether a change made anything slower.

Every measurement is a process of its own with one checkout's sources and the other things alike; the checkouts take turns, and who begins
changes from round to round. *Step* is the median of all steps after the first two, with its quartiles; *load* the median load. *CPU* is the
user and system time of the whole process and of what it started, imports included: a busy machine changes it less than the clock. *Ratio* is of
each round, after over before: its median, least and greatest. Of a training the losses are compared step by step: the same bits, or the greatest
relative difference.

Run: python benchmarks/revisions.py BEFORE AFTER [--storage none nf4 int8] [--dtype fp32 bf16] [--tokens 256] [--checkpointing off on]
     [--load CASE …] [--rounds 3] [--steps 7] [--threads 1] [--json PATH]
Prints a table and one line of JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from load import CASES, prepared, warm
from train import WARM_UP
from turns import quartiles


@dataclass(frozen=True)
class Run:
    """What one process took: seconds of its steps or of its load, CPU seconds in all, losses of a training."""

    seconds: tuple[float, ...]
    cpu: float
    losses: tuple[float, ...] = ()

    @property
    def typical(self) -> float:
        """The median of the seconds."""
        return statistics.median(self.seconds)


def run(checkout: Path, script: str, arguments: Sequence[str], threads: int) -> tuple[str, float]:
    """(what a script of a checkout printed last, the CPU seconds of its process)"""
    environment = {
        **os.environ,
        "PYTHONPATH": str(checkout / "src"),
        "OMP_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
    }
    command = [sys.executable, str(checkout / "benchmarks" / script), *arguments]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise SystemExit(f"{script} of {checkout} failed:\n{done.stdout[-1000:]}\n{done.stderr[-3000:]}")
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return done.stdout.strip().splitlines()[-1], cpu


def train_step(setup: dict[str, Any], threads: int) -> Callable[[Path], Run]:
    """Trains with the command of a checkout."""

    def measured(checkout: Path) -> Run:
        line, cpu = run(checkout, "train.py", ["--child", "isotype", json.dumps(setup)], threads)
        result = json.loads(line.removeprefix("RESULT "))
        return Run(tuple(result["seconds"][WARM_UP:]), cpu, tuple(result["losses"][: setup["steps"]]))

    return measured


def load(case: str, path: str, threads: int) -> Callable[[Path], Run]:
    """Loads a checkpoint by a checkout."""

    def measured(checkout: Path) -> Run:
        line, cpu = run(checkout, "load.py", ["--child", case, "isotype", path], threads)
        return Run((json.loads(line)["seconds"],), cpu)

    return measured


def compare(
    title: str, measured: Callable[[Path], Run], sides: tuple[Path, Path], rounds: int
) -> dict[str, Any]:
    """Rounds of both checkouts, as a row."""
    runs: tuple[list[Run], list[Run]] = ([], [])
    for turn in range(rounds):
        for side in (0, 1) if turn % 2 == 0 else (1, 0):
            runs[side].append(measured(sides[side]))
    row: dict[str, Any] = {"title": title}
    for name, each in zip(("before", "after"), runs, strict=True):
        low, middle, high = quartiles([second for one in each for second in one.seconds])
        row[name] = {
            "seconds": middle,
            "low": low,
            "high": high,
            "cpu": statistics.median(one.cpu for one in each),
        }
    for key, value in (("ratio", lambda one: one.typical), ("cpu ratio", lambda one: one.cpu)):
        ratios = [value(after) / value(before) for before, after in zip(*runs, strict=True)]
        row[key] = [statistics.median(ratios), min(ratios), max(ratios)]
    pairs = [
        pair
        for before, after in zip(*runs, strict=True)
        for pair in zip(before.losses, after.losses, strict=True)
    ]
    row["losses"] = max((abs(a - b) / abs(b) for b, a in pairs), default=None)
    return row


def line_of(row: dict[str, Any]) -> str:
    """A row of the table."""
    each = [
        f"{side['seconds']:>7.2f} ({side['low']:.2f} to {side['high']:.2f}), CPU {side['cpu']:.1f}"
        for side in (row["before"], row["after"])
    ]
    ratios = [
        f"{middle:.3f} ({least:.3f} to {most:.3f})"
        for middle, least, most in (row["ratio"], row["cpu ratio"])
    ]
    difference = row["losses"]
    losses = (
        "" if difference is None else "the same bits" if difference == 0 else f"differ by {difference:.1e}"
    )
    return f"{row['title']:<34} {each[0]:<38} {each[1]:<38} {ratios[0]:<24} {ratios[1]:<24} {losses}"


def main() -> None:
    """Run the cases asked for and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("before", type=Path, help="root of a checkout")
    parser.add_argument("after", type=Path, help="root of another")
    parser.add_argument("--storage", nargs="*", default=["none", "nf4"])
    parser.add_argument("--dtype", nargs="+", default=["fp32"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[256])
    parser.add_argument("--checkpointing", nargs="+", choices=["on", "off"], default=["off"])
    parser.add_argument(
        "--load", nargs="*", default=[], metavar="CASE", help="of load.py, with its small model"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    sides = (options.before.resolve(), options.after.resolve())
    head = f"{'':<34} {'before: s (quartiles), CPU s':<38} {'after':<38} {'ratio':<24} {'ratio of CPU':<24} losses"
    print(head, flush=True)
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for storage, dtype, tokens, checkpointing in itertools.product(
            options.storage, options.dtype, options.tokens, options.checkpointing
        ):
            setup = {
                "storage": storage,
                "dtype": dtype,
                "tokens": tokens,
                "checkpointing": checkpointing == "on",
                "steps": options.steps,
            }
            title = f"step, {storage} {dtype} 2 x {tokens}{' checkpointed' if setup['checkpointing'] else ''}"
            rows.append(compare(title, train_step(setup, options.threads), sides, options.rounds))
            print(line_of(rows[-1]), flush=True)
        for case in options.load:
            path = prepared(CASES[case].checkpoint, Path(scratch), small=True)
            if Path(path).is_dir():
                warm(path)
            rows.append(compare(f"load, {case}", load(case, path, options.threads), sides, options.rounds))
            print(line_of(rows[-1]), flush=True)
    text = json.dumps({"rows": rows, "threads": options.threads})
    if options.json:
        options.json.write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()

"""What `isotype run` costs a script after its first steps: the same raw loop under `python` and under `isotype run`.

Both processes live at the same time and take turns, a few steps each, so that whatever else the machine does hits
both alike; a pair of turns gives one ratio. The watched step and one more are left out. The model has no dropout and
the data are fixed: both must reach the same losses, to the last bit.

Run: python benchmarks/run_overhead.py [--steps 300] [--runs 3]. Prints a table and one line of JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import results

WARM_STEPS = 2
TURN = 5
CLOCKS = ("wall", "cpu")


def script(steps: int) -> None:
    """The raw loop, a small transformer of about 20 ms a step; waits for a line before each turn, then tells of it."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    torch.set_num_threads(1)
    layer = nn.TransformerEncoderLayer(128, 4, 256, dropout=0.0, batch_first=True)
    model = nn.Sequential(
        nn.Embedding(256, 128),
        nn.TransformerEncoder(layer, 3, enable_nested_tensor=False),
        nn.Linear(128, 256),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = torch.randint(0, 256, (4, 64))
    for count in [WARM_STEPS, *[TURN] * (steps // TURN)]:
        sys.stdin.readline()
        losses = []
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(count):
            loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss))
        told = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu, "losses": losses}
        print(json.dumps(told), flush=True)


@dataclass(frozen=True)
class Runner:
    """A running script that takes turns."""

    process: subprocess.Popen[str]

    def turn(self) -> dict[str, Any]:
        """Let it make its next steps: seconds by clock, losses."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.process.args!r} ended with {self.process.wait()}")
        told: dict[str, Any] = json.loads(line)
        return told


@contextlib.contextmanager
def runner(command: list[str], steps: int) -> Iterator[Runner]:
    """The script under `command`."""
    process = subprocess.Popen(
        [*command, __file__, "--script", "--steps", str(steps)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with process:
        try:
            yield Runner(process)
        finally:
            process.kill()


def compare(steps: int) -> dict[str, Any]:
    """One pair of runs: seconds of the first turn, step times and ratios of all others, whether the losses agree."""
    plain_command, run_command = [sys.executable], [sys.executable, "-m", "isotype.cli.run"]
    with runner(plain_command, steps) as plain, runner(run_command, steps) as watched:
        first = (plain.turn(), watched.turn())
        same = first[0]["losses"] == first[1]["losses"]
        turns: dict[str, list[tuple[float, float]]] = {clock: [] for clock in CLOCKS}
        for number in range(steps // TURN):
            # Who comes first changes, for the one after finds the other's caches.
            if number % 2:
                after, before = watched.turn(), plain.turn()
            else:
                before, after = plain.turn(), watched.turn()
            same = same and before["losses"] == after["losses"]
            for clock in CLOCKS:
                turns[clock].append((before[clock] / TURN, after[clock] / TURN))
    return {"first_s": first[1]["wall"], "same": same, "turns": turns}


def main() -> None:
    """Compare and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--script", action="store_true", help=argparse.SUPPRESS)
    options = results.parsed(parser)
    if options.script:
        script(options.steps)
        return
    runs = [compare(options.steps) for _ in range(options.runs)]
    result: dict[str, Any] = {
        "steps": options.steps,
        "runs": options.runs,
        "first_turn_s": statistics.median(run["first_s"] for run in runs),
        "same_losses": all(run["same"] for run in runs),
    }
    for clock in CLOCKS:
        turns = [turn for run in runs for turn in run["turns"][clock]]
        ratios = [after / before for before, after in turns]
        low, middle, high = statistics.quantiles(ratios, n=4)
        result[clock] = {
            "plain_ms": 1e3 * statistics.median(before for before, _ in turns),
            "run_ms": 1e3 * statistics.median(after for _, after in turns),
            "ratio": middle,
            "ratio_quartiles": [low, high],
            "ratio_by_run": [statistics.median(a / b for b, a in run["turns"][clock]) for run in runs],
        }
    show(result)
    if options.record:
        for clock in CLOCKS:
            row = result[clock]
            low, high = row["ratio_quartiles"]
            measures = results.measured(row, plain_ms="ms", run_ms="ms")
            measures["ratio"] = results.Measure(row["ratio"], "×", (low, high))
            measures["first"] = results.Measure(result["first_turn_s"], "s")
            measures["pairs"] = results.Measure(options.runs * (options.steps // TURN))
            measures["by_run"] = results.Measure(", ".join(f"{each:.4f}" for each in row["ratio_by_run"]))
            measures["losses"] = results.Measure("the same" if result["same_losses"] else "other")
            results.append(f"run-overhead/{clock}, {options.steps} steps", measures)


def show(result: dict[str, Any]) -> None:
    """A table and a line of JSON."""
    pairs = result["runs"] * (result["steps"] // TURN)
    print(f"{pairs} pairs of turns of {TURN} steps, {result['runs']} pairs of processes; medians")
    print("clock   python SCRIPT   isotype run SCRIPT   ratio (quartiles)           by pair of processes")
    for clock in CLOCKS:
        row = result[clock]
        low, high = row["ratio_quartiles"]
        spread = f"{row['ratio']:.4f} ({low:.3f} to {high:.3f})"
        by_run = ", ".join(f"{ratio:.4f}" for ratio in row["ratio_by_run"])
        print(f"{clock:<7} {row['plain_ms']:>10.3f} ms {row['run_ms']:>17.3f} ms   {spread:<27} {by_run}")
    print(
        f"first {WARM_STEPS} steps: {result['first_turn_s']:.2f} s with the look ahead; the losses are",
        end=" ",
    )
    print("the same to the last bit" if result["same_losses"] else "DIFFERENT")
    print(json.dumps(result))


if __name__ == "__main__":
    main()

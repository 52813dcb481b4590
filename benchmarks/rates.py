"""What published runs on GPUs reached, beside what `isotype plan` foresees for their settings; and the fit of what it foresees by.

`published.json` has the runs: model, card, settings, tokens a second and memory, with the source of each, what it says of the set-up and what it
leaves open. Part of them are fitted to, the others held back. Runs that cannot be compared say why.

`steps` traces the step of each run as a plan does, minutes in all, and writes what of it decides its time into `published_steps.jsonl`: products
by dtype, FLOPs and bytes; bytes and launches of the rest; the peak. `fit` prints the numbers of
`isotype.planning.rates.REACHED` that come nearest to the runs that are fitted to (the least mean of the absolute logarithm of the ratio), and
the spread, within which four of five of the others are. `table` prints foreseen beside published, and writes it into docs/plan.md.

A run that fuses nothing is traced with transformers' own operators (`--fuse False`). Nothing of a run's memory is fitted.

Run: python benchmarks/rates.py {steps,fit,table}. `table` ends with 1 where a run is off by more than 1.25 times in speed or 15 % in memory
and no reason stands beside it.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from isotype.planning.from_request import plan_of_request
from isotype.planning.rates import REACHED, Reached, with_rates
from isotype.planning.request import parse_request
from isotype.precision.devices.profile import device_profile
from isotype.records.memory import Memory
from isotype.records.request import Setup
from isotype.records.trace import Call, Trace
from isotype.rules.kit.costs import least_flops, step_time, traffic_of

HERE = Path(__file__).parent
PUBLISHED, STEPS, PAGE = (
    HERE / "published.json",
    HERE / "published_steps.jsonl",
    HERE.parent / "docs" / "plan.md",
)
BEGIN, END = "<!-- begin: published -->\n", "<!-- end: published -->\n"
SPEED, MEMORY = 1.25, 0.15
WITHIN = 0.8
"""The part of the held-back runs that the spread covers."""
FITTED = ("products", "falling", "ceiling", "launch")


@dataclass(frozen=True)
class Run:
    """A published run and its step as it is traced.

    Attributes:
        published: its entry in `published.json`.
        step: its line of `published_steps.jsonl`.
    """

    published: dict[str, Any]
    step: dict[str, Any]

    @property
    def short(self) -> str:
        """Source, model and method."""
        return f"{self.published['source']}: {self.published['model']} {self.published['method']}"

    @property
    def compared(self) -> bool:
        """Whether nothing speaks against comparing it."""
        return not self.published["not_compared"]

    @property
    def speed(self) -> float:
        """Tokens a second, as published."""
        return float(self.published["tokens_per_second"])

    def foreseen(self, reached: Reached) -> float:
        """Tokens a second by a plan."""
        run = self.published
        profile, _ = with_rates(device_profile(run["device"]), reached)
        setup = Setup(profile, None, False, run["optim"], torch.bfloat16)
        time = step_time(Trace(setup, self.calls, (), {}, Memory({})))
        assert time is not None
        return float(run["rows"] * run["length"] / time.traced_seconds)

    @cached_property
    def calls(self) -> tuple[Call, ...]:
        """Calls that take what those of the step do."""
        products = [
            Call(
                "aten.mm.default", "forward", "", "", (), ((dtype, (size // dtype.itemsize,)),), flops, count
            )
            for name, flops, size, count in self.step["products"]
            for dtype in (getattr(torch, name),)
        ]
        size, count = self.step["rest"]
        rest = Call("aten.mul.Tensor", "forward", "", "", (), ((torch.uint8, (size // count,)),), 0, count)
        return (*products, rest)

    @property
    def peak(self) -> float:
        """GiB, as foreseen."""
        return float(self.step["peak"]) / 2**30

    @property
    def memory_ratio(self) -> float | None:
        """Foreseen over published; None where that is not published."""
        gib = self.published["gib"]
        return None if gib is None else self.peak / float(gib)

    @property
    def off(self) -> tuple[str, ...]:
        """What of a run is off by more than it may: of `speed`, `memory`."""
        memory = self.memory_ratio
        slow = self.compared and abs(math.log(self.ratio(REACHED))) > math.log(SPEED)
        large = memory is not None and self.compared and abs(memory - 1) > MEMORY
        return ("speed",) * slow + ("memory",) * large

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why it is not compared, or is off; "" in the place of a reason that nobody has."""
        if not self.compared:
            return (f"The speed was not compared: {self.published['not_compared']}.",)
        return tuple(f"The {what} differs: {self.published[f'{what}_reason']}." for what in self.off)

    def ratio(self, reached: Reached) -> float:
        """Foreseen over published."""
        return self.foreseen(reached) / self.speed


@cache
def runs() -> tuple[Run, ...]:
    """The published runs with their steps."""
    known = {each["run"]: each for each in map(json.loads, STEPS.read_text(encoding="utf-8").splitlines())}
    return tuple(Run(run, known[name_of(run)]) for run in published()["runs"] if name_of(run) in known)


def published() -> dict[str, Any]:
    """Models, sources and runs."""
    found: dict[str, Any] = json.loads(PUBLISHED.read_text(encoding="utf-8"))
    return found


def name_of(run: dict[str, Any]) -> str:
    """What a run is known by."""
    return (
        f"{run['source']}: {run['method']}, {run['model']}, {run['device']}, {run['rows']} × {run['length']}"
    )


# Steps


def write_steps() -> None:
    """Trace the runs whose steps are not known yet, each as a plan does."""
    lines = STEPS.read_text(encoding="utf-8").splitlines() if STEPS.exists() else []
    known = {json.loads(line)["run"] for line in lines}
    found = published()
    for run in found["runs"]:
        if name_of(run) not in known:
            line = json.dumps({"run": name_of(run), **step_of(run, found["models"][run["model"]])})
            print(f"{name_of(run)}: {json.loads(line)['peak'] / 2**30:.2f} GiB", flush=True)
            with STEPS.open("a", encoding="utf-8") as file:
                file.write(line + "\n")


def step_of(run: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """What decides the time of a run's step, and its peak in bytes."""
    traces: list[Trace] = []

    def seen(trace: Trace) -> Any:
        traces.append(trace)
        return step_time(trace)

    with tempfile.TemporaryDirectory() as folder, patch("isotype.planning.steps.step_time", seen):
        source = Path(folder) / "config.json"
        source.write_text(json.dumps({**config, "dtype": "bfloat16"}), encoding="utf-8")
        request, _ = parse_request([str(source), *arguments_of(run)])
        (row,) = plan_of_request(replace(request, quantize=False, longest=False)).rows
    return {**summary(traces[-1]), "peak": row.peak}


def arguments_of(run: dict[str, Any]) -> list[str]:
    """The arguments of a plan with a run's settings."""
    rows, length, lora = run["rows"], run["length"], run["lora"]
    words = f"--device {run['device']} --rows {rows} --length {length} --tokens-per-step {rows * length} --max-memory 1000GiB"
    words += f" --optim {run['optim']} --gradient_checkpointing {run['checkpointing']}"
    words += f" --quantization {run['quantization']}" if run["quantization"] else ""
    words += "" if run["fused"] else " --fuse False"
    if lora is None:
        # All of these runs train bfloat16 weights.
        return [*words.split(), "--use_peft", "False", "--master_dtype", "bfloat16"]
    words += f" --lora_r {lora['r']} --lora_dropout {lora['dropout']} --lora_target_modules {lora['targets']}"
    return words.split()


def summary(trace: Trace) -> dict[str, Any]:
    """Its calls by what decides their time."""
    products: Counter[tuple[str, int, int]] = Counter()
    rest = [0, 0]
    for call in trace.calls:
        size, dtype = traffic_of(trace, call), call.run_dtype
        if dtype is not None:
            name = str(dtype).removeprefix("torch.")
            products[name, round(least_flops(call) / call.repeats), size // call.repeats] += call.repeats
        elif size:
            rest[0] += size
            rest[1] += call.repeats
    return {"products": [[*key, count] for key, count in products.items()], "rest": rest}


# Fit


def fitted() -> Reached:
    """The numbers that come nearest to the runs that are fitted to, and the spread of the others."""

    def reached(numbers: Sequence[float]) -> Reached:
        return replace(REACHED, **dict(zip(FITTED, numbers, strict=True)))

    def loss(numbers: Sequence[float]) -> float:
        return loss_of(reached(numbers))

    best = [0.75, 0.25, 0.9, 10e-6]
    step = 0.3
    while step > 0.004:
        tried = [
            [each * (1 + way * step * (at == index)) for index, each in enumerate(best)]
            for at in range(4)
            for way in (-1, 1)
        ]
        nearest = min(tried, key=loss)
        if loss(nearest) < loss(best):
            best = nearest
        else:
            step /= 2
    numbers = [float(f"{each:.2g}") for each in best]
    return replace(reached(numbers), spread=spread_of(reached(numbers)))


def loss_of(reached: Reached) -> float:
    """The mean of how far, as the logarithm of the ratio, the runs are off that are fitted to."""
    some = [
        abs(math.log(run.ratio(reached))) for run in runs() if run.compared and not run.published["held_back"]
    ]
    return sum(some) / len(some)


def spread_of(reached: Reached) -> float:
    """How many times off, at most, the nearest `WITHIN` of the runs are that are held back."""
    off = sorted(
        abs(math.log(run.ratio(reached))) for run in runs() if run.compared and run.published["held_back"]
    )
    return math.ceil(20 * math.exp(off[math.ceil(WITHIN * len(off)) - 1])) / 20


# Table


def table() -> str:
    """Foreseen beside published as Markdown, with what is off and why, and the sources."""
    lines = [
        *model_lines(REACHED),
        "",
        "| run | card | sequences × tokens | tokens/s published | predicted | predicted / published | GiB published | predicted"
        " | predicted / published | notes |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    notes: dict[str, int] = {}
    for run in runs():
        each, memory = run.published, run.memory_ratio
        speed = (f"{run.foreseen(REACHED):,.0f}", f"{run.ratio(REACHED):.2f}") if run.compared else ("", "")
        peak = (
            (f"{each['gib']:g}", f"{run.peak:.1f}", f"{memory:.2f}")
            if memory
            else ("", f"{run.peak:.1f}", "")
        )
        marks = "held back" if each["held_back"] else "fitted to"
        marks += "" if each["fused"] else ", unfused"
        cells = [
            f"{run.short} ({marks})", each["device"], f"{each['rows']} × {each['length']:,}",
            f"{run.speed:,.0f}", *speed, *peak,
            ", ".join(str(notes.setdefault(reason, len(notes) + 1)) for reason in run.reasons),
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    off = sorted(abs(math.log(run.ratio(REACHED))) for run in held())
    within = sum(error <= math.log(REACHED.spread) for error in off)
    lines += [
        "",
        f"Of the {len(off)} held-back runs, {within} are within the range that a plan prints; for half of them, the predicted speed"
        f" is wrong by at most {math.expm1(off[len(off) // 2]):.0%}. Notes:".replace("%", " %"),
        "",
        *(f"{number}. {reason}" for reason, number in notes.items()),
        "",
        "Sources:",
        "",
    ]
    for name, source in published()["sources"].items():
        lines.append(
            f"- [{name}]({source['url']}): {source['says']}. The source does not state: {source['leaves_open']}."
        )
    return "\n".join(lines) + "\n"


def model_lines(reached: Reached) -> list[str]:
    """The numbers of the model in words."""

    def share(name: str) -> str:
        peaks = device_profile(name).peak_flops
        return f"{reached.rates(peaks)[torch.float16] / peaks[torch.float16]:.0%}".replace("%", " %")

    return [
        f"The fitted numbers: matrix products reach {share('t4')} of the peak rate on a T4, {share('a100-80g')} on an A100, {share('h100')} on an H100, and "
        f"{share('rtx4090')} on an RTX 4090. A launch takes "
        f"{1e6 * reached.launch:.0f} µs. A plan prints the range from {1 / reached.spread:.2g} to {reached.spread:.3g} times the predicted speed.",
    ]


def held() -> list[Run]:
    """Runs that were not fitted to and can be compared."""
    return [run for run in runs() if run.compared and run.published["held_back"]]


def unexplained() -> list[str]:
    """Runs that are off without a reason."""
    return [
        f"{name_of(run.published)}: {what}"
        for run in runs()
        for what in run.off
        if not run.published[f"{what}_reason"]
    ]


def write_table() -> int:
    """Print the table and put it into the page."""
    text, page = table(), PAGE.read_text(encoding="utf-8")
    print(text)
    before, after = page.partition(BEGIN)[0], page.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}{text}{END}{after}", encoding="utf-8")
    missing = unexplained()
    print("\n".join(missing))
    return 1 if missing else 0


def main() -> int:
    """Do what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("part", choices=("steps", "fit", "table"))
    part = parser.parse_args().part
    if part == "steps":
        write_steps()
    elif part == "fit":
        print(fitted())
    else:
        return write_table()
    return 0


if __name__ == "__main__":
    sys.exit(main())

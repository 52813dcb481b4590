"""The first hour on a GPU, in one call, on a machine that may have no network: a line of results as soon as there is one.

Parts, in this order:

0. machine: the device, the versions, whether every library can be imported;
1. smoke: sft in nf4, bf16, int8, fp16 and fp32, sharded by FSDP2, dpo and grpo of a tiny model, beside the same on the CPU; resume, merge, chat; doctor;
   which kernels are taken and why;
2. contracts: what each operator accepts on this device (`python -m isotype.contracts.measure`);
3. exactness: fused layers and every kernel against float64, beside PEFT's own; models of several dtypes in turn and on two streams; the
   host's time of small batches;
4. speed: `benchmarks/gpu_train.py`, a model of Llama-3-8B's shape by isotype, TRL, TRL with Liger's kernels, and bare loops: nf4 and bf16,
   gradient checkpointing on and off, 4 x 2048 and 2 x 512 tokens; the kernels of one step;
5. memory: the peaks that a check foresees of (4), beside the real ones;
6. agreement: 150 cases of `benchmarks/agreement.py`;
7. suite: the tests' core with CUDA hidden, and what runs on a GPU with it in sight.

Each part, and each peer of a part, is a process group of its own with a limit of its own; what a job started is killed with it. What fails or
runs out of time says so in a line, and the others go on. `gpu.jsonl` has all results, `gpu.txt` the lines that are printed, in `--out`;
models, checkpoints and logs lie in `--work`. CONTRIBUTING.md says how to take it to a machine that lacks the libraries. On a CPU
(`--device cpu --small`) everything runs in toy sizes, to see that it does; its figures mean nothing there.

Where a card is lent for half an hour in commands of ten minutes, four calls fit into both, what decides most first:

    --call 1    machine, smoke                 300 s    repair what breaks before the rest
    --call 2    speed, memory                  590 s    isotype, TRL and TRL + Liger before the loops; the peaks need the same call's steps
    --call 3    contracts, exactness           330 s
    --call 4    agreement, suite               400 s

They are independent: each makes the models that it needs, so that none is lost with the machine between two calls. `--call 2 --layers 16` halves
the model where the first peers take long.

Run: python benchmarks/gpu.py [--device cuda] [--out build/gpu] [--work build/gpu-work] [--call N] [--parts machine smoke …]
     [--jobs "nf4 isotype" …] [--budget 540] [--layers 32] [--small]
Prints a line for each result and each job, and a summary as JSON; ends with 1 where anything failed.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from gpu_parts import agreement, contracts, exactness, machine, smoke, speed, suite  # noqa: E402
from gpu_parts.commands import Options  # noqa: E402
from gpu_parts.runner import Job, Results, Row, Runner, summary  # noqa: E402


@dataclass(frozen=True)
class Part:
    """Jobs that belong together.

    Attributes:
        limits: job -> seconds that it may take.
        run: yields the results of a job; None where the jobs are commands of their own.
        parallel: how many run at a time on a GPU; what is timed runs alone.
    """

    limits: Callable[[Options], dict[str, float]]
    run: Callable[[Options, str], Iterator[Row]] | None
    parallel: int = 1


PARTS: dict[str, Part] = {
    "machine": Part(machine.limits, machine.run),
    "smoke": Part(smoke.limits, smoke.run, parallel=4),
    "contracts": Part(contracts.limits, contracts.run),
    "exactness": Part(exactness.limits, exactness.run),
    "speed": Part(speed.limits, None),
    "memory": Part(speed.memory_limits, speed.memory),
    "agreement": Part(agreement.limits, agreement.run),
    "suite": Part(suite.limits, suite.run),
}


@dataclass(frozen=True)
class Call:
    """Parts that are run by one command, within so many seconds."""

    parts: tuple[str, ...]
    budget: float


CALLS = (
    Call(("machine", "smoke"), 300.0),
    Call(("speed", "memory"), 590.0),
    Call(("contracts", "exactness"), 330.0),
    Call(("agreement", "suite"), 400.0),
)
"""In order; together less than half an hour, with the start of a machine."""


def jobs_of(name: str, options: Options, only: Sequence[str] = ()) -> list[Job]:
    """The jobs of a part, in order; `only`: of all parts these."""
    part = PARTS[name]
    found = []
    for job, limit in part.limits(options).items():
        if part.run is None:
            command = speed.commands(options)[job]
        else:
            command = [
                sys.executable,
                str(Path(__file__).resolve()),
                "--job",
                name,
                job,
                json.dumps(asdict(options)),
            ]
        if not only or job in only:
            patience = _SLOW if options.small else 1.0
            found.append(Job(name, job, tuple(command), limit * patience, _ENVIRONMENT))
    return found


_SLOW = 5.0
"""Times the limits of a GPU machine that a rehearsal on any CPU may take."""
_ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}


def parser() -> argparse.ArgumentParser:
    """Of the arguments."""
    found = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    found.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    found.add_argument("--out", type=Path, default=ROOT / "build" / "gpu", help="results: few and small")
    found.add_argument(
        "--work", type=Path, default=ROOT / "build" / "gpu-work", help="models, checkpoints, logs: 20 GB"
    )
    found.add_argument("--parts", nargs="+", choices=PARTS, help="all of them by default")
    numbers = range(1, len(CALLS) + 1)
    found.add_argument(
        "--call", type=int, choices=numbers, help="the parts and the budget of a call, see above"
    )
    found.add_argument("--jobs", nargs="+", default=[], metavar="JOB", help="of these parts only these jobs")
    found.add_argument(
        "--small", action="store_true", help="toy sizes and short samples: to see that everything runs"
    )
    found.add_argument(
        "--layers", type=int, default=32, help="of the model of part speed; 16 take half the time"
    )
    found.add_argument(
        "--budget", type=float, metavar="SECONDS", help="for all parts together (540, or the call's)"
    )
    found.add_argument("--job", nargs=3, help=argparse.SUPPRESS)
    return found


def run_job(part: str, name: str, options: Options) -> int:
    """Run one job in this process, and print its results."""
    run = PARTS[part].run
    if run is None:
        raise ValueError(f"the jobs of {part} are commands of their own")
    for row in run(options, name):
        print(json.dumps(row), flush=True)
    return 0


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts; 1 where a job did not end well or a result is wrong."""
    given = parser().parse_args(arguments)
    call = Call(tuple(PARTS), 540.0) if given.call is None else CALLS[given.call - 1]
    parts, budget = given.parts or call.parts, given.budget or call.budget
    if given.job:
        part, name, options = given.job
        return run_job(part, name, Options(**json.loads(options)))
    signal.signal(signal.SIGTERM, _stop)
    options = Options(
        given.device, str(given.out.resolve()), str(given.work.resolve()), given.small, given.layers
    )
    results = Results(given.out)
    runner = Runner(results, given.work / "logs", budget, ROOT)
    try:
        for part in parts:
            parallel = PARTS[part].parallel if given.device == "cuda" else 1
            runner.run(jobs_of(part, options, given.jobs), parallel)
    finally:
        counts = summary(results.rows)
        for part, ended in counts.items():
            results.say(f"{part:<10} " + ", ".join(f"{count} {how}" for how, count in ended.items()))
        results.say(json.dumps({"device": given.device, "parts": counts}))
    good = {"done", "results"}
    return int(any(set(ended) - good for ended in counts.values()))


if __name__ == "__main__":
    sys.exit(main())

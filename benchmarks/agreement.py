"""Prediction against reality: what `isotype.check` says of a step, and how the real step ends, on this CPU or on a GPU.

Every architecture of the zoo (tests/zoo) meets faults of every kind (tests/faults) in float32, bfloat16 and float16,
plain and under autocast. For each case the real step is run, and the preflight is asked about the same set-up. Compared
are the verdict (runs or crashes), the phase, and in the forward the failing module.

- missed crash: the real step crashes and the preflight finds no error;
- false alarm: the real step runs and the preflight finds an error, or says that the update turns a weight into NaN
  that stays finite;
- elsewhere: both crash, in another phase or (in the forward) in another module;
- lost: the preflight could not follow the step to its end (or raised) and found no error.

A real crash counts when its message is about dtypes; another one drops the case, and is listed.

Run: python benchmarks/agreement.py [--every 5] [--jobs 2] [--architectures a,b] [--faults a,b] [--healthy] [--real-only]
     [--limit N] [--device cuda] [--seconds-a-case 600] [--real-cache build/agreement-real.json] [--json PATH] [--list]
Prints tables, every disagreement and one line of JSON; exits with 1 below 99.5 % agreement (with --healthy: also at one
false alarm). Real outcomes are kept in the cache, since they change with the libraries and the faults only.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import re
import sys
import time
import warnings
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# Before torch is loaded: tiny models are slower on several threads, and the jobs share the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from tests.faults import FAULTS, HEALTHY, Setup  # noqa: E402
from tests.prediction import check_of, own_name, predicted_end  # noqa: E402
from tests.reality import real_step  # noqa: E402
from tests.zoo import ARCHITECTURES, LEFT_OUT  # noqa: E402

import results  # noqa: E402
from isotype.core.dtypes import parse_dtype  # noqa: E402
from workers import Lost, run_all  # noqa: E402

AGREEMENT = 0.995
# (dtype of the model, autocast dtype)
COMBINATIONS: tuple[tuple[str, str | None], ...] = (
    ("float32", None),
    ("float32", "bfloat16"),
    ("float32", "float16"),
    ("bfloat16", None),
    ("bfloat16", "bfloat16"),
    ("float16", None),
    ("float16", "float16"),
)
ABOUT_DTYPES = re.compile(
    r"dtype|scalar ?type|data type|Half|BFloat16|Float\b|Double|not implemented for|unscale|Byte|bf16|fp16"
    r"|Input type .* should be the same|shapes cannot be multiplied|dimensions of batch2",  # the last two: packed bytes used as a weight
    re.IGNORECASE,
)

BROKEN = re.compile(
    r"^(?:AcceleratorError|RuntimeError): .*(?:CUDA|HIP) error|device-side assert|illegal memory access"
)
"""Ends of real steps after which a process can use its GPU no more."""


@dataclass(frozen=True)
class Case:
    """One set-up: names only, so that it can be sent to another process and written down."""

    architecture: str
    fault: str
    dtype: str
    autocast: str | None
    device: str = "cpu"

    @property
    def key(self) -> str:
        """Its name in the cache and in the list of disagreements."""
        device = "" if self.device == "cpu" else f" {self.device}"
        return f"{self.architecture} {self.fault} {self.dtype} {self.autocast or 'plain'}{device}"


@dataclass(frozen=True)
class End:
    """How a step ended, really or in the prediction.

    Attributes:
        verdict: `runs`, `crashes`; `lost`, `corrupts` (prediction); `absent` (no place for the fault), `dropped` (reality).
        phase, module: of the crash.
        detail: the error, or the codes and messages of the findings.
        injected: what the fault did.
        seconds: of the step itself.
        nonfinite: the trained parameters that a real step left with NaN or infinity.
    """

    verdict: str
    phase: str = ""
    module: str = ""
    detail: str = ""
    injected: str = ""
    seconds: float = 0.0
    nonfinite: Sequence[str] = ()


def prepared(case: Case) -> tuple[Setup, str | None]:
    """The set-up of a case with its fault in it, and what the fault did (None: no place for it)."""
    architecture = ARCHITECTURES[case.architecture]
    dtype = parse_dtype(case.dtype)
    setup = Setup(
        model=architecture.build(dtype),
        batch=architecture.batch(dtype=dtype),
        dtype=dtype,
        autocast=parse_dtype(case.autocast) if case.autocast else None,
    )
    fault = HEALTHY if case.fault == HEALTHY.name else FAULTS[case.fault]
    injected = fault.inject(setup)
    if case.device != "cpu":
        setup.model.to(case.device)
        setup.batch = {
            name: value.to(case.device) if isinstance(value, torch.Tensor) else value
            for name, value in setup.batch.items()
        }
    return setup, injected


def really(case: Case) -> End:
    """Run the real step."""
    try:
        setup, injected = prepared(case)
    except Exception as error:  # noqa: BLE001 - a library that refuses the fault by itself: said in the report
        return End("dropped", detail=f"not injected: {type(error).__name__}: {error}"[:300])
    if injected is None:
        return End("absent")
    started = time.perf_counter()
    outcome = real_step(
        setup.model,
        setup.batch,
        autocast=setup.autocast,
        scaler=setup.scaler,
        optimizer=setup.optimizer,
        device=case.device,
    )
    seconds = time.perf_counter() - started
    if outcome.error is None:
        return End("runs", injected=injected, seconds=seconds, nonfinite=outcome.nonfinite)
    detail = f"{type(outcome.error).__name__}: {outcome.error}"[:400]
    verdict = "crashes" if ABOUT_DTYPES.search(detail) else "dropped"
    return End(verdict, outcome.phase, outcome.module, detail, injected, seconds)


def predicted(case: Case) -> End:
    """Ask the preflight."""
    setup, _ = prepared(case)
    started = time.perf_counter()
    try:
        report = check_of(setup, case.device)
    except Exception as error:  # noqa: BLE001 - a check that raises is one disagreement, not the end of the run
        return End("lost", detail=f"check raised {type(error).__name__}: {error}"[:400])
    seconds = time.perf_counter() - started
    verdict, phase, module = predicted_end(report)
    failure = report.trace.failure
    if verdict == "lost" and failure is not None:
        detail = f"{failure.error} at {failure.source}"
    else:
        detail = "; ".join(f"{finding.code} {finding.message}" for finding in report.errors)
    return End(verdict, phase, module, detail[:400], "", seconds)


def judged(real: End, prediction: End) -> str:
    """`agree`, or how they disagree."""
    if prediction.verdict == "lost":
        return "lost"
    if prediction.verdict == "corrupts" and real.verdict == "runs":
        named = own_name(prediction.module) in {own_name(name.rpartition(".")[0]) for name in real.nonfinite}
        return "agree" if named else "false alarm"
    if real.verdict != prediction.verdict:
        return "missed crash" if real.verdict == "crashes" else "false alarm"
    if real.verdict == "crashes":
        same_module = own_name(real.module) == own_name(prediction.module) or real.phase != "forward"
        if real.phase != prediction.phase or not same_module:
            return "elsewhere"
    return "agree"


def chosen_cases(arguments: argparse.Namespace) -> list[Case]:
    """The cases to run: of each architecture every nth fault, in a combination drawn by their names."""
    cases = []
    faults = [HEALTHY.name] if arguments.healthy else (arguments.faults or list(FAULTS))
    every = 1 if arguments.healthy or arguments.faults else arguments.every
    for row, architecture in enumerate(ARCHITECTURES):
        if arguments.architectures and architecture not in arguments.architectures:
            continue
        for column, fault in enumerate(faults):
            rare = fault in FAULTS and FAULTS[fault].rare
            if (row + column) % every and not rare:
                continue
            draw = zlib.crc32(f"{architecture} {fault}".encode()) % len(COMBINATIONS)
            combinations = COMBINATIONS if arguments.healthy else (COMBINATIONS[draw],)
            cases += [
                Case(architecture, fault, dtype, autocast, arguments.device)
                for dtype, autocast in combinations
            ]
    wanted = min(arguments.limit or len(cases), len(cases))
    return [cases[place * len(cases) // wanted] for place in range(wanted)]


def _digest() -> str:
    """What the real outcomes depend on: the libraries, the zoo and the faults."""
    import peft
    import transformers

    versions = f"{torch.__version__} {transformers.__version__} {peft.__version__}"
    sources = sorted([*(ROOT / "tests/zoo").glob("*.py"), *(ROOT / "tests/faults").glob("*.py")])
    sources.append(ROOT / "tests/reality.py")
    return hashlib.sha256(versions.encode() + b"".join(path.read_bytes() for path in sources)).hexdigest()


def _cached(path: Path, digest: str, keep_stale: bool) -> dict[str, End]:
    if not path.exists():
        return {}
    stored = json.loads(path.read_text())
    if stored["digest"] != digest and not keep_stale:
        print(
            "the zoo, the faults or the libraries have changed: real outcomes are run again", file=sys.stderr
        )
        return {}
    return {key: End(**end) for key, end in stored["outcomes"].items()}


def _store(path: Path, digest: str, outcomes: dict[str, End]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"digest": digest, "outcomes": {key: asdict(end) for key, end in outcomes.items()}})
    scratch = path.with_suffix(".tmp")
    scratch.write_text(text)
    scratch.replace(path)


def _silence() -> None:
    """Tiny random models make libraries warn about everything; what counts here is how the step ends."""
    import transformers

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    transformers.logging.set_verbosity_error()


def _all_of(
    work: Callable[[Case], End], cases: Sequence[Case], options: argparse.Namespace, title: str
) -> Iterable[tuple[Case, End]]:
    """`work` of every case, as they come, with a line of progress; a worker that a case has broken is replaced."""
    started = time.perf_counter()
    results = run_all(
        work, cases, options.jobs, prepare=_silence, broken=is_broken, seconds=options.seconds_a_case
    )
    for done, (place, result) in enumerate(results, 1):
        left = (time.perf_counter() - started) / done * (len(cases) - done)
        if done % 25 == 0 or done == len(cases):
            line = f"\r{title} {done}/{len(cases)}, {left:.0f} s left   "
            print(line, end="", file=sys.stderr, flush=True)
        yield cases[place], lost_end(work, result) if isinstance(result, Lost) else result
    print(file=sys.stderr)


def is_broken(end: End) -> bool:
    """Whether the step has broken its process's GPU: after an assertion there every later call fails."""
    return bool(BROKEN.search(end.detail))


def lost_end(work: Callable[[Case], End], lost: Lost) -> End:
    """The end of a case whose process has died or was killed: no verdict of a real step, a lost prediction."""
    return End("dropped" if work is really else "lost", detail=lost.reason)


def real_outcomes(cases: Sequence[Case], arguments: argparse.Namespace) -> dict[str, End]:
    """The real end of each case, from the cache where it is known."""
    digest = _digest()
    outcomes = _cached(arguments.real_cache, digest, arguments.keep_stale)
    missing = [case for case in cases if case.key not in outcomes]
    if missing:
        for count, (case, end) in enumerate(_all_of(really, missing, arguments, "real steps"), 1):
            outcomes[case.key] = end
            if count % 200 == 0:
                _store(arguments.real_cache, digest, outcomes)
        _store(arguments.real_cache, digest, outcomes)
    return outcomes


@dataclass(frozen=True)
class Judged:
    """One compared case."""

    case: Case
    real: End
    prediction: End
    result: str


RESULTS = ("agree", "missed crash", "false alarm", "elsewhere", "lost")


def _table(title: str, groups: dict[str, list[Judged]]) -> None:
    print(f"\n{title:<26}{'cases':>7}{'crash':>7}" + "".join(f"{name:>14}" for name in RESULTS))
    for name, rows in sorted(groups.items()):
        counts = Counter(row.result for row in rows)
        crashes = sum(row.real.verdict == "crashes" for row in rows)
        line = "".join(f"{counts[result] or '.':>14}" for result in RESULTS)
        print(f"{name:<26}{len(rows):>7}{crashes:>7}{line}")


def _show_real(cases: Sequence[Case], outcomes: dict[str, End]) -> None:
    """Per fault: how the real steps end."""
    verdicts = ("runs", "crashes", "absent", "dropped")
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for case in cases:
        counts[case.fault][outcomes[case.key].verdict] += 1
    print(f"{'fault':<26}" + "".join(f"{verdict:>10}" for verdict in verdicts))
    for fault, of_fault in counts.items():
        print(f"{fault:<26}" + "".join(f"{of_fault[verdict] or '.':>10}" for verdict in verdicts))
    total = sum(counts.values(), Counter())
    print(f"{'all':<26}" + "".join(f"{total[verdict]:>10}" for verdict in verdicts))
    for case in cases:
        end = outcomes[case.key]
        if end.verdict == "dropped":
            print(f"dropped: {case.key}: {end.detail}")
        elif end.verdict == "crashes" and case.fault == HEALTHY.name:
            print(f"crashes by itself: {case.key}: {end.phase} {end.module} {end.detail}")


def _show(rows: Sequence[Judged]) -> None:
    by_fault: dict[str, list[Judged]] = defaultdict(list)
    by_family: dict[str, list[Judged]] = defaultdict(list)
    by_setting: dict[str, list[Judged]] = defaultdict(list)
    for row in rows:
        by_fault[row.case.fault].append(row)
        by_family[ARCHITECTURES[row.case.architecture].family].append(row)
        by_setting[f"{row.case.dtype}, {row.case.autocast or 'plain'}"].append(row)
    _table("fault", by_fault)
    _table("family", by_family)
    _table("model, autocast", by_setting)
    _table("all", {"": list(rows)})
    for row in sorted(rows, key=lambda row: (row.result, row.case.fault)):
        if row.result != "agree":
            print(f"\n{row.result}: {row.case.key}   ({row.real.injected})")
            for name, end in (("real", row.real), ("said", row.prediction)):
                print(f"  {name}  {end.verdict} {end.phase} {end.module}  {end.detail}")


def main() -> int:
    """Compare, print, and say by the exit code whether enough of it agrees."""
    arguments = _arguments()
    if arguments.list:
        for architecture in ARCHITECTURES.values():
            print(f"{architecture.family:<18}{architecture.name}")
        for name, reason in LEFT_OUT.items():
            print(f"{'left out':<18}{name}: {reason}")
        return 0
    _silence()
    cases = chosen_cases(arguments)
    outcomes = real_outcomes(cases, arguments)
    _show_real(cases, outcomes)
    if arguments.real_only:
        return 0
    counted = [case for case in cases if outcomes[case.key].verdict in ("runs", "crashes")]
    rows = [
        Judged(case, outcomes[case.key], end, judged(outcomes[case.key], end))
        for case, end in _all_of(predicted, counted, arguments, "predictions")
    ]
    _show(rows)
    share = sum(row.result == "agree" for row in rows) / max(1, len(rows))
    summary = {
        "cases": len(rows),
        "agreement": round(share, 5),
        "results": dict(Counter(row.result for row in rows)),
        "crashes": sum(row.real.verdict == "crashes" for row in rows),
        "architectures": len({row.case.architecture for row in rows}),
        "faults": len({row.case.fault for row in rows}),
        "seconds": round(sum(row.prediction.seconds for row in rows), 1),
        "torch": torch.__version__,
    }
    print(json.dumps(summary))
    if arguments.record:
        keep(rows, summary, arguments.healthy)
    if arguments.json:
        arguments.json.write_text(json.dumps({**summary, "rows": [asdict(row) for row in rows]}, indent=1))
    alarmed = arguments.healthy and any(row.result in ("false alarm", "lost") for row in rows)
    return 0 if rows and share >= AGREEMENT and not alarmed else 1


def keep(rows: Sequence[Judged], summary: dict[str, Any], healthy: bool) -> None:
    """Add a row a family, and all together, to the file of results."""
    families: dict[str, list[Judged]] = defaultdict(list)
    for row in rows:
        families[ARCHITECTURES[row.case.architecture].family].append(row)
    table = "agreement-healthy" if healthy else "agreement"
    for family, some in [*sorted(families.items()), ("all", list(rows))]:
        counts = Counter(row.result for row in some)
        counts |= Counter(cases=len(some), crashes=sum(row.real.verdict == "crashes" for row in some))
        names = ("cases", "crashes", *RESULTS)
        measures = {name.replace(" ", "_"): results.Measure(counts[name]) for name in names}
        if family == "all":
            measures |= results.measured(summary, agreement="", architectures="", faults="")
        results.append(f"{table}/{family}", measures)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = lambda text: text.split(",")  # noqa: E731 - the type of two options
    parser.add_argument("--architectures", type=names, default=None)
    parser.add_argument(
        "--faults", type=names, default=None, help="all of their cases, on every architecture"
    )
    parser.add_argument("--device", default="cpu", help="where the steps run: cpu, cuda, xpu")
    parser.add_argument("--every", type=int, default=5, help="each architecture meets every nth fault")
    parser.add_argument("--healthy", action="store_true", help="no fault, in every dtype, plain and autocast")
    parser.add_argument(
        "--limit", type=int, default=None, help="so many cases, spread evenly over all of them"
    )
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument(
        "--seconds-a-case", type=float, default=600.0, help="a process that takes longer is killed"
    )
    parser.add_argument("--real-only", action="store_true", help="only run and keep the real steps")
    parser.add_argument("--real-cache", type=Path, default=ROOT / "build/agreement-real.json")
    parser.add_argument(
        "--keep-stale", action="store_true", help="trust the cache after changes to zoo or faults"
    )
    parser.add_argument("--json", type=Path, default=None, help="write every case to this file")
    parser.add_argument("--list", action="store_true", help="the architectures, and what is left out and why")
    return results.parsed(parser, "architectures", "faults", "every", "limit", "real_only")


if __name__ == "__main__":
    sys.exit(main())

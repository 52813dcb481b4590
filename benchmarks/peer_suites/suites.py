"""Other people's tests, each file twice in processes of its own: as they are, and with everything fused."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# PEFT's tests by what they are about. Those of other methods, of GPUs and of the hub itself are not among them.
PEFT_FILES = (
    "test_custom_models.py",
    "test_decoder_models.py",
    "test_encoder_decoder_models.py",
    "test_feature_extraction_models.py",
    "test_seq_classifier.py",
    "test_token_classification_qa.py",
    "test_initialization.py",
    "test_low_level_api.py",
    "test_mixed.py",
    "test_target_parameters.py",
    "test_lora_variants.py",
    "test_arrow.py",
    "test_xlora.py",
    "test_torch_compile.py",
    "test_tuners_utils.py",
    "test_lora_conversion.py",
    "test_lora_intruders.py",
    "test_lora_ga.py",
    "test_loraplus.py",
    "test_lorafa.py",
    "test_bdlora.py",
    "test_trainable_tokens.py",
    "test_integrations.py",
    "test_helpers.py",
    "test_other.py",
)
TRL_FILES = (
    "test_sft_trainer.py",
    "test_dpo_trainer.py",
    "test_kto_trainer.py",
    "test_grpo_trainer.py",
    "test_rloo_trainer.py",
    "test_reward_trainer.py",
)
OUTCOMES = ("passed", "failed", "skipped", "lost")
COLUMNS = (*OUTCOMES, "broken", "rounding")
_WHOLE = (0, 1, 5)
"""pytest's status where all tests passed, some failed, none was chosen."""


@dataclass(frozen=True)
class Comparison:
    """How the tests of one file ended.

    Attributes:
        plain, fused: test -> (outcome, reason).
        stopped: why pytest did not come to the end of the file, of each run that did not.
        tolerant: the same of the tests that fail fused, once more and fused, where float32 results may differ by a rounding
            (`peer_suites.plugin` says by how much).
    """

    file: str
    plain: Mapping[str, tuple[str, str]]
    fused: Mapping[str, tuple[str, str]]
    stopped: tuple[str, ...] = ()
    tolerant: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    @property
    def changed(self) -> dict[str, str]:
        """The tests that pass, and fail or are lost where everything is fused -> why."""
        passed = [test for test, (outcome, _) in self.plain.items() if outcome == "passed"]
        ends = {test: self.fused.get(test, ("lost", "it did not end")) for test in passed}
        return {test: reason for test, (outcome, reason) in ends.items() if outcome != "passed"}

    @property
    def rounding(self) -> dict[str, str]:
        """Those of `changed` that pass where results may differ by a rounding -> by how much they do."""
        ends = {test: self.tolerant.get(test, ("", "")) for test in self.changed}
        return {test: reason for test, (outcome, reason) in ends.items() if outcome == "passed"}

    @property
    def broken(self) -> dict[str, str]:
        """Those of `changed` that do not."""
        return {test: reason for test, reason in self.changed.items() if test not in self.rounding}

    @property
    def good(self) -> bool:
        """Whether both runs came to the end of the file, and fusing broke nothing."""
        return not self.stopped and not self.broken

    @property
    def unlike(self) -> dict[str, tuple[str, str]]:
        """The tests that fail both ways, each for another reason -> both reasons."""
        failed = {test: reason for test, (outcome, reason) in self.plain.items() if outcome == "failed"}
        pairs = {test: (reason, self.fused.get(test, ("", ""))[1]) for test, reason in failed.items()}
        return {test: pair for test, pair in pairs.items() if pair[0] != pair[1]}


def compare(
    tests: Path,
    files: Iterable[str],
    environment: Mapping[str, str],
    expression: str,
    jobs: int,
    seconds: float,
    every: int = 1,
    first: int = 0,
) -> list[Comparison]:
    """Run every nth test of `files` in the folder `tests` twice, from number `first` on; a line for each file, below it what fusing alone changes."""
    files = [name for name in files if (tests / name).exists()]
    if not files:
        raise SystemExit(
            f"{tests}: none of the tests is here; an unpacked source distribution has them in its folder tests"
        )
    print(f"\n{'tests':<40}" + "".join(f"{end:>9}" for end in COLUMNS))
    with tempfile.TemporaryDirectory() as scratch:
        package = Path(scratch) / "tests"
        shutil.copytree(tests, package)
        (
            package / "__init__.py"
        ).touch()  # their tests import each other; not every source distribution has it
        (Path(scratch) / "pytest.ini").write_text("[pytest]\n")
        run = _Run(Path(scratch), environment, expression, seconds, every, first)
        with ThreadPoolExecutor(jobs) as pool:
            both = [(name, pool.submit(run, name, "0"), pool.submit(run, name, "1")) for name in files]
            comparisons = [
                _shown(_again(run, _compared(name, one.result(), two.result()))) for name, one, two in both
            ]
    _shown_all(comparisons)
    return comparisons


@dataclass(frozen=True)
class Ended:
    """One run of a file: test -> (outcome, reason), and why pytest stopped before its end; "" where it did not."""

    outcomes: dict[str, tuple[str, str]]
    stopped: str = ""


def _again(run: _Run, comparison: Comparison) -> Comparison:
    """`comparison` with the tests that fail fused run once more, in which results may differ by a rounding."""
    failed = [test for test in comparison.changed if comparison.fused.get(test, ("",))[0] == "failed"]
    if not failed:
        return comparison
    return replace(comparison, tolerant=run(comparison.file, "1", failed).outcomes)


def _compared(file: str, plain: Ended, fused: Ended) -> Comparison:
    stopped = tuple(
        f"{how}: {run.stopped}" for how, run in (("plain", plain), ("fused", fused)) if run.stopped
    )
    return Comparison(file, plain.outcomes, fused.outcomes, stopped)


@dataclass(frozen=True)
class _Run:
    folder: Path
    environment: Mapping[str, str]
    expression: str
    seconds: float
    every: int = 1
    first: int = 0

    def __call__(self, file: str, fuse: str, again: Sequence[str] = ()) -> Ended:
        """Run a file, or only the tests `again` of it, whose results may differ by a rounding."""
        outcomes = self.folder / f"{file}.{fuse}{'.again' if again else ''}.jsonl"
        outcomes.touch()
        paths = [str(ROOT / "src"), str(ROOT / "benchmarks"), str(ROOT), os.environ.get("PYTHONPATH", "")]
        environment = {
            **self.environment,
            "PEERS_FUSE": fuse,
            "PEERS_OUTCOMES": str(outcomes),
            "PEERS_EVERY": "1" if again else str(self.every),
            "PEERS_FIRST": "0" if again else str(self.first),
            "PEERS_ROUNDING": "1" if again else "0",
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "OMP_NUM_THREADS": "1",
        }
        options = [
            "-q",
            "-p",
            "no:cacheprovider",
            "-p",
            "peer_suites.plugin",
            "-W",
            "ignore",
            "-c",
            "pytest.ini",
        ]
        chosen = ["-k", self.expression] if self.expression and not again else []
        command = [sys.executable, "-m", "pytest", *options, *chosen, *(again or [f"tests/{file}"])]
        log_path = outcomes.with_suffix(".log")
        with log_path.open("w") as log:
            try:
                ended = subprocess.run(
                    command, cwd=self.folder, env=environment, stdout=log, stderr=log, timeout=self.seconds
                ).returncode
            except subprocess.TimeoutExpired:
                ended = -1
        rows = [json.loads(line) for line in outcomes.read_text().splitlines()]
        stopped = why_stopped(ended, log_path.read_text(), self.seconds)
        return Ended({test: (outcome, reason) for test, outcome, reason in rows}, stopped)


def why_stopped(status: int, output: str, seconds: float) -> str:
    """Why pytest did not come to the end of a file; "" where every test ran, or was left out.

    Args:
        status: pytest's, -1 for what ran out of its `seconds`.
        output: what it printed.
    """
    if status in _WHOLE:
        return ""
    lines = output.strip().splitlines()
    errors = [line.removeprefix("E").strip() for line in lines if line.startswith("E  ")]
    why = f"more than {seconds:.0f} s" if status < 0 else f"status {status}"
    return " | ".join([why, *(errors or lines)[-3:]])


def _shown(comparison: Comparison) -> Comparison:
    print(_row(comparison.file, [comparison]), flush=True)
    for test, reason in comparison.broken.items():
        print(f"    broken  {test.partition('::')[2]}: {reason}", flush=True)
    for test, difference in comparison.rounding.items():
        print(f"    rounding  {test.partition('::')[2]}: {difference}", flush=True)
    for why in comparison.stopped:
        print(f"    stopped  {why}", flush=True)
    for test, (plain, fused) in comparison.unlike.items():
        print(f"    unlike  {test.partition('::')[2]}: {plain} | fused: {fused}", flush=True)
    return comparison


def _row(name: str, comparisons: Sequence[Comparison]) -> str:
    counts = Counter(outcome for each in comparisons for outcome, _ in each.plain.values())
    counts["broken"] = sum(len(each.broken) for each in comparisons)
    counts["rounding"] = sum(len(each.rounding) for each in comparisons)
    return f"{name:<40}" + "".join(f"{counts[column] or '.':>9}" for column in COLUMNS)


def _shown_all(comparisons: Sequence[Comparison]) -> None:
    print(_row("all", comparisons))
    failed = Counter(
        reason for each in comparisons for outcome, reason in each.plain.values() if outcome == "failed"
    )
    for reason, count in failed.most_common(12):
        print(f"fails either way {count}: {reason[:160]}")


def as_json(comparisons: Sequence[Comparison]) -> list[dict[str, Any]]:
    """Every test as a row."""
    return [
        {
            "file": each.file,
            "test": test,
            "plain": each.plain[test],
            "fused": each.fused.get(test),
            "tolerant": each.tolerant.get(test),
        }
        for each in comparisons
        for test in each.plain
    ]

"""Stops training runs with SIGINT and SIGTERM at chosen moments; prints what came of each as JSON.

usage: python -m tests.train.interrupts DIRECTORY [few]
few: SIGINT once, SIGINT and SIGTERM while saving, and SIGTERM while loading.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from isotype.core.files import STAGING
from isotype.train.output.checkpoints import whole_checkpoints
from tests.train.forked import start, wait_for
from tests.train.tiny import arguments, rows, save_rows


class Run:
    """A running command, its output, and the folder of its checkpoints."""

    def __init__(self, root: Path, name: str, argv: Sequence[str], log: Path | None = None) -> None:
        self.log, self.out = log or root / f"{name}.log", root / name
        self.pid = start(argv, self.log)
        self.ended: list[int] = []
        self.before: int | None = None

    def printed(self) -> str:
        return self.log.read_text() if self.log.is_file() else ""

    def when(self, condition: Callable[[], bool]) -> Run:
        assert wait_for(self.pid, condition, self.ended), self.printed()
        return self

    def when_printed(self, text: str) -> Run:
        return self.when(lambda: text in self.printed())

    def when_saving(self) -> Run:
        return self.when((self.out / STAGING).exists)

    def newest(self) -> int:
        return max((int(path.name.rpartition("-")[2]) for path in whole_checkpoints(self.out)), default=0)

    def send(self, number: int) -> Run:
        self.before = self.newest() if self.before is None else self.before
        os.killpg(self.pid, number)  # as a terminal does: the data loader's workers get it as well
        return self

    def end(self) -> dict[str, object]:
        wait_for(self.pid, lambda: False, self.ended)
        return {
            "status": self.ended[0],
            "printed": self.printed(),
            "steps": max(map(int, re.findall(r"^step (\d+)/", self.printed(), re.M)), default=0),
            "before": self.before,
            "whole": [path.name for path in whole_checkpoints(self.out)],
            "hidden": [path.name for path in self.out.glob(".*")],
            "adapter": (self.out / "adapter_model.safetensors").exists(),
            "report": (self.out / "run_report.json").exists(),
        }


def history(out: Path, steps: int) -> list[object]:
    state = json.loads((out / f"checkpoint-{steps}" / "trainer_state.json").read_text())
    return [[entry["step"], entry["loss"]] for entry in state["log_history"] if "loss" in entry]


def _seldom(root: Path) -> dict[str, object]:
    """SIGHUP twice, SIGTERM once and SIGINT twice, while training."""
    runs: dict[str, object] = {}
    run = Run(root, "hangup", arguments(root, "hangup", 400, "--save_strategy", "no"))
    run.when_printed("step 6/").send(signal.SIGHUP).when_printed("a second signal")
    runs["hangup"] = run.send(signal.SIGHUP).end()  # the kernel says so, and the shell

    run = Run(root, "terminated", arguments(root, "terminated", 400, "--save_steps", "1000"))
    runs["terminated"] = run.when_printed("step 6/").send(signal.SIGTERM).end()

    run = Run(root, "twice", arguments(root, "twice", 400, "--save_steps", "3"))
    run.when_printed("step 6/").when((run.out / "checkpoint-6").exists).send(signal.SIGINT)
    runs["twice"] = run.when_printed("a second signal").send(signal.SIGINT).end()
    return runs


def main() -> None:
    root, few = Path(sys.argv[1]), "few" in sys.argv[2:]
    save_rows(root / "train.jsonl", rows("sft"))
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it for what it starts
    runs: dict[str, object] = {}

    workers = ("--dataloader_num_workers", "1", "--save_strategy", "no")
    run = Run(root, "once", arguments(root, "once", 400, *workers))
    runs["once"] = run.when_printed("step 6/").send(signal.SIGINT).end()
    command = shlex.split(re.search(r"^    isotype (sft .*)$", run.printed(), re.M)[1])
    # What was printed goes on; only the end is brought nearer, for the time's sake.
    stopped = int(command[-1].rpartition("-")[2])
    near = ["--max_steps", str(stopped + 5), "--save_strategy", "steps"]
    runs["command"] = Run(root, "once", [*command, *near]).end()

    runs["full"] = Run(
        root, "full", arguments(root, "full", 4, "--save_strategy", "no"), Path("/dev/full")
    ).end()

    if not few:
        runs |= _seldom(root)

    run = Run(root, "while-saving", arguments(root, "while-saving", 400, "--save_steps", "1"))
    run.when((run.out / "checkpoint-3").exists).when(lambda: not (run.out / STAGING).exists())
    # Of two that are sent at once the kernel may hand over the second first, to another thread: the status is the first's.
    run.when_saving().send(signal.SIGINT).when_printed("a second signal")
    runs["while-saving"] = run.send(signal.SIGTERM).end()

    loading = {"loading-term": signal.SIGTERM, "loading-int": signal.SIGINT}
    for name, number in list(loading.items())[: 1 if few else 2]:
        run = Run(root, name, arguments(root, name, 400))
        run.when_printed("precision policy")
        time.sleep(0.05)
        runs[name] = run.send(number).end()

    print(json.dumps(runs))


if __name__ == "__main__":
    main()

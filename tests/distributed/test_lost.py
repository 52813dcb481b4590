"""A process that dies takes the others along, with one message; the run goes on from its last checkpoint."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from isotype.train.output.checkpoints import whole_checkpoints
from tests import processes
from tests.distributed import one_rank
from tests.distributed.launch import ROOT, SHARDED, TORCHRUN, alone, argv, environment, losses, prepared

pytestmark = pytest.mark.newest  # torch 2.10 shards no integers

SECONDS = 60.0
Started = tuple[int, Callable[[], int | None]]
"""The id of a launcher, and what waits for its exit status."""


def forked(arguments: list[str], log: Path) -> Started:
    """Two processes of torchrun's agent, in which the libraries are imported."""
    call = (processes.launched, 2, one_rank.main, *arguments)
    process = processes.start(*call, stdout=log, stderr=log, environment=environment())
    assert process.pid is not None

    def ended() -> int | None:
        process.join(30)
        return process.exitcode

    return process.pid, ended


def by_command(arguments: list[str], log: Path) -> Started:
    """torchrun as a user types it."""
    command = [*TORCHRUN, "2", "-m", "tests.distributed.one_rank", *arguments]
    with log.open("w") as printed:
        process = subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=printed, stderr=printed)
    return process.pid, lambda: process.wait(timeout=30)


@pytest.mark.slow
@pytest.mark.parametrize("started", [forked, pytest.param(by_command, marks=pytest.mark.exhaustive)])
def test_killing_one_process_ends_the_other_with_one_message_and_the_run_goes_on(
    started: Callable[[list[str], Path], Started], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, data = prepared(tmp_path)
    out, log = tmp_path / "out", tmp_path / "log"
    common = (
        "--dtype",
        "float32",
        "--quantization",
        "nf4",
        "--max_steps",
        300,
        "--save_steps",
        2,
        "--lora_target_modules",
        "q_proj",
    )
    launcher, ended = started([str(tmp_path), "sft", *argv(model, data, out, 2, *common, *SHARDED)], log)
    try:
        until = time.monotonic() + SECONDS
        while not whole_checkpoints(out) and psutil.pid_exists(launcher) and time.monotonic() < until:
            time.sleep(0.1)
        os.kill(int((tmp_path / "1").read_text()), signal.SIGKILL)
        assert ended(), log.read_text()
    finally:
        for process in (
            psutil.Process(launcher).children(recursive=True) if psutil.pid_exists(launcher) else []
        ):
            process.kill()
    text = log.read_text()
    assert text.count("error: another process of the run has ended") == 1, text
    newest = whole_checkpoints(out)[-1]
    assert f"{newest} is complete: resume with" in text
    assert "torchrun --standalone --nproc_per_node 2 -m isotype sft" in text
    monkeypatch.setattr("isotype.train.callback.before_first_step", lambda *_: None)
    step = int(newest.name.rpartition("-")[2])
    more = argv(model, data, tmp_path / "again", 1, *common, "--resume_from_checkpoint", newest)
    outcome = alone([*more, "--max_steps", str(step + 2)])
    assert outcome.record.status == "finished"
    assert len(losses(tmp_path / "again")) >= 2

"""A process that dies takes the others along, with one message; the run goes on from its last checkpoint."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from isotype.train.saved import whole_checkpoints
from tests.distributed.launch import ROOT, SHARDED, TORCHRUN, alone, argv, environment, losses, prepared

pytestmark = pytest.mark.newest  # torch 2.10 shards no integers

SECONDS = 60.0


@pytest.mark.slow
def test_killing_one_process_ends_the_other_with_one_message_and_the_run_goes_on(tmp_path: Path) -> None:
    model, data = prepared(tmp_path)
    out, log = tmp_path / "out", tmp_path / "log"
    common = ("--dtype", "float32", "--quantization", "nf4", "--max_steps", 300, "--save_steps", 5)
    command = [*TORCHRUN, "2", "-m", "isotype", "sft", *argv(model, data, out, 2, *common, *SHARDED)]
    with log.open("w") as printed:
        process = subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=printed, stderr=printed)
    try:
        until = time.monotonic() + SECONDS
        while not whole_checkpoints(out) and process.poll() is None and time.monotonic() < until:
            time.sleep(0.1)
        victim = _worker(process.pid, rank=1)
        victim.send_signal(signal.SIGKILL)
        assert process.wait(timeout=30) != 0, log.read_text()
    finally:
        process.kill()
    text = log.read_text()
    assert text.count("error: another process of the run has ended") == 1, text
    newest = whole_checkpoints(out)[-1]
    assert f"{newest} is whole: go on with" in text
    assert "torchrun --standalone --nproc_per_node 2 -m isotype sft" in text
    step = int(newest.name.rpartition("-")[2])
    more = argv(model, data, tmp_path / "again", 1, *common, "--resume_from_checkpoint", newest)
    outcome = alone([*more, "--max_steps", str(step + 2)])
    assert outcome.record.status == "finished"
    assert len(losses(tmp_path / "again")) >= 2


def _worker(launcher: int, rank: int) -> psutil.Process:
    """The process of this rank below a launcher."""
    for child in psutil.Process(launcher).children(recursive=True):
        if child.environ().get("RANK") == str(rank) and "isotype" in child.cmdline():
            return child
    raise AssertionError(f"no process of rank {rank}")

"""Trains in forked processes and kills them with SIGKILL while they save; prints what came of it as JSON.

usage: python -m tests.train.kill_chain DIRECTORY KILLS SEED STEPS [ARGUMENT …]
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from isotype.core.files import LOCK_FILE, STAGING
from tests.train.forked import start, wait_for
from tests.train.tiny import rows, save_rows


def arguments(root: Path, out: Path, steps: int, more: Sequence[str]) -> list[str]:
    return (
        f"""sft --model_name_or_path {root / "model"} --dataset_name {root / "train.jsonl"} --output_dir {out}
        --max_steps {steps} --save_steps 1 --save_total_limit 2 --logging_steps 1 --learning_rate 1e-2
        --per_device_train_batch_size 2 --lora_dropout 0.2 --gradient_checkpointing False
        --report_to none""".split()
        + list(more)
    )


def kill_in_a_save(pid: int, out: Path, saves: int, files: int | None, delay: float) -> dict[str, object]:
    """SIGKILL in the save after `saves` others, `delay` seconds after the moment that `files` names.

    The moment is when that many files have been built, or for None when the new checkpoint has its name.
    """
    ended: list[int] = []

    def building() -> bool:
        return (out / STAGING).exists()

    def idle() -> bool:
        return not building()

    def reached() -> bool:
        if files is None:
            return not set(out.glob("checkpoint-*")) <= whole
        return idle() or sum(1 for _ in (out / STAGING).rglob("*")) > files

    # What the run before has left is gone at first, then come the saves.
    for condition in (idle, *(building, idle) * saves, building):
        if not wait_for(pid, condition, ended):
            return {"status": ended[0]}
    whole = set(out.glob("checkpoint-*"))
    if not wait_for(pid, reached, ended):
        return {"status": ended[0]}
    time.sleep(delay)
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    left = sorted(
        path.name
        for path in out.iterdir()
        if path.name.startswith((".", "checkpoint")) and path.name != LOCK_FILE
    )
    return {"status": os.waitstatus_to_exitcode(status), "left": left, "files": files}


def outcome(out: Path, steps: int) -> dict[str, object]:
    """Return the steps in the last checkpoint and in the report, checksums of saved files, and the folder's entries."""
    last = out / f"checkpoint-{steps}"
    history = json.loads((last / "trainer_state.json").read_text())["log_history"]
    wanted = ("step", "loss", "grad_norm", "learning_rate")
    saved = [out / "adapter_model.safetensors", *last.glob("*.safetensors"), *last.glob("*.pt*")]
    return {
        "history": [{key: entry[key] for key in wanted} for entry in history if "loss" in entry],
        "digests": {str(p.relative_to(out)): hashlib.sha256(p.read_bytes()).hexdigest() for p in saved},
        "reported": [each["step"] for each in json.loads((out / "run_report.json").read_text())["steps"]],
        "entries": sorted(path.name for path in out.iterdir() if path.name.startswith((".", "checkpoint"))),
    }


def main() -> None:
    root, kills, seed, more = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[5:]
    steps = int(sys.argv[4])
    save_rows(root / "train.jsonl", rows("sft"))
    draw = random.Random(seed)

    whole = root / "uninterrupted"
    pid = start(arguments(root, whole, steps, more), root / "uninterrupted.log")
    _, status = os.waitpid(pid, 0)
    assert status == 0, (root / "uninterrupted.log").read_text()

    out, log = root / "killed", root / "killed.log"
    resumed = arguments(root, out, steps, [*more, "--resume_from_checkpoint", "true"])
    built = len(list((whole / f"checkpoint-{steps}").iterdir()))
    # Every other kill lets one save pass, so that the chain moves on but does not end before the last kill.
    named = max(kills > 1, kills // 5)
    moments = [draw.randrange(built) for _ in range(kills - named)] + [None] * named
    draw.shuffle(moments)
    tries = [
        kill_in_a_save(start(resumed, log), out, (number + 1) % 2, files, draw.uniform(0, 0.003))
        for number, files in enumerate(moments)
    ]
    _, status = os.waitpid(start(resumed, log), 0)
    print(
        json.dumps(
            {
                "uninterrupted": outcome(whole, steps),
                "tries": tries,
                "last": os.waitstatus_to_exitcode(status),
                "killed": outcome(out, steps) if status == 0 else None,
                "log": log.read_text(),
            }
        )
    )


if __name__ == "__main__":
    main()

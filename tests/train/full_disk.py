"""Runs and merges on a disk that becomes full at a chosen call; prints what came of each as JSON.

usage: LD_PRELOAD=full_disk.so python -m tests.train.full_disk DIRECTORY CHOSEN
CHOSEN: how many of the calls are tried; 0 for one of each kind on every file.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import random
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.train.forked import start
from tests.train.tiny import rows, save_chat_model, save_rows

disk = ctypes.CDLL(None)


def sft(root: Path, *more: str) -> list[str]:
    return (
        f"""sft --model_name_or_path {root / "model"} --dataset_name {root / "train.jsonl"} --output_dir {root / "out"}
        --max_steps 4 --save_steps 2 --logging_steps 1 --learning_rate 1e-2 --lora_dropout 0.2
        --per_device_train_batch_size 2 --gradient_checkpointing False --dtype float32 --report_to none""".split()
        + list(more)
    )


def merge(root: Path) -> list[str]:
    return ["merge", str(root / "adapter"), "-o", str(root / "out" / "merged")]


def run(argv: Sequence[str], log: Path, allowed: int = -1, calls: Path | None = None) -> int:
    """Exit status of a command on a disk that is full after `allowed` calls; -1: never."""
    disk.disk_arm(ctypes.c_long(allowed), None if calls is None else str(calls).encode())
    pid = start(argv, log)
    disk.disk_arm(ctypes.c_long(-1), None)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def hidden(out: Path) -> list[str]:
    """What is half done: staging folders, temporary files, locks."""
    return sorted(str(path.relative_to(out)) for path in out.rglob(".*"))


def chosen(calls: Path, number: int) -> list[tuple[int, str]]:
    """(call, what it is) of the calls to try."""
    lines = [line.split("\t") for line in calls.read_text().splitlines()]
    draw, kinds = random.Random(0), {}
    for at, what, path in lines:
        # Steps, process ids and random names are left out of it.
        kind = f"{what} {re.sub(r'[0-9a-f]{32}|(?<=checkpoint-)[0-9]+|[0-9]{3,}|(?<=tmp)[0-9A-Za-z]{6}', 'N', path)}"
        kinds.setdefault(kind, []).append(int(at))
    calls_tried = [(draw.choice(each), kind) for kind, each in kinds.items()]
    return sorted(draw.sample(calls_tried, min(number, len(calls_tried))) if number else calls_tried)


def digests(out: Path) -> dict[str, str]:
    """Of what a finished run leaves."""
    paths = [out / "adapter_model.safetensors", *(out / "checkpoint-4").glob("*.safetensors")]
    paths += (out / "checkpoint-4").glob("*.pt")
    return {str(path.relative_to(out)): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def tried(root: Path, argv: Sequence[str], again: Sequence[str], at: int, what: str) -> dict[str, Any]:
    """What came of a command on a disk that became full at call `at`, and of the one that goes on."""
    from isotype.train.saved import all_checkpoints, damage

    out, log = root / "out", root / "log"
    for path in (out, log):
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
    out.mkdir()
    status = run(argv, log, at - 1)
    found = {
        "at": at,
        "what": what.replace(str(root), "ROOT"),
        "status": status,
        "printed": log.read_text(),
        "hidden": hidden(out),
        "damaged": [
            (path.name, why) for path in all_checkpoints(out) if (why := damage(path, contents=True))
        ],
    }
    log.unlink()
    found["again"] = run(again, log)
    found["printed again"] = log.read_text()
    found["hidden again"] = hidden(out)
    return found


def main() -> None:
    root, number = Path(sys.argv[1]), int(sys.argv[2])
    save_chat_model(root / "model")
    save_rows(root / "train.jsonl", rows("sft"))
    disk.disk_folder(f"{root}/out".encode())
    calls = root / "calls"
    (root / "out").mkdir()
    assert run(sft(root), root / "log", calls=calls) == 0, (root / "log").read_text()
    expected = digests(root / "out")
    points = chosen(calls, number)
    shutil.copytree(root / "out", root / "adapter", ignore=shutil.ignore_patterns("checkpoint-*"))
    results = []
    for at, what in points:
        result = tried(root, sft(root), sft(root, "--resume_from_checkpoint", "true"), at, what)
        result["same"] = digests(root / "out") == expected
        results.append(result)
    shutil.rmtree(root / "out")
    (root / "out").mkdir()
    calls.unlink()
    assert run(merge(root), root / "log", calls=calls) == 0, (root / "log").read_text()
    merges = [tried(root, merge(root), merge(root), at, what) for at, what in chosen(calls, number)]
    (root / "found.json").write_text(json.dumps({"runs": results, "merges": merges}))


if __name__ == "__main__":
    main()

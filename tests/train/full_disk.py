"""Runs and merges on a disk that becomes full at a chosen call; prints what came of each as JSON.

usage: LD_PRELOAD=full_disk.so python -m tests.train.full_disk DIRECTORY CHOSEN
CHOSEN: how many of the calls are tried; 0 for one of each kind on every file; 1: neither of exports nor of caches.
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

from tests.checkpoint.test_gguf_export import byte_level, tiny, write_gguf
from tests.train.forked import start
from tests.train.tiny import TEMPLATE, rows, save_rows

disk = ctypes.CDLL(None)


def sft(root: Path, *more: str) -> list[str]:
    return (
        f"""sft --model_name_or_path {root / "model"} --dataset_name {root / "train.jsonl"} --output_dir {root / "out"}
        --max_steps 4 --save_steps 2 --logging_steps 1 --learning_rate 1e-2 --lora_dropout 0.2 --lora_target_modules q_proj
        --per_device_train_batch_size 2 --gradient_checkpointing False --dtype float32 --report_to none
        --no_fuse""".split()  # which kernel is the faster one is measured anew where the cache is gone
        + list(more)
    )


def merge(root: Path, *more: str) -> list[str]:
    return ["merge", str(root / "adapter"), "-o", str(root / "out" / "merged"), *more]


def chat(root: Path) -> list[str]:
    return ["chat", str(root / "model.gguf"), "--ask", "w1 w2", "--max_new_tokens", "2"]


def save_model(root: Path) -> None:
    """Save a model with a tokenizer that GGUF supports, and its GGUF file."""
    model, tokenizer = tiny("llama", max_position_embeddings=512), byte_level("smollm")
    tokenizer.chat_template = TEMPLATE
    for each in (model, tokenizer):
        each.save_pretrained(root / "model")
    write_gguf(model, tokenizer, root / "model.gguf", "f16", "tiny")


def run(argv: Sequence[str], log: Path, allowed: int = -1, calls: Path | None = None) -> int:
    """Return the exit status of a command on a disk that is full after `allowed` calls; -1 for a disk that is never full."""
    disk.disk_arm(ctypes.c_long(allowed), None if calls is None else str(calls).encode())
    pid = start(argv, log)
    disk.disk_arm(ctypes.c_long(-1), None)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def hidden(*folders: Path) -> list[str]:
    """Return unfinished files: staging folders, temporary files, locks."""
    return sorted(str(path) for folder in folders for path in folder.rglob(".*"))


def chosen(calls: Path, number: int) -> list[tuple[int, str]]:
    """Return (call, its kind) for each call at which the disk becomes full."""
    lines = [line.split("\t") for line in calls.read_text().splitlines()]
    draw, kinds = random.Random(0), {}
    for at, what, path in lines:
        # Steps, process ids and random names are left out of it.
        kind = f"{what} {re.sub(r'[0-9a-f]{32}|(?<=checkpoint-)[0-9]+|[0-9]{3,}|(?<=tmp)[0-9A-Za-z]{6}', 'N', path)}"
        kinds.setdefault(kind, []).append(int(at))
    calls_tried = [(draw.choice(each), kind) for kind, each in kinds.items()]
    return sorted(draw.sample(calls_tried, min(number, len(calls_tried))) if number else calls_tried)


def digests(out: Path) -> dict[str, str]:
    """Return checksums of the result of a finished run."""
    paths = [out / "adapter_model.safetensors", *(out / "checkpoint-4").glob("*.safetensors")]
    paths += (out / "checkpoint-4").glob("*.pt")
    return {str(path.relative_to(out)): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def tried(root: Path, argv: Sequence[str], again: Sequence[str], at: int, what: str) -> dict[str, Any]:
    """Run a command on a disk that becomes full at call `at`, and the command that resumes it; return both results."""
    from isotype.train.output.checkpoints import all_checkpoints, damage

    out, cache, log = root / "out", root / "cache", root / "log"
    clear(out, cache)
    log.unlink()
    calls = root / "tried"
    calls.unlink(missing_ok=True)
    status = run(argv, log, at - 1, calls)
    found = {
        "reached": len(calls.read_text().splitlines()) >= at,
        "at": at,
        "what": what.replace(str(root), "ROOT"),
        "status": status,
        "printed": log.read_text(),
        "hidden": hidden(out, cache),
        "damaged": [
            (path.name, why) for path in all_checkpoints(out) if (why := damage(path, contents=True))
        ],
    }
    log.unlink()
    found["again"] = run(again, log)
    found["printed again"] = log.read_text()
    found["hidden again"] = hidden(out, cache)
    return found


def clear(*folders: Path) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()


def points(root: Path, argv: Sequence[str], number: int) -> list[tuple[int, str]]:
    """Return the calls of a command at which the disk becomes full."""
    calls = root / "calls"
    clear(root / "out", root / "cache")
    calls.unlink(missing_ok=True)
    assert run(argv, root / "log", calls=calls) == 0, (root / "log").read_text()
    return chosen(calls, number)


def main() -> None:
    root, number = Path(sys.argv[1]), int(sys.argv[2])
    save_model(root)
    save_rows(root / "train.jsonl", rows("sft"))
    for folder in ("out", "cache"):
        disk.disk_folder(f"{root}/{folder}".encode())
    chosen_points = points(root, sft(root), number)
    expected = digests(root / "out")
    shutil.copytree(root / "out", root / "adapter", ignore=shutil.ignore_patterns("checkpoint-*"))
    found: dict[str, list[dict[str, Any]]] = {"runs": []}
    for at, what in chosen_points:
        result = tried(root, sft(root), sft(root, "--resume_from_checkpoint", "true"), at, what)
        found["runs"].append(result | {"same": not result["again"] and digests(root / "out") == expected})
    others = {"merges": merge(root), "exports": merge(root, "--gguf", "f16"), "caches": chat(root)}
    if number == 1:
        others = {"merges": others["merges"]}
    for name, command in others.items():
        found[name] = [tried(root, command, command, *point) for point in points(root, command, number)]
    (root / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()

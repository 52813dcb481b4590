"""Trains on a revision of a model in a hub cache, and uses what came out; prints what it saw as JSON.

usage: HF_HUB_OFFLINE=1 python -m tests.train.revisions DIRECTORY [few]
few: training and merging only.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

from huggingface_hub import constants
from safetensors.torch import load_file

import isotype.train.callback
from isotype.cli.main import main
from tests.train.tiny import rows, save_chat_model, save_rows

NAME, OLD, NEW = "owner/tiny", "a" * 40, "b" * 40


def put_into_cache(root: Path) -> None:
    """Put two commits of a model into the hub cache: `main` with three layers, the tag `v2` with two."""
    repository = root / "hub" / "hub" / "models--owner--tiny"
    for commit, layers in ((OLD, 3), (NEW, 2)):
        save_chat_model(repository / "snapshots" / commit, layers=layers)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(OLD)
    (repository / "refs" / "v2").write_text(NEW)


def command(*argv: object) -> tuple[int, str]:
    """Return the exit status of `isotype ARGV`, and its output."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        status = main([str(each) for each in argv])
    return status, printed.getvalue()


def layers(directory: Path) -> int:
    """Return the number of layers of the weights in a directory."""
    names = load_file(next(directory.glob("*model.safetensors")))
    return len({found[1] for name in names if (found := re.search(r"layers\.(\d+)\.", name))})


def run(root: Path, few: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    more = [
        "--dataset_name",
        root / "train.jsonl",
        "--max_steps",
        1,
        "--report_to",
        "none",
        "--dtype",
        "float32",
    ]
    sft = ["sft", "--model_name_or_path", NAME, *more, "--output_dir", root / "adapter"]
    found["trained"] = command(*sft, "--model_revision", "v2", "--quantization", "nf4")
    found["config"] = json.loads((root / "adapter" / "adapter_config.json").read_text())
    found["merge"] = command("merge", root / "adapter", "-o", root / "merged", "--dtype", "float32")
    if few:
        return found | {"layers": {"merged": layers(root / "merged")}}
    found["chat"] = command("chat", root / "adapter", "--ask", "w1 w2", "--max_new_tokens", 2)
    found["base"] = command(
        "merge", root / "adapter", "-o", root / "based", "--base", NAME, "--model_revision", "v2"
    )
    found["other base"] = command("merge", root / "adapter", "-o", root / "nothing", "--base", NAME)
    further = ["sft", "--model_name_or_path", root / "adapter", *more, "--output_dir", root / "further"]
    found["further"] = command(*further)
    found["further config"] = json.loads((root / "further" / "adapter_config.json").read_text())
    for name, revision in (("old", "main"), ("new", "v2")):
        status, printed = command("check", NAME, "--model_revision", revision, "--json", "--device", "cpu")
        found[f"check {name}"] = status, json.loads(printed)["memory"]["phases"]["load"]["weights"]
        found[f"model {name}"] = command("chat", NAME, "--model_revision", revision, "--ask", "w1")
    found["full"] = command(
        "dpo", "--model_name_or_path", NAME, "--model_revision", "v2", "--dataset_name", root / "dpo.jsonl", "--max_steps",
        1, "--use_peft", "False", "--report_to", "none", "--output_dir", root / "full", "--dtype", "float32",
    )  # fmt: skip
    report = json.loads((root / "full" / "run_report.json").read_text())
    found["first loss"] = report["steps"][0]["loss"]
    merged = load_file(root / "merged" / "model.safetensors")
    stored = load_file(root / "hub/hub/models--owner--tiny/snapshots" / NEW / "model.safetensors")
    embedding = "model.embed_tokens.weight"
    found["same"] = bool((merged[embedding] == stored[embedding]).all())
    found["layers"] = {name: layers(root / name) for name in ("merged", "based", "further", "full")}

    # A folder whose name looks like a hub id, used from another directory, and gone at last.
    (root / "work" / "owner").mkdir(parents=True)
    os.chdir(root / "work")
    shutil.copytree(root / "hub/hub/models--owner--tiny/snapshots" / NEW, "owner/tiny")
    found["local"] = command(*sft[:-1], root / "local")
    found["local config"] = json.loads((root / "local" / "adapter_config.json").read_text())
    os.chdir(root)
    found["elsewhere"] = command("chat", root / "local", "--ask", "w1 w2", "--max_new_tokens", 2)
    shutil.rmtree(root / "work" / "owner")
    found["gone"] = command("chat", root / "local", "--ask", "w1 w2")
    return found


def start() -> None:
    root = Path(sys.argv[1])
    constants.HF_HUB_CACHE = str(root / "hub" / "hub")  # as HF_HOME sets it before the libraries are imported
    isotype.train.callback.before_first_step = lambda *_: None  # type: ignore[attr-defined]
    put_into_cache(root)
    save_rows(root / "train.jsonl", rows("sft"))
    save_rows(root / "dpo.jsonl", rows("dpo"))
    (root / "found.json").write_text(json.dumps(run(root, "few" in sys.argv[2:])))


if __name__ == "__main__":
    start()

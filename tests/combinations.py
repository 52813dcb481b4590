"""Options of a training in pairs: which of them train a step together, and which are refused.

`tests/combinations.json` holds the outcome of each pair: "" if a step was trained, else the refusal. `python -m tools.combinations` writes the page.
"""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path
from typing import Any
from unittest.mock import patch

from rich.console import Console

from isotype.core.errors import IsotypeError
from isotype.data.methods import METHODS
from isotype.train import training
from tests.parsed import parse_settings
from tests.train.test_methods import FLAGS
from tests.train.tiny import rows, save_chat_model, save_rows

RECORD = Path(__file__).with_suffix(".json")

AXES: dict[str, dict[str, str]] = {
    "method": {"dpo": "", "reward": "", "kto": "", "grpo": "", "rloo": ""},
    "storage": {name: f"--quantization {name}" for name in ("nf4", "fp4", "int8", "mixed")},
    "adapters": {"DoRA": "--use_dora True", "all weights": "--use_peft False"},
    "sharding": {"DDP": "", "FSDP2": "--fsdp full_shard"},
    "checkpointing": {
        "every layer": "--gradient_checkpointing True",
        "every 2nd layer": '--gradient_checkpointing True --gradient_checkpointing_kwargs {"every_n_layers":2}',
    },
    "packing": {"packing": "--packing True"},
    "model": {"images": "", "experts": ""},
    "compile": {"compile": "--torch_compile True --torch_compile_backend eager"},
}
"""Values of each axis beside its first one, which every pair has where it names no other: sft, no quantization, LoRA, one process, no
checkpointing, no packing, a dense model of text, no compiler."""

PAIRS = tuple(
    (left, right)
    for (first, second) in combinations(AXES, 2)
    for left in AXES[first]
    for right in AXES[second]
)


def key(pair: tuple[str, str]) -> str:
    """The name of a pair in the record."""
    return " + ".join(pair)


def recorded() -> dict[str, str]:
    """The outcome of each pair, by `key`."""
    content: dict[str, str] = json.loads(RECORD.read_text(encoding="utf-8"))
    return content


def arguments(pair: tuple[str, str], root: Path) -> list[str]:
    """The command of a pair, with its model and rows in `root`."""
    method = next((value for value in pair if value in AXES["method"]), "sft")
    model, data = root / "model", rows(method, 8)
    if "images" in pair:
        from tests.zoo.processors import picture, save_vision_model

        save_vision_model("gemma3", model)
        picture(40, 40).save(root / "picture.png")
        data = [_with_picture(row) for row in data]
    else:
        save_chat_model(model, layers=2, experts=4 if "experts" in pair else 0)
    flags = next((AXES[axis][value] for axis in AXES for value in pair[:1] if value in AXES[axis]), "")
    more = next((AXES[axis][value] for axis in AXES for value in pair[1:] if value in AXES[axis]), "")
    fixed = f"""--model_name_or_path {model} --dataset_name {save_rows(root / "rows.jsonl", data)} --output_dir {root / "out"}
        --dtype float32 --device cpu --max_steps 1 --per_device_train_batch_size 2 --report_to none --ranges known --save_strategy no --disable_tqdm True"""
    off = [] if "--gradient_checkpointing" in flags + more else ["--gradient_checkpointing", "False"]
    return [method, *fixed.split(), *off, *FLAGS.get(method, "").split(), *flags.split(), *more.split()]


def _with_picture(row: dict[str, Any]) -> dict[str, Any]:
    """A row of text whose first turn shows an image."""
    changed: dict[str, Any] = {"images": ["picture.png"]}
    for column, turns in row.items():
        if not isinstance(turns, list):
            changed[column] = turns
            continue
        parts = [[{"type": "text", "text": turn["content"]}] for turn in turns]
        if column == "prompt":
            parts[0].insert(0, {"type": "image"})
        changed[column] = [{**turn, "content": content} for turn, content in zip(turns, parts, strict=True)]
    return changed


def outcome(command: list[str]) -> str:
    """ "" if a step is trained in this process, else the refusal in a line. The check before the step is left out: it takes as long as ten steps."""
    unchecked = patch("isotype.train.callback.before_first_step", lambda *_: None)
    try:
        with unchecked:
            training.run(parse_settings(METHODS[command[0]], command[1:]), Console(quiet=True))
    except IsotypeError as error:
        return ": ".join([error.headline, *(problem.given for problem in error.problems[:1])])
    return ""


def in_processes(command: list[str], answers: Path) -> None:
    """`outcome` in each of several processes; writes the first one's."""
    from torch import distributed

    if not distributed.is_initialized():
        distributed.init_process_group("gloo")
    result = outcome(command)
    if distributed.is_initialized():
        if distributed.get_rank() == 0:
            answers.write_text(result)
        distributed.destroy_process_group()
    else:
        answers.write_text(result)


def measured(pair: tuple[str, str], root: Path) -> str:
    """The outcome of a pair, its folder's name left out."""
    command = arguments(pair, root)
    if not set(pair) & set(AXES["sharding"]):
        return outcome(command).replace(str(root), "…")
    from tests import processes
    from tests.distributed.launch import environment

    answers = root / "answers"
    done = processes.run(
        processes.launched, 2, in_processes, command, answers, environment=environment(), timeout=400
    )
    assert answers.is_file(), done.stdout[-2000:] + done.stderr[-3000:]
    return answers.read_text().replace(str(root), "…")

"""Start processes that train together, and one that trains alone to compare with."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from isotype.data.methods import METHODS
from isotype.train import training
from tests import processes
from tests.distributed import ranks
from tests.parsed import parse_settings
from tests.train.tiny import rows, save_chat_model, save_rows

ROOT = Path(__file__).parents[2]
ROWS_A_STEP = 4
SHARDED = ("--fsdp", "full_shard")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node")

_BF16 = {"dtype": "bfloat16"}
_LORA = {"r": 4}
_MOMENTS = "".join("A9-_xyzk"[channel % 7] for channel in range(64))
EVERY_LOAD: dict[str, dict[str, Any]] = {
    "plain": {"precision": _BF16, "changes": {}, "lora": _LORA},
    "pinned": {"precision": _BF16, "changes": {"pinned": ["norm"]}, "lora": _LORA},
    "residual": {"precision": _BF16, "changes": {"wide_residual": True}, "lora": _LORA},
    "nf4": {
        "precision": {**_BF16, "quantization": "nf4", "double_quant": True},
        "changes": {},
        "lora": _LORA,
    },
    "mixed": {
        "precision": {**_BF16, "quantization": "nf4", "double_quant": True},
        "changes": {
            "layers": {
                "model.layers.0.self_attn.v_proj": ["int8"],
                "model.layers.0.mlp.down_proj": ["nf4-32"],
                "model.layers.1.self_attn.q_proj": ["bfloat16"],
                "model.layers.1.mlp.gate_proj": ["nf4-32-fitted", _MOMENTS],
            },
            "exceptions": {"model.layers.1.self_attn.o_proj": ["float32"]},
        },
        "lora": _LORA,
    },
    "float storage": {
        "precision": {"dtype": "float32", "quantization": "nf4", "quant_storage": "bfloat16"},
        "changes": {},
        "lora": _LORA,
    },
    "int8": {"precision": {**_BF16, "quantization": "int8"}, "changes": {}, "lora": _LORA},
    "copies": {
        "precision": _BF16,
        "changes": {},
        "lora": {**_LORA, "modules_to_save": ["lm_head", "embed_tokens"]},
    },
    "DoRA": {"precision": _BF16, "changes": {}, "lora": {**_LORA, "use_dora": True}},
    "DoRA nf4": {
        "precision": {**_BF16, "quantization": "nf4"},
        "changes": {},
        "lora": {**_LORA, "use_dora": True},
    },
    "full": {"precision": {**_BF16, "trainable": "full"}, "changes": {}, "lora": {}},
}
"""Arguments of `tests.distributed.ranks.load` by what is special."""


_F32 = {"dtype": "float32"}
EVERY_FUSE: dict[str, dict[str, Any]] = {
    "nf4": {"precision": {**_F32, "quantization": "nf4"}, "lora": _LORA, "checkpointing": True},
    "plain": {"precision": _F32, "lora": _LORA},
    "kept gathered": {"precision": _F32, "lora": _LORA, "reshard": False, "checkpointing": True},
    "int8": {"precision": {**_F32, "quantization": "int8"}, "lora": _LORA},
    "DoRA": {"precision": _F32, "lora": {**_LORA, "use_dora": True}},
    "dropout": {"precision": _F32, "lora": {**_LORA, "lora_dropout": 0.2}, "checkpointing": True},
    "groups apart": {"precision": _F32, "lora": _LORA, "apart": True},
    "bfloat16": {"precision": _BF16, "lora": _LORA},
}
"""Arguments of `tests.distributed.ranks.fuse` by what is special."""


def prepared(directory: Path) -> tuple[Path, Path]:
    """A tiny chat model and its rows."""
    return save_chat_model(directory / "model", "bfloat16", layers=2), save_rows(
        directory / "rows.jsonl", rows("sft", 32)
    )


def argv(model: Path, data: Path, out: Path, processes: int, *more: object) -> list[str]:
    """Arguments of `isotype sft` that take the same rows a step at any number of processes."""
    fixed = {
        "model_name_or_path": model,
        "dataset_name": data,
        "output_dir": out,
        "per_device_train_batch_size": ROWS_A_STEP // processes,
        "learning_rate": 1e-2,
        "lora_r": 4,
        "lora_dropout": 0,
        "logging_steps": 1,
        "gradient_checkpointing": False,
        "seed": 0,
        **({"device": "cpu"} if torch.accelerator.is_available() else {}),
        "ranges": "known",
    }
    return [*(str(part) for name, value in fixed.items() for part in (f"--{name}", value)), *map(str, more)]


def environment() -> dict[str, str]:
    """What processes are started in: one thread each, and nothing of a launcher's."""
    launcher = ("ACCELERATE_", "FSDP_", "TORCHELASTIC_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(launcher)}
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "src")))}


def in_processes(count: int, jobs: Sequence[dict[str, Any]], directory: Path) -> tuple[list[list[Any]], str]:
    """Run `jobs` (see `tests.distributed.ranks`) in `count` processes.

    Returns:
        (results, output): for each process its result of each job; what all of them printed.
    """
    described, results = directory / "jobs.json", directory / "results.json"
    described.write_text(json.dumps(jobs))
    done = processes.run(
        processes.launched, count, ranks.main, described, results, environment=environment(), timeout=400
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    return json.loads(results.read_text()), done.stdout


def require_fused_as_peft(case: str, result: dict[str, Any]) -> None:
    """What `tests.distributed.ranks.fuse` gave: fused and sharded, and the numbers of PEFT's path and of one process.

    In float32 sums are taken in another order; in bfloat16 fused products are rounded fewer times than PEFT's.
    """
    apart = case == "groups apart"
    assert result[
        "sharded"
    ]  # also what stays gathered after a run without gradients is freed when `fuse` ends
    assert (result["fused"], result["together"], result["norms"]) == (12 if apart else 14, 4, 5)
    assert result["sides"] == ["left", "right"]
    assert (result["copies"], result["unseen"], result["held"]) == (0, "", 0)
    reason = "a part of the layer is sharded separately (FSDP2), and only PEFT's forward calls the hooks that gather it"
    assert result["left"] == ([reason] if apart else [])
    steps = result["steps"]
    alike = 1e-6 if case not in ("bfloat16", "groups apart") else 1e-2
    for way in ("sharded peft", "whole fused", "sharded fused"):
        for step, expected in zip(steps[way], steps["whole peft"], strict=True):
            assert step == pytest.approx(expected, rel=alike), (case, way)
    for step, expected in zip(steps["sharded fused"], steps["whole fused"], strict=True):
        assert step == pytest.approx(expected, rel=max(alike / 10, 2e-6)), case


def alone(arguments: Sequence[str]) -> training.Outcome:
    """Run a training in this process."""
    return training.run(
        parse_settings(METHODS["sft"], list(arguments)), Console(file=io.StringIO(), width=200)
    )


def losses(out: Path) -> list[float]:
    """The losses of a run's steps, as its report has them."""
    return [step["loss"] for step in json.loads((out / "run_report.json").read_text())["steps"]]

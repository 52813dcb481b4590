"""Parts 4 and 5: steps of a model of Llama-3-8B's shape by every peer, and the peak that a check foresees beside the real one."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .commands import Options
from .runner import Row

PEERS = (("isotype", "trl", "trl+liger"), ("isotype-loop", "loop"))
"""What decides first: where the time ends, the loops are what is not run."""
GPU_ONLY = ("trl+liger",)
"""Liger's kernels are Triton's: a rehearsal on a CPU has no such job."""
STORAGES = ("none", "nf4")


def commands(options: Options) -> dict[str, list[str]]:
    """Job -> command, the model's first; each prints its own lines of JSON."""
    more = ["--device", options.device, "--work", str(options.scratch), "--layers", str(options.layers)]
    more += ["--steps", "4", "--small"] if options.small else ["--steps", "7"]
    base = [sys.executable, "benchmarks/gpu_train.py"]
    jobs = {"model": [*base, "model", *more]}
    for peers in PEERS:
        for storage in STORAGES:
            jobs |= {
                f"{storage} {peer}": [*base, peer, "--storage", storage, *more]
                for peer in peers
                if peer not in GPU_ONLY or options.device != "cpu"
            }
    return jobs


def limits(options: Options) -> dict[str, float]:
    """Job -> seconds."""
    return dict.fromkeys(commands(options), 75.0)


def memory_limits(options: Options) -> dict[str, float]:
    """Job -> seconds."""
    return {"peaks": 120.0}


class UnmeasuredError(Exception):
    """There is no step to compare with."""


def measured_peaks(out: Path) -> list[dict[str, Any]]:
    """isotype's rows of part 4, from the file of the results."""
    path = out / "gpu.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    rows = [json.loads(line) for line in lines]
    return [row for row in rows if row["part"] == "speed" and row.get("peer") == "isotype" and "step" in row]


def memory(options: Options, name: str) -> Iterator[Row]:
    """The peak that a check foresees of each of isotype's set-ups, without weights, beside what the allocator gave.

    Raises:
        UnmeasuredError: part 4 has left no row of isotype's.
    """
    rows = measured_peaks(Path(options.out))
    if not rows:
        raise UnmeasuredError("part speed has measured no step of isotype's")
    for row in rows:
        peak = foreseen(options, row)
        title = f"{row['storage']} {row['rows']} x {row['tokens']}, checkpointing {'on' if row['checkpointing'] else 'off'}"
        result = {
            key: row[key]
            for key in ("storage", "rows", "tokens", "checkpointing", "layers", "peak", "reserved")
        }
        text = f"{title}: foreseen {peak / 2**30:.3f} GiB"
        if row["peak"] is None:
            text += "; the CPU's allocator counts no peak"
        else:
            result["error"] = peak / row["peak"] - 1
            text += f", allocated {row['peak'] / 2**30:.3f} ({100 * result['error']:+.1f} %), reserved {row['reserved'] / 2**30:.3f}"
        yield {**result, "foreseen": peak, "text": text}


def foreseen(options: Options, row: Row) -> int:
    """Bytes at the peak of a step as one of part 4's."""
    import peft
    import torch
    import transformers

    import isotype
    from isotype.model.recompute import CHECKPOINTING, checkpoint_gradients
    from isotype.train.models import weightless_model

    source = str(options.scratch / "speed-model")
    quantization = None if row["storage"] == "none" else row["storage"]
    policy = isotype.resolve_precision(source, "bfloat16", quantization, device=options.device)
    config = transformers.AutoConfig.from_pretrained(source)
    lora = peft.LoraConfig(
        r=16, lora_alpha=32, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    model: Any = weightless_model(config, policy, lora=lora, fold=True)
    model.config.use_cache = False
    if row["checkpointing"]:
        checkpoint_gradients(model, CHECKPOINTING, adapters=True)
    isotype.fuse(model, budget=0, device=options.device)
    ids = torch.ones(row["rows"], row["tokens"], dtype=torch.int64)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}
    report = isotype.check(model.train(), batch, policy, options.device, learning_rate=1e-4, verify=False)
    return int(report.memory.peak)

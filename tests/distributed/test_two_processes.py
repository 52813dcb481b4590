"""Two processes on a CPU: the same weights, losses, adapters and checkpoints as one."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file

from isotype.core.files import write_whole
from isotype.train.saved import damage
from isotype.train.sharded import SHARDS
from tests.distributed.launch import EVERY_LOAD, SHARDED, alone, argv, in_processes, losses, prepared

LOADS = {name: EVERY_LOAD[name] for name in ("pinned", "nf4", "int8", "full")}
MODELS = {"experts": "qwen3-moe", "turned": "gpt2"}
TRAININGS = {
    "nf4": ("--quantization", "nf4", "--dtype", "float32", "--save_steps", 2, *SHARDED),
    "full": ("--use_peft", "False", "--dtype", "bfloat16", "--save_steps", 2, *SHARDED),
    "ddp": ("--quantization", "int8", "--dtype", "float32"),
}
STEPS = ("--max_steps", 4)


pytestmark = pytest.mark.newest  # torch 2.10 shards no integers


@dataclass(frozen=True)
class Together:
    """What two processes did."""

    root: Path
    model: Path
    data: Path
    loads: dict[str, list[dict[str, Any]]]
    statuses: list[int]
    printed: str


@pytest.fixture(scope="module")
def together(
    tmp_path_factory: pytest.TempPathFactory, saved: Callable[..., Path], worker_id: str
) -> Together:
    """One process group for all, and for all workers of pytest: its start costs more than what it does."""
    base = tmp_path_factory.getbasetemp()
    root = (base if worker_id == "master" else base.parent) / "together"
    kept = root / "together.json"
    root.mkdir(exist_ok=True)
    with FileLock(root / "lock"):
        if not kept.exists():
            write_whole(kept, json.dumps(_run_together(root, saved)))
    return Together(root, root / "model", root / "rows.jsonl", **json.loads(kept.read_text()))


def _run_together(root: Path, saved: Callable[..., Path]) -> dict[str, Any]:
    model, data = prepared(root)
    assert (model, data) == (root / "model", root / "rows.jsonl")
    wanted = {name: (saved("llama", torch.bfloat16), arguments) for name, arguments in LOADS.items()}
    for name, architecture in MODELS.items():
        wanted[name] = (saved(architecture, torch.bfloat16), LOADS["nf4"])
    jobs = [{"job": "load", "path": str(path), **arguments} for path, arguments in wanted.values()]
    jobs += [
        {"job": "train", "argv": ["sft", *argv(model, data, root / name, 2, *STEPS, *more)]}
        for name, more in TRAININGS.items()
    ]
    results, printed = in_processes(2, jobs, root)
    loads = {name: [each[place] for each in results] for place, name in enumerate(wanted)}
    statuses = [status for each in results for status in each[len(wanted) :]]
    return {"loads": loads, "statuses": statuses, "printed": printed}


@pytest.mark.slow
@pytest.mark.parametrize("name", [*LOADS, *MODELS])
def test_a_sharded_load_holds_the_bits_of_a_whole_one_and_reads_its_share(together, name):
    for found in together.loads[name]:
        assert found["sharded"]
        assert found["differences"] == []
        assert found["changed"] == []  # TRL's and our own restoring leaves it alone
        whole, sharded = found["steps"]
        assert sharded == pytest.approx(whole, rel=1e-6)
        assert found["read"] <= 0.55


@pytest.mark.parametrize("name", TRAININGS)
def test_two_processes_train_as_one(together, tmp_path, name):
    without = [str(each) for each in TRAININGS[name] if each not in SHARDED]
    alone(argv(together.model, together.data, tmp_path, 1, *STEPS, *without))
    tolerance = 5e-3 if "bfloat16" in without else 2e-5
    assert losses(together.root / name) == pytest.approx(losses(tmp_path), abs=tolerance)
    assert len(losses(tmp_path)) == 4


def test_one_process_speaks_writes_and_succeeds(together):
    assert together.statuses == [0] * 2 * len(TRAININGS)
    for step in range(1, 5):
        assert together.printed.count(f"step {step}/4") == len(TRAININGS)


def test_the_adapter_is_one_file_that_peft_loads(together, tmp_path):
    out = together.root / "nf4"
    alone(argv(together.model, together.data, tmp_path, 1, *STEPS, *TRAININGS["nf4"][:4]))
    weights, expected = (load_file(path / "adapter_model.safetensors") for path in (out, tmp_path))
    assert weights.keys() == expected.keys()
    for name, value in weights.items():
        assert value.dtype == torch.float32
        torch.testing.assert_close(value, expected[name], atol=2e-4, rtol=0)
    loaded = AutoPeftModelForCausalLM.from_pretrained(out)
    named = {name.replace(".default", ""): p for name, p in loaded.named_parameters() if "lora" in name}
    assert all(torch.equal(named[name], value) for name, value in weights.items())


def test_a_sharded_checkpoint_goes_on_in_one_process(together, tmp_path):
    checkpoint = together.root / "nf4" / "checkpoint-2"
    assert damage(checkpoint) is None
    assert len(list((checkpoint / SHARDS).glob("*.safetensors"))) == 2
    resumed = [*TRAININGS["nf4"][:4], "--resume_from_checkpoint", checkpoint]
    alone(argv(together.model, together.data, tmp_path, 1, *STEPS, *resumed))
    assert losses(tmp_path)[-2:] == pytest.approx(losses(together.root / "nf4")[-2:], abs=2e-5)


def test_a_whole_model_is_gathered_at_the_end_and_stays_in_parts_in_checkpoints(together, tmp_path):
    out = together.root / "full"
    assert (out / "model.safetensors").is_file()
    checkpoint = out / "checkpoint-4"
    assert not (checkpoint / "model.safetensors").exists()
    assert damage(checkpoint) is None
    assert json.loads((out / "run_report.json").read_text())["status"] == "finished"
    resumed = [*TRAININGS["full"][:4], "--resume_from_checkpoint", out / "checkpoint-2"]
    alone(argv(together.model, together.data, tmp_path, 1, *STEPS, *resumed))
    assert losses(tmp_path)[-2:] == pytest.approx(losses(out)[-2:], abs=5e-3)

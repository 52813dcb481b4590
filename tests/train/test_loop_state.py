"""Runs resumed inside a generation, in a later epoch or with a moving reference model are the same bit for bit."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

import isotype
from isotype.data.methods import METHODS
from isotype.train import training
from isotype.train.output.checkpoints import begin_epoch
from tests.parsed import parse_settings
from tests.train.tiny import rows, save_chat_model, save_rows

pytestmark = pytest.mark.usefixtures("unchecked")

ANSWERS = (
    "--reward_funcs tests.train.tiny.reward_by_words --max_completion_length 6 --num_generations 4 --beta 0.1 "
    "--per_device_train_batch_size 4"
)


def trained(root: Path, name: str, method: str, flags: str) -> tuple[list[Any], bytes]:
    """Return loss, norm and metrics (without times) of every step, and the trained file."""
    out = root / name
    arguments = f"""--model_name_or_path {root / "model"} --dataset_name {root / "rows.jsonl"} --output_dir {out} --dtype float32
        --save_steps 1 --logging_steps 1 --learning_rate 1e-2 --lora_dropout 0.1 --gradient_checkpointing False --report_to none {flags}"""
    outcome = training.run(parse_settings(METHODS[method], arguments.split()), Console(quiet=True))
    steps = [
        (each.loss, each.grad_norm, {key: value for key, value in each.metrics if "time" not in key})
        for each in outcome.record.steps
    ]
    weights = next(
        path for path in out.iterdir() if path.name in ("adapter_model.safetensors", "model.safetensors")
    )
    return steps, weights.read_bytes()


@pytest.mark.parametrize(
    ("method", "count", "flags", "stops"),
    [
        # An epoch is two generations of two prompts, or three; each serves two steps.
        pytest.param("grpo", 4, f"{ANSWERS} --gradient_accumulation_steps 2 --num_iterations 2 --max_steps 6", (5,), id="grpo"),
        pytest.param("grpo", 6, f"{ANSWERS} --gradient_accumulation_steps 2 --num_iterations 2 --max_steps 8", (1,), id="first", marks=pytest.mark.exhaustive),
        pytest.param("sft", 5, "--per_device_train_batch_size 2 --train_sampling_strategy group_by_length --max_steps 5", (4,), id="lengths"),
        pytest.param("rloo", 6, f"{ANSWERS} --steps_per_generation 4 --max_steps 8", (3, 7), id="rloo", marks=pytest.mark.exhaustive),
        pytest.param("dpo", 8, "--use_peft False --sync_ref_model True --ref_model_sync_steps 2 --per_device_train_batch_size 4 --max_steps 4", (3,), id="reference", marks=pytest.mark.exhaustive),
    ],
)  # fmt: skip
def test_a_run_that_goes_on_is_the_same_run(
    tmp_path: Path, method: str, count: int, flags: str, stops: tuple[int, ...]
) -> None:
    save_chat_model(tmp_path / "model", layers=1)
    save_rows(tmp_path / "rows.jsonl", rows(method, count))
    whole = trained(tmp_path, "whole", method, flags)
    for step in stops:
        checkpoint = tmp_path / f"from-{step}" / f"checkpoint-{step}"
        shutil.copytree(tmp_path / "whole" / checkpoint.name, checkpoint)
        assert (
            trained(tmp_path, f"from-{step}", method, f"{flags} --resume_from_checkpoint {checkpoint}")
            == whole
        )


def test_a_checkpoint_that_cannot_say_is_answered(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_chat_model(tmp_path / "model", layers=1)
    save_rows(tmp_path / "rows.jsonl", rows("grpo", 6))
    flags = f"{ANSWERS} --num_iterations 2"
    trained(tmp_path, "out", "grpo", f"{flags} --max_steps 1")
    checkpoint = tmp_path / "out" / "checkpoint-1"
    for name in ("isotype_loop_0.pt", "isotype_checkpoint.json"):  # as another program would have saved it
        (checkpoint / name).unlink()
    trained(tmp_path, "out", "grpo", f"{flags} --max_steps 2 --resume_from_checkpoint {checkpoint}")
    why = "not saved by isotype; rows may come in another order, and completions are generated again"
    assert f"{checkpoint}: {why}" in caplog.messages


def test_a_checkpoint_without_the_reference_model_that_a_run_moves_is_refused(tmp_path):
    trainer = SimpleNamespace(args=SimpleNamespace(sync_ref_model=True), ref_model=torch.nn.Linear(2, 2))
    with pytest.raises(isotype.UsageError, match="cannot resume with its reference model"):
        begin_epoch(trainer, SimpleNamespace(), tmp_path, 0)
    begin_epoch(trainer, SimpleNamespace(), None, 0)

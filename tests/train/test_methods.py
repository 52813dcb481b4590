"""Every trainer, quantized, in both 16-bit compute dtypes: master weights and optimizer state stay float32."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from isotype.data.methods import METHODS
from isotype.train import training
from tests.pairwise import few
from tests.parsed import parse_settings
from tests.policy import assert_policy_holds
from tests.train.tiny import rows, save_chat_model, save_rows

FLAGS: dict[str, str] = {
    "reward": "--center_rewards_coefficient 0.01",
    "grpo": "--num_generations 2 --max_completion_length 6 --beta 0.1 "
    "--reward_funcs tests.train.tiny.reward_by_words",
    "rloo": "--num_generations 2 --max_completion_length 6 --reward_funcs tests.train.tiny.reward_by_words",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Record the trainers that `run` builds."""
    trainers: list[Any] = []
    build = training.enforce_trainer

    def enforce_and_keep(trainer: Any, *args: Any) -> Any:
        trainers.append(trainer)
        return build(trainer, *args)

    monkeypatch.setattr(training, "enforce_trainer", enforce_and_keep)
    return trainers


def train(model: Path, method: str, dtype: str, out: Path, more: str = "") -> training.Outcome:
    data = save_rows(out.with_suffix(".jsonl"), rows(method))
    arguments = f"""--model_name_or_path {model} --dataset_name {data} --output_dir {out} --dtype {dtype}
        --quantization nf4 --max_steps 3 --logging_steps 1 --learning_rate 1e-2 --save_steps 3
        --per_device_train_batch_size 2 --gradient_checkpointing False --report_to none
        --dataloader_pin_memory False {FLAGS.get(method, "")} {more}"""
    return training.run(parse_settings(METHODS[method], arguments.split()), Console(quiet=True))


@few(
    "method, dtype",
    [(method, dtype) for method in METHODS for dtype in ("float16", "bfloat16")],
    ("sft", "bfloat16"),
    ("dpo", "float16"),
)
def test_trains_under_the_policy(model: Path, method: str, dtype: str, tmp_path: Path, built: list[Any]):
    outcome = train(model, method, dtype, tmp_path / "out")
    (trainer,) = built
    policy = trainer.model.precision_policy
    assert (policy.compute, policy.storage) == (getattr(torch, dtype), "nf4")
    seen = assert_policy_holds(trainer.model, policy)
    assert seen["linear4bit"] >= 7
    assert seen["master"] >= 14

    steps = outcome.record.steps
    assert [step.step for step in steps] == [1, 2, 3]
    assert all(math.isfinite(step.loss) for step in steps)
    assert all(step.tokens > 0 for step in steps)
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert [step.loss for step in steps] == pytest.approx(logged, rel=1e-6)
    assert any(step.grad_norm and step.grad_norm > 0 for step in steps)

    assert list(trainer.model.peft_config) == ["default"]  # the reference is the model with it switched off

    states = list(trainer.optimizer.optimizer.state.values())
    assert len(states) == sum(p.requires_grad for p in trainer.model.parameters())
    assert {state[key].dtype for state in states for key in ("exp_avg", "exp_avg_sq")} == {torch.float32}

    scaler = trainer.accelerator.scaler
    assert (scaler is not None and scaler.is_enabled()) == (dtype == "float16")
    if dtype == "float16":
        skipped = [step.step for step in steps if step.skipped]
        # It counts the steps since the last one that it skipped.
        assert scaler.state_dict()["_growth_tracker"] == 3 - max(skipped, default=0)
        assert all(step.loss_scale and step.loss_scale >= 1 for step in steps)

    for saved in (tmp_path / "out", tmp_path / "out" / "checkpoint-3"):
        tensors = load_file(saved / "adapter_model.safetensors")
        assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
        assert any("lora_B" in name and tensor.any() for name, tensor in tensors.items())
    assert any("score" in name for name in tensors) == (method == "reward")


@pytest.mark.parametrize(
    ("method", "flags"),
    [
        pytest.param("sft", "--lora_modules_to_save lm_head embed_tokens", marks=pytest.mark.exhaustive),
        ("sft", "--use_dora True --gradient_checkpointing True"),
        pytest.param(
            "dpo",
            "--lora_modules_to_save lm_head --precompute_ref_log_probs True",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            "grpo", "--num_iterations 2 --gradient_accumulation_steps 2", marks=pytest.mark.exhaustive
        ),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_float32_heads_dora_and_reused_samples_in_float16(
    model: Path, method: str, flags: str, tmp_path: Path, built: list[Any]
):
    outcome = train(model, method, "float16", tmp_path / "out", flags)
    (trainer,) = built
    assert_policy_holds(trainer.model, trainer.model.precision_policy)
    steps = outcome.record.steps
    assert all(math.isfinite(step.loss) for step in steps)
    assert all(step.grad_norm and math.isfinite(step.grad_norm) for step in steps)
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert [step.loss for step in steps] == pytest.approx(logged, rel=1e-6, abs=1e-9)
    tensors = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    for name in ("lm_head", "embed_tokens"):
        assert any(name in key for key in tensors) == (name in flags)

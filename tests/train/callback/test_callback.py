"""PrecisionCallback in scripts that use nothing else of isotype."""

from __future__ import annotations

import logging
import math
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import peft
import pytest
import torch
import transformers
import trl

import isotype
from isotype.precision.policy import POLICY_FILE, PrecisionPolicy
from isotype.rules import ist201_promotion
from isotype.train.callback import (
    optimizer_error,
    policy_of_current_dtypes,
    raise_optimizer_state,
    rounded_error,
)
from tests.cpus import pretend
from tests.models import quiet
from tests.pairwise import few
from tests.refusals import refused
from tests.train.tiny import rows, save_chat_model


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("model"))


class Spy(transformers.TrainerCallback):
    """Record the dtypes of trainable parameters and of the optimizer's moments, as other callbacks read them."""

    def __init__(self) -> None:
        self.masters: list[set[torch.dtype]] = []
        self.moments: set[torch.dtype] = set()

    def see(self, model: Any, optimizer: Any) -> None:
        self.masters.append({p.dtype for p in model.parameters() if p.requires_grad})
        for state in optimizer.optimizer.state.values():
            self.moments |= {tensor.dtype for name, tensor in state.items() if name != "step"}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.see(kwargs["model"], kwargs["optimizer"])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.see(kwargs["model"], kwargs["optimizer"])


def arguments(cls: Any, out: Path, **more: Any) -> Any:
    given = {
        "max_steps": 4,
        "save_steps": 2,
        "per_device_train_batch_size": 2,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
    }
    return cls(output_dir=str(out), **{**given, **more})


def qlora_script(path: Path, out: Path, callback: Any = None, **more: Any) -> tuple[Any, Spy]:
    """Return a QLoRA script with TRL, and one line of isotype."""
    with quiet():
        model = transformers.AutoModelForCausalLM.from_pretrained(
            path,
            dtype=torch.bfloat16,
            quantization_config=transformers.BitsAndBytesConfig(
                load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
            ),
        )
    trainer = trl.SFTTrainer(
        model=model,
        args=arguments(trl.SFTConfig, out, bf16=True, gradient_checkpointing=False, **more),
        train_dataset=datasets.Dataset.from_list(rows("sft")),
        peft_config=peft.LoraConfig(r=4, lora_dropout=0.2),
    )
    trainer.remove_callback(transformers.PrinterCallback)
    spy = Spy()
    trainer.add_callback(callback or isotype.PrecisionCallback())
    trainer.add_callback(spy)
    return trainer, spy


def losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.fixture(scope="module")
def uninterrupted(path: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    out = tmp_path_factory.mktemp("uninterrupted")
    trainer, _ = qlora_script(path, out, isotype.PrecisionCallback(check=None))
    trainer.train()
    return out, losses(trainer)


def test_masters_that_trl_has_cast_are_float32_from_the_first_step_on(path: Path, tmp_path: Path):
    trainer, spy = qlora_script(path, tmp_path)
    before = Counter(p.dtype for p in trainer.model.parameters() if p.requires_grad)
    assert set(before) == {torch.bfloat16}  # TRL 1.16 casts them; without the cast this test would be idle
    trainer.train()
    assert spy.masters == [{torch.float32}] * 5
    assert spy.moments == {torch.float32}
    assert all(math.isfinite(loss) for loss in losses(trainer))
    policy = PrecisionPolicy.read(tmp_path / "checkpoint-4")
    assert policy is not None
    assert (policy.compute, policy.storage, policy.master) == (torch.bfloat16, "nf4", torch.float32)


def test_a_resumed_script_goes_on_exactly(
    path: Path, uninterrupted: tuple[Path, list[float]], tmp_path: Path
):
    before, expected = uninterrupted
    shutil.copytree(before / "checkpoint-2", tmp_path / "checkpoint-2")
    trainer, spy = qlora_script(path, tmp_path, isotype.PrecisionCallback(check=None))
    policy = isotype.PrecisionPolicy.read(tmp_path / "checkpoint-2")
    isotype.enforce(trainer, policy)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert losses(trainer) == expected
    assert spy.masters[0] == {torch.float32}
    for name in ("adapter_model.safetensors", "optimizer.pt"):
        assert (tmp_path / "checkpoint-4" / name).read_bytes() == (
            before / "checkpoint-4" / name
        ).read_bytes()


def test_values_that_were_rounded_by_the_load_are_refused(
    path: Path, uninterrupted: tuple[Path, list[float]], tmp_path: Path
):
    trainer, _ = qlora_script(path, tmp_path)
    checkpoint = str(uninterrupted[0] / "checkpoint-2")
    assert refused(isotype.PrecisionError, trainer.train, resume_from_checkpoint=checkpoint) == (
        "the values of the resumed checkpoint were rounded while they were loaded\n"
        "  - all trainable parameters have values that bfloat16 represents exactly\n"
        "    expected  the saved float32 values\n"
        "    fix       call isotype.enforce(trainer, isotype.PrecisionPolicy.read(checkpoint)) before "
        "trainer.train(resume_from_checkpoint=checkpoint), so that the values are loaded into float32 parameters"
    )


def test_check_warning_says_it_and_goes_on(
    path: Path,
    uninterrupted: tuple[Path, list[float]],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
):
    # TRL's head adds up the gradient of its input in float32, which costs something on this CPU.
    pretend("cpu-amx", monkeypatch)
    monkeypatch.setattr(ist201_promotion, "_OF_TRL", "not excluded")
    elsewhere = str(uninterrupted[0] / "checkpoint-2")
    trainer, _ = qlora_script(path, tmp_path, isotype.PrecisionCallback(check="warning"))
    with caplog.at_level(logging.WARNING, logger="isotype"):
        trainer.train(resume_from_checkpoint=elsewhere)
    first, *others = [record.getMessage() for record in caplog.records if record.name == "isotype"]
    assert first.startswith("the values of the resumed checkpoint were rounded while they were loaded")
    assert [message[:7] for message in others] == ["IST201:"], "the check of the first batch"
    assert trainer.state.global_step == 4
    caplog.clear()
    silent, _ = qlora_script(path, tmp_path, isotype.PrecisionCallback(check=None))
    with caplog.at_level(logging.WARNING, logger="isotype"):
        silent.train(resume_from_checkpoint=elsewhere)
    assert not [record for record in caplog.records if record.name == "isotype"]


def bare_script(
    path: Path, out: Path, dtype: torch.dtype, lora: bool = True, frozen: str = "", **more: Any
) -> Any:
    """Return a script with transformers' Trainer whose only setting of precision is `bf16`."""
    with quiet():
        model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not frozen or frozen not in name)
    if lora:
        model = peft.get_peft_model(
            model, peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
        )
    trainer = transformers.Trainer(
        model=model,
        args=arguments(
            transformers.TrainingArguments, out, **{"max_steps": 2, "save_strategy": "no", **more}
        ),
        train_dataset=datasets.Dataset.from_list([tokenizer(r["prompt"][0]["content"]) for r in rows("sft")]),
        data_collator=transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False),
    )
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def frozen_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad}


def assert_frozen_as_before(model: torch.nn.Module, before: dict[str, torch.Tensor]) -> None:
    after = frozen_weights(model)
    assert after.keys() == before.keys()
    for name, weight in after.items():
        assert weight.dtype == before[name].dtype, name
        assert torch.equal(weight, before[name]), name


@pytest.mark.parametrize(
    ("dtype", "bf16", "compute"),
    [
        (torch.float32, True, torch.bfloat16),
        pytest.param(torch.float32, False, torch.float32, marks=pytest.mark.exhaustive),
        (torch.bfloat16, False, torch.bfloat16),
        pytest.param(torch.bfloat16, True, torch.bfloat16, marks=pytest.mark.exhaustive),
    ],
)
def test_without_a_policy_frozen_weights_stay_as_they_lie(
    path: Path, tmp_path: Path, dtype: torch.dtype, bf16: bool, compute: torch.dtype, caplog: Any
):
    trainer = bare_script(path, tmp_path, dtype, bf16=bf16)
    trainer.add_callback(isotype.PrecisionCallback())
    before = frozen_weights(trainer.model)
    with caplog.at_level(logging.WARNING, logger="isotype"):
        trainer.train()
    # What a preflight finds costly (float32 weights under autocast) it says; that the policy had to be restored is said
    # by nobody.
    assert [record.message for record in caplog.records if not record.message.startswith("IST")] == []
    assert_frozen_as_before(trainer.model, before)
    assert {p.dtype for p in trainer.model.parameters() if p.requires_grad} == {torch.float32}
    trainer.save_model(str(tmp_path / "saved"))
    policy = PrecisionPolicy.read(tmp_path / "saved")
    assert policy is not None
    assert (policy.compute, policy.plain, policy.trainable, policy.keep_frozen) == (
        compute,
        dtype,
        "lora",
        True,
    )
    assert policy.reasons["storage"] == "the dtype of the model; no frozen weight is cast"


def test_without_a_policy_the_compute_dtype_of_a_quantized_model_is_kept(path: Path, tmp_path: Path):
    trainer, _ = qlora_script(path, tmp_path, max_steps=1, save_strategy="no")
    policy = policy_of_current_dtypes(trainer.model, SimpleNamespace(fp16=False, bf16=False, device="cpu"))
    assert (policy.storage, policy.compute, policy.plain) == ("nf4", torch.bfloat16, torch.bfloat16)


def test_full_training_with_one_frozen_embedding_is_full(path: Path, tmp_path: Path):
    trainer = bare_script(path, tmp_path, torch.bfloat16, lora=False, frozen="embed_tokens", bf16=True)
    trainer.add_callback(isotype.PrecisionCallback())
    before = frozen_weights(trainer.model)
    trainer.train()
    assert list(before) == ["model.embed_tokens.weight"]
    assert_frozen_as_before(trainer.model, before)
    policy = trainer.model.precision_policy
    assert (policy.trainable, policy.storage, policy.compute) == ("full", "float32", torch.bfloat16)
    trainer.model.save_pretrained(tmp_path / "saved")
    assert PrecisionPolicy.read(tmp_path / "saved") == policy


def test_a_trained_head_on_a_frozen_model(path: Path, tmp_path: Path):
    trainer = bare_script(path, tmp_path, torch.bfloat16, lora=False, frozen="model.")
    trainer.add_callback(isotype.PrecisionCallback())
    before = frozen_weights(trainer.model)
    trainer.train()
    assert_frozen_as_before(trainer.model, before)
    policy = trainer.model.precision_policy
    assert (policy.trainable, policy.storage, policy.compute) == ("full", "bfloat16", torch.bfloat16)
    assert trainer.model.lm_head.weight.dtype == torch.float32
    assert all(math.isfinite(loss) for loss in losses(trainer))


def test_16_bit_weights_among_float32_masters_need_autocast(path: Path, tmp_path: Path):
    trainer = bare_script(path, tmp_path, torch.bfloat16, lora=False, frozen="embed_tokens")
    trainer.add_callback(isotype.PrecisionCallback())
    assert refused(isotype.PrecisionError, trainer.train) == (
        "weights of different dtypes and no autocast\n"
        "  - frozen weights in bfloat16, and master weights in float32\n"
        "    expected  all weights in one dtype, or autocast\n"
        "    fix       train with bf16=True or fp16=True, or load the model in float32"
    )


def test_one_callback_decides_anew_for_every_run(path: Path, tmp_path: Path):
    callback = isotype.PrecisionCallback()
    first = bare_script(path, tmp_path / "1", torch.float32, bf16=True)
    second = bare_script(path, tmp_path / "2", torch.float32)
    for trainer, compute in ((first, torch.bfloat16), (second, torch.float32)):
        trainer.add_callback(callback)
        trainer.train()
        assert trainer.model.precision_policy.compute == compute
    assert callback.policy is None
    # The same model in another trainer: what was read off it before does not count either.
    again = bare_script(path, tmp_path / "3", torch.float32)
    again.model = again.model_wrapped = first.model
    again.add_callback(callback)
    again.train()
    assert first.model.precision_policy.compute == torch.float32


def test_a_policy_that_recasts_frozen_weights_does_so_with_a_warning(path: Path, tmp_path: Path, caplog: Any):
    trainer = bare_script(path, tmp_path, torch.float32, bf16=True)
    policy = isotype.resolve_precision(trainer.model, "bfloat16", device="cpu")
    trainer.add_callback(isotype.PrecisionCallback(policy))
    with caplog.at_level(logging.WARNING, logger="isotype"):
        trainer.train()
    assert [r.getMessage() for r in caplog.records if r.name == "isotype"] == [
        "frozen weights were cast to the policy's dtype again: float32 -> bfloat16 (12 places)"
    ]


def float16_script(path: Path, out: Path, check: str | None = "error", **more: Any) -> Any:
    with quiet():
        model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float16)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    texts = [tokenizer(row["prompt"][0]["content"]) for row in rows("sft")]
    trainer = transformers.Trainer(
        model=model,
        args=arguments(transformers.TrainingArguments, out, fp16=True, **more),
        train_dataset=datasets.Dataset.from_list(texts),
        data_collator=transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False),
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.add_callback(isotype.PrecisionCallback(check=check))
    return trainer


def float16_policy(trainer: Any) -> PrecisionPolicy:
    return isotype.resolve_precision(trainer.model, dtype="float16", device="cpu")


def test_float16_without_a_grad_scaler_is_an_error_with_a_cure(path: Path, tmp_path: Path):
    trainer = float16_script(path, tmp_path)
    assert refused(isotype.PrecisionError, trainer.train) == (
        "the trainer and the policy disagree about loss scaling\n"
        "  - no GradScaler with compute dtype float16\n"
        "    expected  a GradScaler if the compute dtype is float16, and none otherwise\n"
        "    fix       create the trainer with fp16=True, and before trainer.train() call isotype.enforce(trainer, "
        'isotype.resolve_precision(trainer.model, dtype="float16")) (on a CPU, accelerate creates no GradScaler by itself)'
    )
    cured = float16_script(path, tmp_path, max_steps=2, per_device_train_batch_size=20, save_strategy="no")
    isotype.enforce(cured, float16_policy(cured))
    cured.train()
    assert cured.accelerator.scaler.state_dict()["_growth_tracker"] > 0
    assert losses(cured)[-1] < losses(cured)[0]


@few("set_to, used", {"default": (2.0**16, 2.0**10), "own": (2.0**6, 2.0**6)}, "default")
def test_a_scaler_that_nobody_has_set_begins_with_the_policys_loss_scale(
    path: Path, tmp_path: Path, set_to: float, used: float
):
    first, again = (float16_script(path, tmp_path, None, max_steps=steps, save_steps=2) for steps in (2, 3))
    policy = replace(float16_policy(first), loss_scale=2.0**10)
    for trainer in (first, again):
        isotype.enforce(trainer.model, policy)
        trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=set_to)
        trainer.accelerator.native_amp = True
    first.train()
    assert first.accelerator.scaler.get_scale() == used
    saved = tmp_path / "checkpoint-2" / "scaler.pt"
    torch.save({**torch.load(saved), "scale": 2.0**16}, saved)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert again.accelerator.scaler.get_scale() == 2.0**16  # a run that goes on keeps what it has come to


@few("optim", ["adamw_torch_fused", "adamw_torch"], "adamw_torch_fused")
def test_a_skipped_step_changes_nothing_and_moves_no_schedule(path: Path, tmp_path: Path, optim: str):
    trainer = float16_script(path, tmp_path, None, optim=optim, max_steps=3, save_strategy="no")
    isotype.enforce(trainer, float16_policy(trainer))
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)  # overflows once and again
    start = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}
    trainer.train()
    rates = [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]
    assert rates == [0.01] * 3
    assert trainer.accelerator.scaler.get_scale() == 2.0**37
    assert trainer.accelerator.optimizer_step_was_skipped
    assert all(torch.equal(dict(trainer.model.named_parameters())[name], p) for name, p in start.items())


def test_a_grad_scaler_too_many_is_an_error(path: Path, tmp_path: Path):
    trainer, _ = qlora_script(path, tmp_path)
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu")
    assert refused(isotype.PrecisionError, trainer.train) == (
        "the trainer and the policy disagree about loss scaling\n"
        "  - a GradScaler with compute dtype bfloat16\n"
        "    expected  a GradScaler if the compute dtype is float16, and none otherwise\n"
        "    fix       create the trainer with fp16=False"
    )


def stepped(dtype: torch.dtype) -> tuple[torch.nn.Linear, torch.optim.AdamW]:
    layer = torch.nn.Linear(4, 3).to(dtype)
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.ones(2, 4, dtype=dtype)).sum().backward()
    optimizer.step()
    return layer, optimizer


def test_optimizer_state_in_bfloat16_is_found_and_cast():
    layer, optimizer = stepped(torch.bfloat16)
    error = optimizer_error(optimizer, torch.float32)
    assert str(error) == (
        "6 optimizer tensors are not in float32\n"
        "  - parameter of a parameter of shape (3, 4) is bfloat16\n"
        "    expected  float32, the policy's master dtype\n"
        "    fix       create the optimizer after isotype.enforce(model, policy)"
    )
    for parameter in layer.parameters():
        parameter.data = parameter.data.float()
        parameter.grad = None
    assert "4 optimizer tensors" in str(optimizer_error(optimizer, torch.float32))
    raise_optimizer_state(optimizer, torch.float32)
    assert optimizer_error(optimizer, torch.float32) is None
    layer(torch.ones(2, 4)).sum().backward()
    optimizer.step()


def test_full_weights_that_were_rounded_are_told_by_their_values():
    layer, _ = stepped(torch.float32)
    assert rounded_error(layer, torch.float32) is None
    for parameter in layer.parameters():
        parameter.data = parameter.data.half().float()
    assert "values that float16 represents exactly" in str(rounded_error(layer, torch.float32))
    assert rounded_error(layer, torch.float16) is None


def test_the_policy_of_a_checkpoint_is_not_written_twice(tmp_path: Path):
    policy = PrecisionPolicy(compute=torch.bfloat16, storage="nf4")
    callback = isotype.PrecisionCallback(policy)
    args = SimpleNamespace(output_dir=str(tmp_path))
    state = SimpleNamespace(global_step=4, is_world_process_zero=True)
    callback.on_save(args, state, None)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "checkpoint-4").mkdir()
    callback.on_save(args, state, None)
    assert PrecisionPolicy.read(tmp_path / "checkpoint-4") == policy
    written = (tmp_path / "checkpoint-4" / POLICY_FILE).stat().st_mtime_ns
    callback.on_save(args, state, None)
    assert (tmp_path / "checkpoint-4" / POLICY_FILE).stat().st_mtime_ns == written


def test_an_unknown_check_is_refused():
    assert refused(isotype.UsageError, isotype.PrecisionCallback, check="maybe") == (
        "unknown check\n"
        "  - check='maybe'\n"
        "    expected  'error', 'warning' or None\n"
        "    fix       give one of these"
    )

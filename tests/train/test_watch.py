"""A training with values that are not finite ends before the update, and names the operator that a reference names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import isotype
from isotype.core.errors import TrainingError
from tests.models import quiet
from tests.naive import Naive

pytestmark = pytest.mark.usefixtures("unchecked")

ROWS = 80


def model_of(dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=50,
        num_key_value_heads=2, attention_dropout=0.2,
    )  # fmt: skip
    with quiet():
        return transformers.LlamaForCausalLM(config).to(dtype)


def rows(poisoned: tuple[int, ...] = ()) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    found = []
    for index in range(ROWS):
        ids = torch.randint(0, 50, (9,), generator=generator)
        found.append(
            {"input_ids": ids, "labels": torch.full((9,), -100) if index in poisoned else ids.clone()}
        )
    return found


class Ordered(transformers.Trainer):  # type: ignore[misc]
    def _get_train_sampler(self, *_: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)


class Reference(Ordered):
    """Find the first operator of a whole training whose result is not finite, and its optimizer step."""

    first: tuple[int, str, tuple[int, ...]] | None = None

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with Naive() as mode:
            loss = super().training_step(*args, **kwargs)
        if self.first is None and mode.first is not None:
            self.first = (self.state.global_step + 1, *mode.first)
            self.control.should_training_stop = True
        return loss


class Overflow(transformers.TrainerCallback):  # type: ignore[misc]
    """A layer whose results exceed float16's range from step 7."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 6:
            # 64 products of up to this and some tenths
            kwargs["model"].model.layers[1].mlp.down_proj.weight.data.fill_(65000.0)
            kwargs["model"].model.layers[1].mlp.up_proj.weight.data.mul_(500.0)
            kwargs["model"].model.layers[1].mlp.gate_proj.weight.data.mul_(500.0)


def trainer_of(kind: str, out: Path, cls: Any = Ordered, **more: Any) -> Any:
    given: dict[str, Any] = {
        "max_steps": 12,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "save_steps": 3,
        "logging_steps": 1,
        "learning_rate": 1e20 if kind == "learning rate" else 1e-3,
        "warmup_steps": 3 if kind == "learning rate" else 0,
        "fp16": kind == "overflow",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
    }
    model = model_of()
    arguments = transformers.TrainingArguments(output_dir=str(out), **{**given, **more})
    poisoned = tuple(range(16, 20)) if kind == "batch" else ()
    with quiet():
        trainer = cls(model=model, args=arguments, train_dataset=rows(poisoned))
    trainer.remove_callback(transformers.PrinterCallback)
    if kind == "overflow":
        trainer.add_callback(Overflow())
        policy = isotype.resolve_precision(model, dtype="float16", device="cpu", trainable="full")
        isotype.enforce(trainer, policy)
    return trainer


def stopped(trainer: Any, **given: Any) -> str:
    trainer.add_callback(isotype.PrecisionCallback(check=None, **given))
    with quiet(), pytest.raises(TrainingError) as caught:
        trainer.train()
    return str(caught.value)


@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step:UserWarning")
@pytest.mark.parametrize(
    ("kind", "step", "words"),
    [
        ("batch", 5, "div gives NaN: 0 / 0"),
        pytest.param("learning rate", None, "is beyond float32", marks=pytest.mark.exhaustive),
        ("overflow", 7, "is beyond float16"),
    ],
)
def test_a_script_stops_in_the_step_and_names_the_operator_that_is_first(
    kind: str, step: int | None, words: str, tmp_path: Path
) -> None:
    reference = trainer_of(kind, tmp_path / "reference", Reference)
    with quiet():
        reference.train()
    assert reference.first is not None
    first, operator, shape = reference.first
    assert step in (None, first)
    trainer = trainer_of(kind, tmp_path / "out")
    said = stopped(trainer)
    assert f"step {first}: loss nan" in said or f"step {first}: loss inf" in said
    assert f"   {operator}   forward   " in said
    assert f"|   result  {'float16' if kind == 'overflow' else 'float32'} {list(shape)}" in said
    assert words in said
    assert trainer.state.global_step == first - 1
    assert all(bool(p.isfinite().all()) for p in trainer.model.parameters())
    assert "compute_loss" not in vars(trainer)
    whole = tmp_path / "out" / f"checkpoint-{(first - 1) // 3 * 3}"
    assert ("checkpoint-" in said) == (first > 3)
    assert first <= 3 or f"trainer.train(resume_from_checkpoint={str(whole)!r})" in said


@pytest.mark.newest  # transformers 5.20 divides by an integer, which is shown among no float operands
def test_the_message(tmp_path: Path) -> None:
    said = stopped(trainer_of("batch", tmp_path / "out"))
    source = said.partition("forward   ")[2].partition("\n")[0]
    assert said.replace(str(tmp_path), "TMP").replace(source, "SOURCE") == (
        "the loss is not finite: stopped before the update\n"
        "  - step 5: loss nan, learning rate 0.000666667, gradient norm 0\n"
        "    expected  finite numbers\n"
        "    fix       see the operator below\n"
        "  - div gives NaN: 0 / 0\n"
        "      --> the model or its loss   aten.div.Tensor   forward   SOURCE\n"
        "       |   self    float32 []   largest 0\n"
        "       |   other   float32 []   largest 0\n"
        "       |   result  float32 []   1 NaN of 1 value\n"
        "    expected  finite numbers\n"
        "    fix       check the batch: a mean over no labels (all labels are -100) is 0 / 0\n"
        "  = TMP/out/checkpoint-3 is a complete checkpoint; resume with trainer.train(resume_from_checkpoint='TMP/out/checkpoint-3')"
    )


def test_who_does_not_want_it_is_not_stopped(tmp_path: Path) -> None:
    trainer = trainer_of("batch", tmp_path / "out", max_steps=6, save_steps=100)
    trainer.add_callback(isotype.PrecisionCallback(check=None, watch=False))
    with quiet():
        trainer.train()
    assert trainer.state.global_step == 6


def test_a_sound_training_is_as_it_was_without(tmp_path: Path) -> None:
    losses = []
    for watch in (False, True):
        trainer = trainer_of("sound", tmp_path / str(watch), max_steps=4)
        trainer.add_callback(isotype.PrecisionCallback(check=None, watch=watch))
        with quiet():
            trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
        assert not {"compute_loss", "_get_grad_norm"} & set(vars(trainer))
    assert losses[0] == losses[1]


def test_the_run_again_draws_the_same_dropout(tmp_path: Path) -> None:
    """Dropout that fails in one of ten draws fails again with the step's random states."""

    class Unlucky(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x / (torch.rand(()) > 0.1).float()

    trainer = trainer_of("sound", tmp_path / "out", max_steps=60, num_train_epochs=20, save_steps=1000)
    trainer.model.lm_head = torch.nn.Sequential(trainer.model.lm_head, Unlucky())
    said = stopped(trainer)
    assert "div gives infinity: " in said or "div gives NaN: " in said
    assert "lm_head.1   aten.div.Tensor   forward   train/test_watch.py:" in said

"""check(trainer): the trainer's own loss on its own first batch, and the trainer as it was."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import numpy
import peft
import pytest
import torch
import transformers
import trl
from torch import nn

import isotype
from isotype.core.errors import UsageError
from isotype.model.recompute import checkpointing
from isotype.preflight.from_trainer import request_of_trainer
from isotype.train.callback import before_first_step
from tests.allocations import peak_of
from tests.models import quiet, tiny_model
from tests.pairwise import few
from tests.refusals import refused
from tests.train.tiny import reward_by_words, rows, save_chat_model


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Of 96 columns, bitsandbytes cannot repack 4-bit weights on CPUs with bfloat16 (IST407).
    return save_chat_model(tmp_path_factory.mktemp("model"), "bfloat16", intermediate_size=128)


def packed(path: Path) -> Any:
    """A bfloat16 checkpoint in nf4."""
    with quiet():
        return transformers.AutoModelForCausalLM.from_pretrained(
            path,
            dtype=torch.bfloat16,
            quantization_config=transformers.BitsAndBytesConfig(
                load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
            ),
        )


def arguments(cls: Any, out: Path, **more: Any) -> Any:
    given = {
        "max_steps": 2,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "save_strategy": "no",
        "dataloader_pin_memory": False,
        "gradient_checkpointing": False,
    }
    return cls(output_dir=str(out), **{**given, **more})


def make(method: str, path: Path, out: Path, **more: Any) -> Any:
    """The trainer of a script with TRL."""
    cls, config = {"sft": (trl.SFTTrainer, trl.SFTConfig), "dpo": (trl.DPOTrainer, trl.DPOConfig)}[method]
    return cls(
        model=packed(path),
        args=arguments(config, out, **more),
        train_dataset=datasets.Dataset.from_list(rows(method)),
        processing_class=transformers.AutoTokenizer.from_pretrained(path),
        peft_config=peft.LoraConfig(r=4, lora_dropout=0.2, target_modules=["q_proj"]),
    )


@pytest.mark.parametrize(
    ("arguments_of_evaluation", "copies"),
    [
        ({}, 2),  # each batch is appended to a copy of the batches before it
        ({"eval_do_concat_batches": False}, 1),
        ({"eval_accumulation_steps": 2}, 2 * 2 / 5),
        ({"prediction_loss_only": True}, 0),
        ({"use_cache": True}, 2),  # the cache is no prediction
    ],
    ids=lambda value: next(iter(value), "all") if isinstance(value, dict) else "",
)
def test_predictions_that_an_evaluation_keeps_are_counted(
    arguments_of_evaluation: dict[str, Any], copies: float, tmp_path: Path
) -> None:
    # artidoro/qlora #261, huggingface/transformers #17089
    ids = torch.arange(2 * 5 * 8).remainder(13).view(10, 8)
    shape = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=1000
    )
    options = {"eval_strategy": "epoch", "per_device_eval_batch_size": 2, "bf16": True}
    trainer = transformers.Trainer(
        transformers.LlamaForCausalLM(shape),
        arguments(transformers.TrainingArguments, tmp_path, **options | arguments_of_evaluation),
        train_dataset=(whole := [{"input_ids": row, "labels": row} for row in ids]),
        eval_dataset=whole,
        compute_metrics=lambda predicted: {"rows": len(predicted.predictions)},
    )
    report = isotype.check(trainer, device="t4", wiring=False, verify=False)
    assert report.complete
    with torch.no_grad():
        logits = trainer.model(ids[:2]).logits
    whole_set = 5 * logits.nbytes
    added = logits.nbytes if copies else 0  # the batch that was computed last counts as activations
    assert report.memory.phases["evaluate"].get("predictions", 0) == copies * whole_set - added


POLICY = {"grpo": (trl.GRPOTrainer, trl.GRPOConfig), "rloo": (trl.RLOOTrainer, trl.RLOOConfig)}


@few("method", ["grpo", "rloo"], "grpo")
def test_trainers_whose_batches_are_prompts(method: str, path: Path, tmp_path: Path) -> None:
    cls, config = POLICY[method]
    trainer = cls(
        model=packed(path),
        args=arguments(config, tmp_path, num_generations=2, max_completion_length=6, bf16=True),
        reward_funcs=reward_by_words,
        train_dataset=datasets.Dataset.from_list(rows(method)),
        processing_class=transformers.AutoTokenizer.from_pretrained(path),
        peft_config=peft.LoraConfig(r=4, target_modules=["q_proj"]),
    )
    report = isotype.check(trainer, verify=False)
    assert report.complete
    assert report.ok
    assert report.trace.reach is not None
    assert not report.trace.reach.undecided


@few("method", ["grpo", "rloo"], "grpo")
def test_prompts_and_the_rollout_count_in_the_memory(method: str, path: Path, tmp_path: Path) -> None:
    cls, config = POLICY[method]

    def trainer(words: int, **more: Any) -> Any:
        data = [{"prompt": "w1 " * words}] * 4
        options = {"num_generations": 2, "max_completion_length": 10, "bf16": False, **more}
        return cls(
            model=transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32),
            args=arguments(config, tmp_path, **options),
            reward_funcs=reward_by_words,
            train_dataset=datasets.Dataset.from_list(data),
            eval_dataset=datasets.Dataset.from_list(data),
            processing_class=transformers.AutoTokenizer.from_pretrained(path),
        )

    request = request_of_trainer(trainer(30, gradient_accumulation_steps=4))
    assert request.inputs.inputs["input_ids"].shape == (2, 30 + 10)
    assert request.evaluation.inputs["input_ids"].shape == (8, 30)  # all rows of an optimizer step at once
    assert (
        request.autocast_eval
    )  # accelerate's autocast is in the forward with which the whole model generates
    report = isotype.check(trainer(30, gradient_accumulation_steps=4), wiring=False, verify=False)
    assert report.memory.phases["rollout"]["inputs"] >= 2 * 8 * 30 * 8
    larger = {"eval_strategy": "steps", "per_device_eval_batch_size": 16}
    request = request_of_trainer(trainer(30, num_generations_eval=4, **larger))
    assert request.evaluation.inputs["input_ids"].shape == (16, 30)


def test_the_memory_of_a_rollout_is_what_the_trainer_needs(path: Path, tmp_path: Path) -> None:
    trainer = trl.GRPOTrainer(
        model=transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32),
        args=arguments(
            trl.GRPOConfig, tmp_path, num_generations=4, max_completion_length=30, bf16=True,
            per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=1,
        ),
        reward_funcs=lambda completions, **columns: [float(at) for at, _ in enumerate(completions)],
        train_dataset=datasets.Dataset.from_list([{"prompt": "w1 " * 60}] * 4),
        processing_class=transformers.AutoTokenizer.from_pretrained(path),
        peft_config=peft.LoraConfig(r=4, target_modules=["q_proj"]),
    )  # fmt: skip
    phases = isotype.check(trainer, wiring=False, verify=False).memory.phases
    foreseen = {name: phases[name]["activations"] for name in ("rollout", "forward")}
    trainer.generation_config.eos_token_id = None  # every completion has the greatest length
    model, real = trainer.model, {"rollout": 0, "forward": 0}

    def allocated(of: Any, *args: Any, **kwargs: Any) -> Any:
        kind = "forward" if torch.is_grad_enabled() else "rollout"
        peak, output = peak_of(lambda: of(*args, **kwargs))
        real[kind] = max(real[kind], peak)
        return output

    generate, forward = model.generate, model.forward
    model.generate, model.forward = partial(allocated, generate), partial(allocated, forward)
    trainer.train()
    assert foreseen["rollout"] == pytest.approx(real["rollout"], rel=0.1)
    assert foreseen["forward"] == pytest.approx(real["forward"], rel=0.1)


def test_a_dtype_that_only_the_generation_of_a_step_refuses(path: Path, tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    model.model.norm.float()  # the fused head of training casts, the head of generation does not
    trainer = trl.GRPOTrainer(
        model=model,
        args=arguments(trl.GRPOConfig, tmp_path, num_generations=2, max_completion_length=4, bf16=False),
        reward_funcs=reward_by_words,
        train_dataset=datasets.Dataset.from_list(rows("grpo")),
        processing_class=transformers.AutoTokenizer.from_pretrained(path),
    )
    (error,) = isotype.check(trainer, wiring=False, verify=False).errors
    assert (error.phase, error.cause) == ("generate", "model.norm.weight is float32")


def test_a_pair_of_answers_is_measured_over_its_completions(path: Path, tmp_path: Path) -> None:
    trainer = make("dpo", path, tmp_path)
    phases = ("forward", "backward")
    reach = isotype.check(trainer, phases=phases, verify=False).trace.reach
    assert reach is not None
    assert (reach.leaks, reach.unused, reach.undecided) == ((), (), ())
    trainer.model.peft_config["default"].lora_alpha = 0
    for module in trainer.model.modules():
        if isinstance(module, peft.tuners.lora.LoraLayer):
            module.scaling = dict.fromkeys(module.scaling, 0.0)
    report = isotype.check(trainer, phases=phases, verify=False)
    assert "IST906" in {finding.code for finding in report.findings}


def test_the_weights_of_a_reference_model_are_counted(path: Path, tmp_path: Path) -> None:
    trainer = trl.DPOTrainer(
        model=transformers.AutoModelForCausalLM.from_pretrained(path),
        args=arguments(trl.DPOConfig, tmp_path),
        train_dataset=datasets.Dataset.from_list(rows("dpo")),
        processing_class=transformers.AutoTokenizer.from_pretrained(path),
    )
    weights = sum(each.nbytes for each in trainer.model.parameters())
    assert (
        isotype.check(trainer, wiring=False, verify=False).memory.phases["forward"]["weights"] == 2 * weights
    )


def process() -> tuple[Any, ...]:
    return (random.getstate(), repr(numpy.random.get_state()), torch.get_rng_state().tolist())


def losses(trainer: Any) -> list[float]:
    trainer.train()
    return [trainer.state.log_history[-1]["train_loss"]]


@few("method", ["sft", "dpo"], "sft")
def test_a_trainer_and_its_training_are_as_without_a_check(method: str, path: Path, tmp_path: Path) -> None:
    def run(checked: bool) -> list[float]:
        transformers.set_seed(0)
        trainer = make(method, path, tmp_path / str(checked), bf16=True)
        weights = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
        if checked:
            before, state = process(), dict(vars(trainer.state))
            report = isotype.check(trainer, verify=False)
            assert process() == before
            assert vars(trainer.state) == state
            assert report.ok
            assert report.complete
            assert report.trace.setup.autocast == torch.bfloat16
            assert report.trace.setup.learning_rate == 1e-2
            assert {call.phase for call in report.trace.calls} == {"forward", "backward", "optimizer"}
            assert trainer.optimizer is None
            for name, parameter in trainer.model.named_parameters():
                assert torch.equal(parameter, weights[name])
                assert parameter.grad is None
            assert not any(getattr(trainer, "_metrics", {"train": {}})["train"].values())
        return losses(trainer)

    assert run(checked=True) == run(checked=False)


def test_float16_training_of_a_bfloat16_checkpoint(path: Path, tmp_path: Path) -> None:
    """`fp16=True` over nf4: TRL leaves bfloat16 adapters, whose gradients no GradScaler takes on a GPU."""
    trainer = make("sft", path, tmp_path, bf16=False, use_cpu=True)
    trainer.args.fp16 = True
    report = isotype.check(trainer, device="t4", wiring=False, verify=False)
    assert report.trace.setup.autocast == torch.float16
    assert report.trace.setup.scaler
    adapters = {weight.dtype for weight in report.trace.weights if weight.trainable}
    assert adapters == {torch.bfloat16}
    assert "IST302" in {finding.code for finding in report.findings}
    here = isotype.check(
        trainer, wiring=False, verify=False
    ).trace.setup  # accelerate has no float16 autocast on a CPU
    assert (here.autocast, here.scaler) == (None, False)


# ------------------------------------------------------------------------------------------------- plain transformers


class Regression(nn.Module):
    """A model with one layer in another dtype, as the Trainer takes it."""

    def __init__(self, wide: bool) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 1)
        if wide:
            self.second.double()

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        made = self.second(self.first(x)).squeeze(-1)
        return {
            "loss": (made - labels.to(made.dtype)).square().mean() if labels is not None else None,
            "logits": made,
        }


def plain(out: Path, wide: bool = False, count: int = 8, **more: Any) -> transformers.Trainer:
    data = [{"x": [float(number)] * 4, "labels": float(number)} for number in range(count)]
    return transformers.Trainer(
        model=Regression(wide),
        args=arguments(transformers.TrainingArguments, out, **more),
        train_dataset=data,
        data_collator=lambda features: {
            name: torch.tensor([feature[name] for feature in features]) for name in ("x", "labels")
        },
    )


def test_a_mismatch_is_found_with_the_trainers_loss(tmp_path: Path) -> None:
    trainer = plain(tmp_path, wide=True)
    (finding, *_) = isotype.check(trainer, verify=False).errors
    assert (finding.code, finding.module) == ("IST101", "second")
    with pytest.raises(RuntimeError, match="same dtype"):
        trainer.train()


def test_what_is_said_beside_a_trainer_or_a_request_takes_the_place_of_its_own(tmp_path: Path) -> None:
    trainer = plain(tmp_path, bf16=True)
    first = request_of_trainer(trainer)
    for subject in (trainer, first):
        own = isotype.check(subject, verify=False).trace.setup
        assert (own.autocast, own.scaler, own.optimizer) == (torch.bfloat16, False, "adamw_torch_fused")
        assert (own.batch["x"], own.learning_rate) == ((2, 4), 1e-2)
        report = isotype.check(
            subject,
            {"x": torch.ones(3, 4), "labels": torch.ones(3)},
            device="t4",
            autocast="float16",
            optimizer="sgd",
            learning_rate=0.5,
            phases=("forward", "backward"),
            fsdp=2,
            verify=False,
        )
        setup = report.trace.setup
        assert report.complete
        assert (setup.profile.name, setup.autocast, setup.scaler) == ("t4", torch.float16, True)
        assert (setup.optimizer, setup.learning_rate, setup.fsdp) == ("sgd", 0.5, 2)
        assert (setup.phases, setup.batch["x"]) == (("forward", "backward"), (3, 4))
        assert isotype.check(subject, scaler=True, autocast=False, verify=False).trace.setup.scaler
        report = isotype.check(
            subject, lambda model: model(x=torch.ones(5, 4), labels=torch.ones(5))["loss"], verify=False
        )
        assert report.complete
        assert any(operand.shape == (5, 4) for call in report.trace.calls for operand in call.operands)
        with pytest.raises(UsageError, match="inputs of type int"):
            isotype.check(subject, 3, verify=False)
        with pytest.raises(TypeError, match="did you mean 'device'"):
            isotype.check(subject, devise="t4")  # type: ignore[call-arg]


def test_the_order_of_the_data_is_kept(tmp_path: Path) -> None:
    def order(checked: bool) -> list[Any]:
        transformers.set_seed(1)
        trainer = plain(tmp_path)
        if checked:
            isotype.check(trainer, verify=False)
        return [batch["labels"].tolist() for batch in trainer.get_train_dataloader()]

    assert order(True) == order(False)


class Nothing(torch.utils.data.IterableDataset[Any]):
    """A stream without a row."""

    def __iter__(self) -> Iterator[Any]:
        return iter(())


@pytest.mark.parametrize("data", [[], Nothing()], ids=["list", "stream"])
def test_a_trainer_without_data(data: Any, tmp_path: Path) -> None:
    trainer = plain(tmp_path)
    trainer.train_dataset = data
    assert refused(UsageError, isotype.check, trainer) == (
        "nothing to check\n"
        "  - an empty train_dataset\n"
        "    expected  at least one batch\n"
        "    fix       give the trainer data"
    )


@pytest.mark.parametrize("by_trainer", [False, True])
def test_a_report_counts_the_layers_that_are_checkpointed(by_trainer: bool, tmp_path: Path) -> None:
    # hiyouga/LlamaFactory #4772: the peaks of two runs that checkpoint different layers were compared
    model = tiny_model("llama")
    row = {"input_ids": torch.arange(8), "labels": torch.arange(8)}
    settings = {"use_reentrant": False, "every_n_layers": 2}
    more = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": settings} if by_trainer else {}
    args = arguments(transformers.TrainingArguments, tmp_path, **more)
    trainer = transformers.Trainer(model, args, train_dataset=[row, row])
    if not by_trainer:
        model.gradient_checkpointing_enable(every_n_layers=2)
    report = isotype.check(trainer, wiring=False, verify=False)
    assert "gradient checkpointing of 1 of 2 layers" in report.trace.setup.details


@pytest.mark.parametrize(("tokens", "words"), [(8, ["24 of 32 columns are only padding"]), (30, [])])
def test_columns_that_only_padding_to_a_maximum_fills(tokens: int, words: list[str], tmp_path: Path) -> None:
    # deepspeedai/DeepSpeedExamples #849: a step computes 32 columns, and 8 have tokens
    ids = torch.arange(32)
    rows = [{"input_ids": ids, "labels": ids, "attention_mask": (ids < at).long()} for at in (tokens, 5)]
    args = arguments(transformers.TrainingArguments, tmp_path)
    report = isotype.check(
        transformers.Trainer(tiny_model("llama"), args, train_dataset=rows), wiring=False, verify=False
    )
    assert [words for words in report.trace.setup.details if "padding" in words] == words


def test_the_arguments_of_checkpointing() -> None:
    def given(on: bool, kwargs: Any = None) -> Any:
        return checkpointing(SimpleNamespace(gradient_checkpointing=on, gradient_checkpointing_kwargs=kwargs))

    assert given(False) is None
    assert given(True) == {"gradient_checkpointing_kwargs": {"use_reentrant": False}}
    assert given(True, {"use_reentrant": True}) == {"gradient_checkpointing_kwargs": {"use_reentrant": True}}
    plain = {"gradient_checkpointing_kwargs": {"use_reentrant": False}}
    assert given(True, {"every_n_layers": 2, "offload": True}) == {**plain, "every_n_layers": 2}


def test_the_first_batch_of_a_running_trainer_is_checked_once(tmp_path: Path) -> None:
    trainer = plain(tmp_path)
    reports: list[Any] = []

    class Watching(transformers.TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            before_first_step(kwargs["model"], args, kwargs["optimizer"], reports.append)

    trainer.add_callback(Watching())
    trainer.train()
    (report,) = reports
    assert report.ok
    assert report.complete
    assert not trainer.model._forward_pre_hooks
    assert {call.phase for call in report.trace.calls} == {"forward", "backward", "optimizer"}


@pytest.mark.parametrize("fused", [False, True])
def test_a_trainer_with_an_optimizer_of_its_own(path: Path, tmp_path: Path, fused: bool) -> None:
    """Its state stays float32 after a cast of the model, and `optim` in the arguments names another class."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25, fused=fused)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    model.bfloat16()
    trainer = transformers.Trainer(
        model,
        arguments(transformers.TrainingArguments, tmp_path),
        train_dataset=[{"input": torch.ones(4)}] * 4,
        optimizers=(optimizer, None),
    )

    def loss(model: nn.Module) -> torch.Tensor:
        return model(torch.ones(2, 4, dtype=torch.bfloat16)).float().sum()

    report = isotype.check(trainer, loss, device="cpu")
    name = "fused AdamW" if fused else "AdamW"
    assert (report.trace.setup.optimizer, report.trace.setup.learning_rate) == (name, 0.25)
    (error,) = report.errors
    assert error.code == "IST305"
    assert "mixes bfloat16 and float32" in error.message
    assert fused == ("create the optimizer with fused=False" in [fix.description for fix in error.fixes])


@pytest.mark.parametrize("steps", [2, 64])
def test_a_step_has_at_most_the_micro_batches_of_an_epoch(steps: int, path: Path, tmp_path: Path) -> None:
    trainer = make("sft", path, tmp_path, gradient_accumulation_steps=steps)
    batches = len(trainer.get_train_dataloader())
    assert 2 <= batches < 64
    assert request_of_trainer(trainer).accumulates == min(steps, batches)

"""`--torch_compile`: only blocks are compiled, into few graphs without breaks, with the losses of an eager run."""

from __future__ import annotations

import io
import logging
import pickle
from pathlib import Path
from typing import Any

import accelerate
import datasets
import peft
import pytest
import torch
import transformers
import trl
from rich.console import Console
from torch._dynamo.utils import counters

import isotype
from isotype.data.methods import METHODS
from isotype.train import training
from isotype.train.compilation import CompiledBlock, compile_blocks
from isotype.train.preflight.step_plan import parse_options, plan_of
from isotype.train.trainer import policy_trainer
from isotype.train.validate import check_settings
from tests.models import tiny_batch, tiny_model
from tests.parsed import parse_settings
from tests.train.tiny import rows, save_chat_model, save_rows

# torch's compiler asks tensors for gradients and classes for instances, and hides what torch says of that where warnings are no errors.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]

LAYERS = 3
COMPILED = ("--torch_compile", "True", "--torch_compile_backend", "eager")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("model"), layers=LAYERS)


@pytest.fixture(autouse=True)
def forgotten() -> Any:
    """Reset torch's compiler, so that graphs of other tests are not counted."""
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
    counters.clear()


def adapted() -> Any:
    return peft.get_peft_model(
        tiny_model("llama"), peft.LoraConfig(r=4, target_modules=["v_proj"], init_lora_weights=False)
    ).train()


def train(path: Path, out: Path, *more: str) -> tuple[list[float], str]:
    data = save_rows(out.parent / "train.jsonl", rows("sft"))
    argv = f"""--model_name_or_path {path} --dataset_name {data} --output_dir {out} --max_steps 2 --logging_steps 1
        --per_device_train_batch_size 2 --learning_rate 1e-2 --lora_dropout 0 --save_strategy no
        --device cpu --eval_split 4 --report_to none --gradient_checkpointing True --lora_target_modules q_proj down_proj""".split()
    text = io.StringIO()
    console = Console(file=text, width=200)
    outcome = training.run(parse_settings(METHODS["sft"], [*argv, *more]), console)
    return [step.loss for step in outcome.record.steps], text.getvalue()


# However many blocks there are: the first, whose input needs no gradient, and one for the others; each for the first shape that
# comes, then for any. Evaluation in between compiles nothing.
MOST_GRAPHS = 4


@pytest.mark.parametrize(
    "more",
    [
        ("--quantization", "nf4", "--lora_target_modules", "q_proj"),
        pytest.param((), marks=pytest.mark.exhaustive),
        pytest.param(("--gradient_checkpointing", "False"), marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_few_graphs_no_breaks_and_the_same_losses(
    path: Path, tmp_path: Path, more: tuple[str, ...], caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with caplog.at_level(logging.WARNING):
        found, text = train(path, tmp_path / "compiled", *more, *COMPILED)
    assert f"compiled: {LAYERS} blocks by eager" in text
    assert "fused:" not in text
    assert "IST199" not in caplog.text
    assert "recompile_limit" not in caplog.text
    assert dict(counters["graph_break"]) == {}
    assert 1 <= counters["stats"]["unique_graphs"] <= MOST_GRAPHS
    counters.clear()
    monkeypatch.setattr("isotype.train.callback.before_first_step", lambda *_: None)
    wanted, plain = train(path, tmp_path / "plain", *more, "--no_fuse")
    assert not counters["stats"]
    assert "compiled:" not in plain
    # float32: rounding alone tells them apart, over two updates.
    assert found == pytest.approx(wanted, rel=1e-5)


def test_gradients_are_those_of_the_blocks_as_written() -> None:
    model, batch = adapted(), tiny_batch("llama")

    def gradients() -> dict[str, torch.Tensor]:
        model.zero_grad()
        model(**batch).loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    wanted, keys = gradients(), list(model.state_dict())
    report = compile_blocks(model, {"backend": "aot_eager"})
    assert str(report).startswith("compiled: 2 blocks by aot_eager")
    for name, gradient in gradients().items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-4, atol=1e-6)
    assert counters["stats"]["unique_graphs"] == 2  # of the first block, and of the others
    assert list(model.state_dict()) == keys
    block = next(module for module in model.modules() if isinstance(module, CompiledBlock))
    assert type(pickle.loads(pickle.dumps(block))) is type(block)


@pytest.mark.exhaustive
def test_a_compiled_block_leaves_no_dropout_of_experts_out() -> None:
    """isotype's function for experts runs uncompiled: PEFT's, which can be compiled, has no dropout."""
    batch = tiny_batch("qwen3-moe")
    policy = isotype.resolve_precision(tiny_model("qwen3-moe"), dtype="float32", device="cpu")
    targets = {
        "target_modules": [],
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    }
    model = isotype.add_lora(
        tiny_model("qwen3-moe"), policy, r=4, lora_dropout=0.4, init_lora_weights=False, **targets
    )

    def loss(seed: int) -> float:
        torch.manual_seed(seed)
        result = model.train()(**batch).loss
        result.backward()
        return float(result.detach())

    losses = [loss(seed) for seed in (1, 2)]
    assert losses[0] != losses[1]
    compile_blocks(model, {"backend": "eager"})
    assert [loss(seed) for seed in (1, 2)] == pytest.approx(losses, rel=1e-6)
    assert counters["stats"]["unique_graphs"]


def test_generation_is_not_compiled() -> None:
    model, batch = adapted(), tiny_batch("llama")
    wanted = model.generate(input_ids=batch["input_ids"][:1], max_new_tokens=4, do_sample=False)
    compile_blocks(model, {"backend": "aot_eager"})
    found = model.generate(input_ids=batch["input_ids"][:1], max_new_tokens=4, do_sample=False)
    assert torch.equal(found, wanted)
    assert not counters["stats"]


def test_a_model_without_blocks_says_that_nothing_is_compiled() -> None:
    report = compile_blocks(torch.nn.Linear(2, 2), {"backend": "aot_eager"})
    assert "nothing, because the model has no list of blocks" in str(report)


def test_what_accelerate_launch_asks_for_is_taken_over(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "AOT_EAGER")
    accelerate.state.AcceleratorState._reset_state(True)
    trainer = policy_trainer(trl.SFTTrainer)(
        model=transformers.AutoModelForCausalLM.from_pretrained(path),
        args=trl.SFTConfig(output_dir=str(tmp_path), report_to="none", use_cpu=True, bf16=False),
        train_dataset=datasets.Dataset.from_list(rows("sft")),
    )
    assert trainer.compilation == {"backend": "aot_eager"}
    assert trainer.accelerator.prepare(trainer.model) is trainer.model


def test_a_script_that_compiles_the_whole_model_is_checked_outside_of_the_graph(
    tmp_path: Path, caplog: Any
) -> None:
    """transformers' Trainer compiles the whole model; no graph contains frames of the check."""
    path = save_chat_model(tmp_path / "model")
    checked: list[Any] = []
    callback = isotype.PrecisionCallback()
    callback._report = lambda report, **_: checked.append(report)  # type: ignore[method-assign]
    trainer = transformers.Trainer(
        model=transformers.AutoModelForCausalLM.from_pretrained(path),
        args=transformers.TrainingArguments(
            output_dir=str(tmp_path),
            report_to="none",
            use_cpu=True,
            max_steps=2,
            per_device_train_batch_size=2,
            torch_compile=True,
            torch_compile_backend="eager",
            disable_tqdm=True,
            save_strategy="no",
            dataloader_pin_memory=False,
        ),
        train_dataset=datasets.Dataset.from_list([{"input_ids": [4, 5, 6, 7], "labels": [4, 5, 6, 7]}] * 8),
        callbacks=[callback],
    )
    trainer.remove_callback(transformers.PrinterCallback)
    with caplog.at_level(logging.WARNING):
        trainer.train()
    (report,) = checked
    assert not report.errors
    assert "not checked" not in caplog.text
    assert "isotype/trace" not in str(dict(counters["graph_break"]))
    assert counters["stats"]["unique_graphs"] <= 4


def test_inductor_without_a_compiler_is_refused_before_anything_is_loaded(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    argv = ["--model_name_or_path", str(path), "--dataset_name", "x", "--output_dir", str(tmp_path)]
    settings = parse_settings(METHODS["sft"], [*argv, "--device", "cpu", "--torch_compile", "True"])
    with pytest.raises(isotype.UsageError, match="no-such-compiler is not on the path"):
        check_settings(settings)


def test_a_check_judges_the_step_uncompiled(path: Path) -> None:
    options, rest = parse_options(["sft", "--model_name_or_path", str(path), *COMPILED])
    plan = plan_of(options, rest)
    assert any(note.startswith("torch.compile: the uncompiled step is checked") for note in plan.notes)
    assert not plan.fuse

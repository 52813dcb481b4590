"""Runs from start to end: a second run into the same folder, sample questions, and messages."""

from __future__ import annotations

import io
import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
import transformers
from rich.console import Console
from safetensors.torch import load_file, save_file

from isotype.checkpoint.adapter import load_for_inference
from isotype.checkpoint.merge.merge import merge_adapter
from isotype.cli.main import main
from isotype.core.errors import CheckpointError, UsageError
from isotype.data.methods import METHODS
from isotype.precision.policy import PrecisionPolicy
from isotype.report.run.record import Sample
from isotype.train import describe, training
from isotype.train.chat import encode
from isotype.train.models import check_module_names, processing_class
from tests.caches import own_cache
from tests.models import save_tiny, tiny_model
from tests.pairwise import few
from tests.parsed import parse_settings
from tests.train.tiny import rows, save_chat_model, save_rows
from tests.zoo import ARCHITECTURES

pytestmark = pytest.mark.usefixtures("unchecked")
QUICK = ("--max_steps", 1, "--save_strategy", "no")
POLICY = PrecisionPolicy(compute=torch.bfloat16, storage="bfloat16")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("models") / "Tiny-0.6B")


@pytest.fixture
def data(tmp_path) -> Path:
    return save_rows(tmp_path / "train.jsonl", rows("sft"))


def train(model: Path, data: Path, out: Path | None, *argv: object) -> tuple[training.Outcome, str]:
    arguments = ["--model_name_or_path", model, "--dataset_name", data, "--max_steps", 2]
    arguments += [] if out is None else ["--output_dir", out]
    text = io.StringIO()
    settings = parse_settings(
        METHODS["sft"],
        [str(a) for a in (*arguments, "--save_steps", 1, "--lora_target_modules", "q_proj", *argv)],
    )
    return training.run(settings, Console(file=text, width=200)), text.getvalue()


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def test_the_default_output_directory_keeps_the_size_in_the_name(model, data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    outcome, _ = train(model, data, None)
    assert outcome.adapter == Path("runs/sft-Tiny-0.6B")
    card = (outcome.adapter / "README.md").read_text()
    assert card.startswith("---\nbase_model: ")
    assert "2 steps" in card
    assert "| residual stream |" in card


def test_of_several_gpus_without_a_launcher_the_first_is_taken(model, data, tmp_path, monkeypatch):
    # Where torch has no GPU the arguments still count as many as it names, and TRL's trainers refuse more than one.
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    outcome, text = train(model, data, tmp_path / "out", *QUICK)
    assert (
        "note: training on the first of 2 GPUs; torchrun --standalone --nproc_per_node 2 -m isotype sft … trains on all of them"
        in text
    )
    assert outcome.record.status == "finished"
    assert len(outcome.record.steps) == 1


def test_adapter_and_model_do_not_mix_in_a_reused_directory(model, data, tmp_path):
    out = tmp_path / "out"
    _, text = train(model, data, out, *QUICK, "--use_peft", "False")
    assert "model.safetensors" in names(out)
    assert "finished run" not in text
    assert "fused: " not in text  # nothing is adapted
    _, text = train(model, data, out, *QUICK)
    assert "fused: " in text
    assert "together: " not in text  # that takes -v
    assert f"note: {out} has a finished run (model.safetensors, run_report.json)" in text
    assert "adapter_model.safetensors" in names(out)
    assert not names(out) & {"model.safetensors", "config.json"}
    train(model, data, out, *QUICK, "--use_peft", "False")
    assert {"model.safetensors", "config.json"} <= names(out)
    assert not names(out) & {"adapter_model.safetensors", "adapter_config.json"}


@pytest.mark.parametrize(
    "more",
    [
        ("--use_peft", "False"),
        ("--use_peft", "False", "--optim", "adafactor"),
        ("--quantization", "nf4"),
        ("--use_dora", "True", "--packing", "True"),
    ],
)
def test_masters_in_bfloat16_stay_in_bfloat16_also_after_a_resume(model, data, tmp_path, more):
    wanted = ("--dtype", "bfloat16", "--master_dtype", "bfloat16", *more)
    _, text = train(model, data, tmp_path, *wanted)
    assert "bfloat16 masters lose every update smaller than half a unit" in text
    shutil.rmtree(tmp_path / "checkpoint-2")
    outcome, _ = train(model, data, tmp_path, *wanted, "--resume_from_checkpoint", "true")
    assert outcome.record.status == "finished"
    saved = load_file(next(tmp_path.glob("*.safetensors")))
    assert {tensor.dtype for tensor in saved.values()} == {torch.bfloat16}
    with pytest.raises(CheckpointError, match="--master_dtype"):
        train(model, data, tmp_path, *wanted[:2], *more, "--resume_from_checkpoint", "true")


def test_lora_layers_are_fused_unless_it_is_not_wanted(model, data, tmp_path):
    losses = {}
    for name, flags in {"fused": ("-v",), "plain": ("--no_fuse",)}.items():
        outcome, text = train(
            model,
            data,
            tmp_path / name,
            "--save_strategy",
            "no",
            "--lora_target_modules",
            "all-linear",
            *flags,
        )
        losses[name] = [step.loss for step in outcome.record.steps]
        assert ("fused: " in text) == (name == "fused")
        assert ("together: q_proj k_proj v_proj" in text) == (name == "fused")
        reported = dict(outcome.record.settings)
        assert ("fused" in reported) == ("attention" in reported) == (name == "fused")
        assert reported.get("fused", "").startswith("7 of 7 LoRA layers" if name == "fused" else "")
    assert losses["fused"] == pytest.approx(losses["plain"], rel=1e-2)


def test_a_foreign_model_in_the_output_directory_is_left_alone(model, data, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "model.safetensors").write_bytes(b"mine")
    train(model, data, out, *QUICK)
    assert (out / "model.safetensors").read_bytes() == b"mine"


def test_a_checkpoint_of_another_run_is_refused_with_all_differences(model, data, tmp_path):
    out = tmp_path / "out"
    train(model, data, out, "--lora_target_modules", "q_proj")
    more = ("--resume_from_checkpoint", "true", "--max_steps", 3)
    with pytest.raises(CheckpointError) as caught:
        # On a CPU with fast bfloat16, auto would compute in it with nf4 storage.
        train(
            model, data, out, *more, "--quantization", "nf4", "--dtype", "float32", "--lora_r", 4,
            "--lora_target_modules", "v_proj",
        )  # fmt: skip
    assert caught.value.headline == f"{out / 'checkpoint-2'} belongs to a run with other settings"
    assert [(p.given, p.expected) for p in caught.value.problems] == [
        ("storage nf4", "float32, as in checkpoint-2"),
        ("--lora_r 4", "16, as in checkpoint-2"),
        ("--lora_target_modules v_proj", "q_proj, as in checkpoint-2"),
    ]
    assert [p.fix for p in caught.value.problems] == [
        "omit --quantization, or set --dtype float32", "--lora_r 16", "--lora_target_modules q_proj"
    ]  # fmt: skip
    with pytest.raises(CheckpointError) as caught:
        train(model, data, out, *more, "--use_peft", "False")
    assert [p.given for p in caught.value.problems] == ["--use_peft False"]
    outcome, text = train(model, data, out, *more, "--lora_target_modules", "q_proj")
    assert [step.step for step in outcome.record.steps] == [1, 2, 3]
    assert "note: --max_steps 3 instead of 2: the linear schedule continues with the new length" in text


def test_a_run_goes_on_under_the_ranges_that_it_was_begun_with(data, tmp_path, monkeypatch):
    """A run of two steps equals a run of one that is resumed without its cached ranges; so do chat and merge."""
    path = save_chat_model(tmp_path / "model", layers=1)
    values = load_file(path / "model.safetensors")
    for name, value in values.items():
        value.mul_(20 if value.ndim > 1 else 1)
        value.mul_(2.0**14 if "up_proj" in name else 2.0**-10 if "down_proj" in name else 1)
    save_file(values, path / "model.safetensors", metadata={"format": "pt"})
    monkeypatch.setenv("ISOTYPE_CACHE", own_cache(tmp_path / "cache"))
    flags = ("--dtype", "float16", "--learning_rate", "1e-6", "--lr_scheduler_type", "constant")
    straight, _ = train(path, data, tmp_path / "straight", *flags)
    begun, _ = train(path, data, tmp_path / "parts", *flags, "--max_steps", 1)
    policy = PrecisionPolicy.read(begun.adapter)
    assert policy.wide_residual
    assert {each.module for each in policy.exceptions} >= {"model.layers.0.mlp.down_proj"}
    shutil.rmtree(tmp_path / "cache")
    more = (*flags, "--ranges", "known", "--resume_from_checkpoint", "true")
    resumed, text = train(path, data, tmp_path / "parts", *more)
    assert "value ranges were not measured" not in text
    losses = [[step.loss for step in run.record.steps] for run in (straight, begun, resumed)]
    assert losses[0] == losses[2]
    assert losses[0][:1] == losses[1]
    assert all(math.isfinite(loss) for loss in losses[0])
    again = PrecisionPolicy.read(resumed.adapter)
    assert (again.exceptions, again.loss_scale) == (policy.exceptions, policy.loss_scale)
    files = [load_file(run.adapter / "adapter_model.safetensors") for run in (straight, resumed)]
    assert all(torch.equal(value, files[1][name]) for name, value in files[0].items())
    model, tokenizer, used = load_for_inference(resumed.adapter)
    assert used.exceptions == policy.exceptions
    logits = model(**tokenizer("w1 w2 w3", return_tensors="pt")).logits
    assert torch.isfinite(logits).all()
    merged = merge_adapter(resumed.adapter, tmp_path / "merged", dtype="float32")
    assert merged.warnings == ()
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    expected = plain(**tokenizer("w1 w2 w3", return_tensors="pt")).logits
    # float16 rounds to 11 bits: 5e-4 an operation.
    torch.testing.assert_close(
        logits.float(), expected, rtol=0, atol=5e-3 * float(expected.detach().abs().max())
    )


def test_unknown_modules_are_named_with_the_nearest(model, data, tmp_path):
    with pytest.raises(UsageError) as caught:
        train(
            model,
            data,
            tmp_path / "out",
            "--lora_target_modules",
            "q_prj",
            "v_proj",
            "--lora_modules_to_save",
            "head",
        )
    assert [p.given for p in caught.value.problems] == [
        "--lora_target_modules q_prj",
        "--lora_modules_to_save head",
    ]
    assert caught.value.problems[0].fix.startswith("did you mean q_proj")
    with pytest.raises(UsageError, match="the adapter cannot be created with these arguments"):
        train(model, data, tmp_path / "out", "--lora_target_modules", ".*nosuch")


def test_model_init_kwargs_reach_the_model_and_unknown_ones_are_named(model, data, tmp_path):
    out = tmp_path / "out"
    outcome, _ = train(model, data, out, *QUICK, "--model_init_kwargs", '{"attn_implementation": "eager"}')
    assert outcome.record.status == "finished"
    with pytest.raises(UsageError, match="the model does not accept these arguments"):
        train(model, data, out, "--model_init_kwargs", '{"nosuch": 1}')


def test_what_the_trainer_refuses_is_a_usage_error(model, data, tmp_path):
    with pytest.raises(UsageError, match="SFTTrainer does not accept these arguments") as caught:
        train(
            model,
            data,
            tmp_path / "out",
            "--packing",
            "True",
            "--eval_packing",
            "False",
            "--max_length",
            "None",
        )
    assert isinstance(caught.value.__cause__, ValueError)


def test_dropped_examples_are_said_and_reported(model, tmp_path):
    mixed = [{"prompt": "w1 " * (60 if n % 2 else 1), "completion": "w2 w3"} for n in range(16)]
    outcome, text = train(
        model,
        save_rows(tmp_path / "d.jsonl", mixed),
        tmp_path / "out",
        *QUICK,
        "--max_length",
        16,
        "--lora_bias",
        "all",
    )
    said = "8 of 16 examples were dropped: the prompt alone fills max_length 16"
    assert f"note: {said}" in text
    assert said in outcome.record.notes
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config["bias"] == "all"


def test_weights_that_are_not_finite_are_refused_where_they_are_loaded(model, data, tmp_path, capsys):
    from safetensors.torch import load_file, save_file

    broken = tmp_path / "broken"
    shutil.copytree(model, broken)
    weights = load_file(broken / "model.safetensors")
    weights["model.norm.weight"][:3] = float("nan")
    weights["model.layers.0.self_attn.q_proj.weight"][0, 0] = float("inf")
    save_file(weights, broken / "model.safetensors", {"format": "pt"})
    argv = ["sft", "--model_name_or_path", broken, "--dataset_name", data, "--output_dir", tmp_path / "out"]
    assert main([str(a) for a in argv]) == 2
    assert capsys.readouterr().err == (
        "error: weights that are not finite\n"
        f"  - {broken}: 2 tensors with NaN or infinity: model.layers.0.self_attn.q_proj.weight "
        "(1 infinite of 4,096, float32), model.norm.weight (3 NaN of 64, float32)\n"
        "    expected  finite numbers\n"
        "    fix       copy, download or train the weights again, because nothing can repair them\n"
    )
    assert main(["chat", str(broken), "--ask", "w1"]) == 2
    assert "2 tensors with NaN or infinity" in capsys.readouterr().err


@few("method", ["sft", "dpo", "grpo"], "sft")
def test_a_loss_that_is_no_number_ends_the_run_before_its_update(
    model, tmp_path, capsys, monkeypatch, method
):
    import trl

    trainer = getattr(trl, f"{method.upper()}Trainer")
    sound = trainer.compute_loss

    def broken(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = sound(self, *args, **kwargs)
        scale = float("nan") if self.state.global_step == 1 else 1.0
        return (found[0] * scale, *found[1:]) if isinstance(found, tuple) else found * scale

    monkeypatch.setattr(trainer, "compute_loss", broken)
    data, out = save_rows(tmp_path / "rows.jsonl", rows(method)), tmp_path / "out"
    argv = [method, "--model_name_or_path", model, "--dataset_name", data, "--output_dir", out]
    argv += [
        "--max_steps",
        4,
        "--save_steps",
        1,
        "--learning_rate",
        "1e-3",
        "--per_device_train_batch_size",
        2,
    ]
    if method == "grpo":
        argv += ["--reward_funcs", "tests.train.tiny.reward_by_words", "--num_generations", 2]
        argv += ["--max_completion_length", 4]
    assert main([str(a) for a in argv]) == 1
    err = capsys.readouterr().err
    assert (
        "error: the loss is not finite: stopped before the update\n  - step 2: loss nan, learning rate" in err
    )
    assert "  - mul gives NaN, which the code writes\n" in err
    assert "aten.mul.Tensor   forward   train/test_training.py:" in err
    assert f"  = {out / 'checkpoint-1'} is a complete checkpoint" in err
    assert not (out / "checkpoint-2").exists()
    assert not (out / "adapter_model.safetensors").exists()
    report = json.loads((out / "run_report.json").read_text())
    assert (report["status"], len(report["steps"])) == ("failed", 2)


@pytest.mark.parametrize(("ends", "status"), [(RuntimeError, "failed"), (KeyboardInterrupt, "interrupted")])
def test_the_last_step_before_an_exception_is_in_the_report(
    model, data, tmp_path, monkeypatch, ends: type[BaseException], status: str
):
    """On a device whose optimizer skips updates, a step is read while the next one runs."""
    from isotype.train.monitor import meter as step
    from isotype.train.monitor.recorder import RunRecorder

    monkeypatch.setattr(step, "DEFERRED_ON", ("cpu",))

    begin = RunRecorder.on_step_begin

    def fail(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        begin(self, args, state, control, **kwargs)
        if state.global_step == 2:
            raise ends("lost")

    monkeypatch.setattr(RunRecorder, "on_step_begin", fail)
    out = tmp_path / "out"
    argv = ["sft", "--model_name_or_path", model, "--dataset_name", data, "--output_dir", out]
    argv += [
        "--max_steps",
        3,
        "--save_strategy",
        "no",
        "--logging_steps",
        50,
        "--per_device_train_batch_size",
        2,
    ]
    assert main([str(a) for a in argv]) != 0
    report = json.loads((out / "run_report.json").read_text())
    assert (report["status"], [step["step"] for step in report["steps"]]) == (status, [1, 2])


def test_trained_weights_that_are_not_finite_are_not_saved(model, data, tmp_path, capsys, monkeypatch):
    from isotype.train.monitor.recorder import RunRecorder

    def ruin(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1:  # counted after this
            next(p for p in kwargs["model"].parameters() if p.requires_grad).data.fill_(float("inf"))

    monkeypatch.setattr(RunRecorder, "on_optimizer_step", ruin)
    out = tmp_path / "out"
    argv = ["sft", "--model_name_or_path", model, "--dataset_name", data, "--output_dir", out]
    argv += ["--max_steps", 3, "--save_steps", 2, "--per_device_train_batch_size", 2]
    assert main([str(a) for a in argv]) == 1
    assert "not finite" in capsys.readouterr().err
    assert not list(out.glob("**/*.safetensors"))


def test_a_resumed_run_has_the_answers_before_training_of_its_report(tmp_path):
    argv = ["--model_name_or_path", "m", "--dataset_name", "d", "--ask", "Why?"]
    for method, answers in ((METHODS["sft"], ["So."]), (METHODS["reward"], [])):
        run: Any = SimpleNamespace(
            settings=parse_settings(method, argv),
            data={},
            resume=tmp_path,
            earlier=SimpleNamespace(
                samples=(Sample("Why?", "So.", None, None), Sample("How?", "Thus.", None, None))
            ),
        )
        questions = training._first_answers(run, None, None, Console())
        assert [sample.before for sample, _ in questions] == answers
        run.earlier = None
        assert all(sample.before is None for sample, _ in training._first_answers(run, None, None, Console()))


def test_the_sample_is_asked_in_the_format_of_its_row(model):
    settings = parse_settings(METHODS["sft"], ["--model_name_or_path", "m", "--dataset_name", "d"])
    turns = [{"role": "system", "content": "w0"}, {"role": "user", "content": "w1"}]
    reply = [{"role": "assistant", "content": "w2"}]
    for row, prompt in (
        ({"prompt": "w1", "completion": "w2"}, "w1"),
        ({"prompt": turns, "completion": reply}, turns),
        ({"messages": turns + reply}, turns),
    ):
        ((sample, asked),) = describe.sample_questions(settings, {"test": [row, row]})
        assert (sample.question, sample.reference, asked) == ("w1", "w2", prompt)
    assert describe.sample_questions(settings, {"test": [{"text": "w1"}]}) == []
    tokenizer = processing_class(model)
    words = tokenizer.convert_ids_to_tokens(encode(tokenizer, "w1 w2")["input_ids"][0])
    assert words == ["w1", "w2"]
    words = tokenizer.convert_ids_to_tokens(encode(tokenizer, turns)["input_ids"][0])
    assert words == ["<s>", "system", "w0", "</s>", "<s>", "user", "w1", "</s>", "<s>", "assistant"]


@pytest.mark.parametrize(
    ("optimizer", "dtype"),
    [
        ("adamw_torch_fused", "float32"),
        ("paged_adamw_32bit", "float32"),
        ("adamw_bnb_8bit", "8-bit (adamw_bnb_8bit)"),
        ("paged_adamw_8bit", "8-bit (paged_adamw_8bit)"),
        ("adafactor", "float32 (adafactor)"),
        ("sgd", "none (sgd)"),
    ],
)
def test_the_optimizer_row_says_what_the_optimizer_keeps(optimizer, dtype):
    shown = {row[0]: row[1] for row in describe.policy_rows(POLICY, optimizer)}
    assert shown["optimizer state"] == dtype
    assert len(shown) == len(POLICY.rows())


def test_notes_name_what_adapters_left_out():
    model = torch.nn.Linear(2, 2)
    assert describe.model_notes(model) == ()
    model.adapter_notes = ("use_dora: not on the experts",)
    assert describe.model_notes(model) == ("use_dora: not on the experts",)


def test_weight_bytes_count_the_constants_of_double_quantization():
    nested = SimpleNamespace(absmax=torch.zeros(4))
    state = SimpleNamespace(
        quant_type="nf4",
        absmax=torch.zeros(16, dtype=torch.uint8),
        nested=True,
        state2=nested,
        shape=torch.Size((64, 16)),
    )
    model = torch.nn.Linear(8, 64, bias=False)
    model.weight = torch.nn.Parameter(torch.zeros(512, 1, dtype=torch.uint8), requires_grad=False)
    model.weight.quant_state, model.weight.quant_type = state, "nf4"
    assert describe.weight_bytes(model) == (("nf4", 512 + 16 + 16),)


def test_a_rank_above_some_layers_is_a_note(model: Path) -> None:
    network = transformers.AutoModelForCausalLM.from_pretrained(model)
    check_module_names(network, peft.LoraConfig(r=40, target_modules=["q_proj", "k_proj", "v_proj"]))
    assert network.adapter_notes == (
        "2 of 3 adapted layers are narrower than rank 40 (the narrowest has 32); "
        "a rank above the width only costs memory; rank_pattern sets the rank of single layers",
    )
    check_module_names(network, peft.LoraConfig(r=32, target_modules=["q_proj", "k_proj"]))
    assert len(network.adapter_notes) == 1


def test_names_that_peft_adds_to_the_targets_are_not_checked() -> None:
    """For "all-linear", PEFT adds `gate.weight`, the router of most models that LongCat-Flash's conversion shares."""
    network = ARCHITECTURES["longcat_flash"].build(torch.float32)
    check_module_names(network, peft.LoraConfig(r=4, target_modules="all-linear"))
    unknown = peft.LoraConfig(r=4, target_modules="all-linear", target_parameters=["gate.weights"])
    with pytest.raises(UsageError, match=r"--lora_target_parameters gate\.weights"):
        check_module_names(network, unknown)


@pytest.mark.parametrize(
    ("name", "words", "corrected"),
    [
        ("gpt2", "--lora_target_modules q_proj k_proj v_proj o_proj", "--lora_target_modules all-linear"),
        ("gpt2", "--lora_target_modules q_proj", "--lora_target_modules all-linear"),
        ("gpt2", "--lora_modules_to_save embed_tokens", "--lora_modules_to_save wte"),
        (
            "phi3",
            "--lora_target_modules q_proj k_proj v_proj o_proj",
            "--lora_target_modules qkv_proj o_proj",
        ),
        ("llama", "--lora_target_modules q_prj v_proj", "--lora_target_modules q_proj v_proj"),
        (
            "llama",
            "--lora_target_modules mlp v_proj",
            "--lora_target_modules down_proj gate_proj up_proj v_proj",
        ),
    ],
)
def test_the_corrected_command_names_layers_of_this_model(
    name: str,
    words: str,
    corrected: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Names of another architecture are not typing errors: `c_proj` is similar to `q_proj`, but another layer."""
    monkeypatch.setenv("COLUMNS", "2000")
    model = save_tiny(name, tmp_path / "model")
    assert main(["check", "sft", "--model_name_or_path", str(model), "--device", "cpu", *words.split()]) == 2
    line = capsys.readouterr().err.splitlines()[-1].split("--device cpu ")[-1]
    assert line == corrected
    assert main(["check", "sft", "--model_name_or_path", str(model), "--device", "cpu", *line.split()]) == 0


@pytest.mark.parametrize("target", ["input_layernorm", "act_fn"])
def test_a_module_without_a_matrix_is_no_target(target: str) -> None:
    config = peft.LoraConfig(r=4, target_modules=[target, "q_proj"])
    with pytest.raises(UsageError) as error:
        check_module_names(tiny_model("llama"), config)
    (problem,) = error.value.problems
    assert (problem.given, problem.fix, problem.swap) == (
        f"--lora_target_modules {target}",
        "give one of these",
        None,
    )
    assert target not in problem.expected


def test_a_preference_run_on_an_adapter_leaves_the_trained_one_alone(model, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    common = ["--max_steps", "1", "--per_device_train_batch_size", "2", "--save_strategy", "no"]
    for method, start, out in (("sft", model, first), ("dpo", first, second)):
        data = save_rows(tmp_path / f"{method}.jsonl", rows(method, 4))
        argv = ["--model_name_or_path", start, "--dataset_name", data, "--output_dir", out, *common]
        assert main([method, *map(str, argv)]) == 0
    assert (second / "adapter_model.safetensors").is_file()
    assert [path.name for path in second.iterdir() if path.is_dir()] == []

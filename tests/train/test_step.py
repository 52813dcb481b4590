"""The traced step of a training command, with layers of which only some are checkpointed."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import transformers

from isotype.precision.devices.attention import RELEASE
from isotype.records.trace import Trace
from isotype.train import models
from isotype.train.preflight import step
from isotype.train.preflight.plan import StepPlan
from isotype.train.preflight.step_plan import parse_options, plan_of
from tests.models import CONFIGS
from tests.pairwise import few
from tests.train.traced import traced


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    llama = CONFIGS["llama"]()
    llama.num_hidden_layers = 1
    llama.save_pretrained(folder)
    return folder / "config.json"


def with_layers(config: Path, folder: Path, layers: int) -> Path:
    """Save a copy of the config with more layers."""
    copy = Path(shutil.copy(config, folder))
    copy.write_text(
        json.dumps(json.loads(copy.read_text(encoding="utf-8")) | {"num_hidden_layers": layers}),
        encoding="utf-8",
    )
    return copy


def planned(config: Path, checkpointing: dict[str, Any] | None, *more: str) -> StepPlan:
    argv = f"""sft --model_name_or_path {config} --device t4 --dtype float16 --lora_r 4 --per_device_train_batch_size 4
        --lora_target_modules q_proj v_proj --max_length 32 --gradient_checkpointing {checkpointing is not None}""".split()
    if checkpointing:
        argv += ["--gradient_checkpointing_kwargs", json.dumps(checkpointing)]
    return plan_of(*parse_options([*argv, *more]))


@cache
def plain(config: Path) -> Trace:
    """Trace the step that several tests compare with."""
    return traced(planned(config, None))


def test_what_is_evaluated_is_a_phase_of_its_own(config: Path) -> None:
    """An evaluation with more rows than the training may be the peak: weights and optimizer states exist, gradients do not."""
    as_many = ("--eval_strategy", "steps", "--eval_steps", "2")
    asked = {
        "none": plain(config),
        "as many": traced(planned(config, None, *as_many)),
        "more": traced(
            planned(config, None, "--eval_strategy", "epoch", "--per_device_eval_batch_size", "64")
        ),
    }
    assert "evaluate" not in asked["none"].memory.phases
    split = planned(config, None, "--eval_split", "0.1")
    assert split.evaluation == planned(config, None, *as_many).evaluation is not None
    train, held = (asked["as many"].memory.phases[phase] for phase in ("forward", "evaluate"))
    assert held["optimizer"] == train["optimizer"] > 0
    assert held.get("gradients", 0) == 0
    assert sum(held.values()) < sum(train.values())
    assert asked["as many"].memory.peak == asked["none"].memory.peak
    assert asked["more"].memory.peak_phase == "evaluate"
    more = asked["more"].memory.phases["evaluate"]["activations"]
    # 64 rows instead of 4; the memory of converted weights does not grow with the rows.
    assert 8 < more / held["activations"] < 16.5
    # Its operators are those of the forward: they count in no figure of a step.
    assert len({len(trace.calls) for trace in asked.values()}) == 1


def test_the_rows_of_an_optimizer_step_are_generated_at_once(config: Path) -> None:
    """`generate` has the prompts of all micro-batches, and a cache of the keys and values of all layers."""
    argv = f"""grpo --model_name_or_path {config} --device t4 --dtype float16 --lora_r 4 --max_completion_length 16
        --gradient_checkpointing False""".split()

    one, four = (
        traced(plan_of(*parse_options([*argv, *more]))).memory.phases
        for more in ((), ("--gradient_accumulation_steps", "4"))
    )
    assert one["rollout"].get("gradients", 0) == four["rollout"].get("gradients", 0) == 0
    assert 3.9 < four["rollout"]["activations"] / one["rollout"]["activations"] < 4.1


def test_a_reference_model_lies_beside_one_that_is_trained_whole(config: Path) -> None:
    argv = ["dpo", "--model_name_or_path", str(config), "--device", "t4", "--dtype", "float16"]
    argv += ["--max_length", "32", "--gradient_checkpointing", "False", "--use_peft", "False"]
    trace = traced(plan_of(*parse_options(argv)))
    assert len({kinds["weights"] for kinds in trace.memory.phases.values()}) == 1
    bare = sum(weight.bytes * weight.repeats for weight in trace.weights)
    assert round(trace.memory.phases["load"]["weights"] / bare, 2) == 2


def test_a_training_of_all_weights_is_fused_as_it_is_trained(config: Path) -> None:
    """Fused norms keep their input and a number per row for the backward; single operators also keep float32 copies."""

    def kept(fuse: str) -> int:
        argv = ["sft", "--model_name_or_path", str(config), "--device", "cpu", "--dtype", "float32"]
        argv += ["--use_peft", "False", "--max_length", "32", "--gradient_checkpointing", "False"]
        trace = traced(plan_of(*parse_options([*argv, "--fuse", fuse])))
        return int(trace.memory.phases["forward"]["activations"])

    assert kept("True") < kept("False")


def test_micro_batches_but_the_first_begin_with_the_gradients_and_all_are_fetched(config: Path) -> None:
    one = plain(config).memory
    two = traced(planned(config, None, "--gradient_accumulation_steps", "2")).memory
    inputs = one.phases["forward"]["inputs"]
    assert two.phases["forward"]["inputs"] == 2 * inputs > 0
    gradients = one.phases["unscale"]["gradients"]
    assert one.phases["forward"].get("gradients", 0) == 0
    assert two.phases["forward"]["gradients"] == gradients > 0
    assert sum(two.phases["forward"].values()) == sum(one.phases["forward"].values()) + gradients + inputs
    assert two.phases["optimizer"]["gradients"] == one.phases["optimizer"]["gradients"]


def test_the_more_layers_are_checkpointed_the_less_memory(config: Path, tmp_path: Path) -> None:
    """Offloaded activations are counted on the device that computes them."""
    config = with_layers(config, tmp_path, 2)
    every: list[dict[str, Any] | None] = [{"offload": True}, {}, {"every_n_layers": 2}, None]
    offloaded, *peaks = (traced(planned(config, arguments)).memory.peak for arguments in every)
    assert peaks == sorted(set(peaks))
    assert offloaded == peaks[0]


@few("every", [1, 2, 3, 5], 2)
def test_layers_are_folded_as_they_are_checkpointed(
    config: Path, every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"every_n_layers": every}
    config = with_layers(config, tmp_path, 8 if every == 2 else 12)
    plan = planned(config, given, "--lora_target_modules", "q_proj")
    folded = traced(plan)
    monkeypatch.setattr(step, "fold", lambda model: model)
    monkeypatch.setattr(models, "fold_layers", lambda model: model)
    whole = traced(plan)
    assert len(folded.calls) < len(whole.calls)
    assert folded.flops == whole.flops
    assert folded.memory.peak == pytest.approx(whole.memory.peak, rel=0.05)


@pytest.mark.parametrize(("name", "fails"), [("llama", False), ("gpt2", True)])
def test_requested_rows_are_as_long_as_in_the_training_whatever_the_positions(
    name: str, fails: bool, tmp_path: Path
) -> None:
    """Rotary positions go on after the last one of the config; a table of positions ends."""
    config = CONFIGS[name]()
    config.num_hidden_layers = 1
    config.save_pretrained(tmp_path)
    wider = ("--lora_target_modules", "all-linear", "--max_length", "600")
    long_rows = planned(tmp_path / "config.json", None, *wider)
    report = step.check_plan(long_rows, ("forward",))
    positions = transformers.AutoConfig.from_pretrained(tmp_path).max_position_embeddings
    assert report.trace.setup.batch["input_ids"] == (4, 600)
    assert f"rows longer than the model's {positions} positions" in str(report).replace("\n  ", "")
    assert ("IST111" in str(report)) is fails
    bare = plan_of(*parse_options([str(tmp_path / "config.json"), "--device", "t4"]))
    assert step.row_length(bare, transformers.AutoConfig.from_pretrained(tmp_path)) == positions


def test_transformers_takes_what_is_known_here() -> None:
    model = transformers.LlamaForCausalLM(CONFIGS["llama"]())
    step.checkpoint_gradients(model, {"every_n_layers": 2}, adapters=False)
    assert [layer.gradient_checkpointing for layer in model.model.layers[:2]] == [True, False]


@pytest.mark.lacking("the memory-efficient kernel takes grouped heads" if RELEASE >= (2, 14) else "")
def test_attention_on_a_card_without_flash_is_that_of_the_training(config: Path) -> None:
    """Fused attention repeats keys and values; unfused attention writes all scores, and a note says so."""
    plans = (planned(config, None, "--fuse", fuse, "--max_length", "256") for fuse in ("True", "False"))
    fused, unfused = (
        [note for note in step.check_plan(plan, ("forward",)).trace.notes if "scores" in note]
        for plan in plans
    )
    assert not fused
    assert "on NVIDIA T4 no fused kernel takes grouped heads in float16" in unfused[0]


@pytest.mark.parametrize(
    "more",
    [
        pytest.param((), marks=pytest.mark.exhaustive),
        ("--gradient_checkpointing", "True", "--length", "28"),
    ],
    ids=["plain", "recomputed"],
)
def test_a_trace_computes_one_of_the_equal_groups_of_quantized_experts(
    more: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory, FLOPs and the number of calls are those of a trace that computes every group."""
    from isotype.model.experts import compute

    sizes = {"hidden_size": 64, "moe_intermediate_size": 64, "num_experts": 14, "num_experts_per_tok": 3}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    config = transformers.Qwen3MoeConfig(
        **sizes, **heads, vocab_size=64, architectures=["Qwen3MoeForCausalLM"]
    )
    config.save_pretrained(tmp_path)
    argv = [str(tmp_path), "--device", "h100", "--quantization", "nf4", "--lora_r", "8", "--length", "56"]
    assert step.BALANCED in step._notes(
        plan_of(*parse_options(argv)), transformers.Qwen3MoeForCausalLM(config)
    )
    # 4 experts at a time: three groups and one of 2.
    monkeypatch.setattr(compute, "_DENSE_BYTES", 4 * 2 * 64 * 128)

    def figures() -> tuple[int, int, int, int]:
        trace = traced(plan_of(*parse_options([*argv, *more])))
        calls = [call for call in trace.calls if "new_empty" not in call.op]
        return len(calls), trace.memory.peak, sum(trace.flops.values()), sum(call.repeats for call in calls)

    few, *one = figures()
    monkeypatch.setattr(compute, "_representatives", iter)
    many, *every = figures()
    assert few < 0.9 * many
    assert one == pytest.approx(every, rel=1e-3, abs=0)

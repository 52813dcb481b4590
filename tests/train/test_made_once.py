"""The trainer's arguments are decided first and built then: isotype sets none of their attributes afterwards."""

from __future__ import annotations

import ast
import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tools.sources import Sources, dotted_name, read_sources
from transformers.trainer_pt_utils import AcceleratorConfig

from isotype.core.errors import UsageError
from isotype.data.methods import METHODS
from isotype.train import training
from isotype.train.command import settings as made_in
from tests.parsed import parse_settings
from tests.train.tiny import rows, save_chat_model, save_rows


@pytest.fixture
def changes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return `Class.attribute, by module` for every attribute that isotype sets on a dataclass that `settings` has built."""
    made: list[Any] = []
    found: list[str] = []
    make = made_in._built

    def kept(*arguments: Any) -> dict[str, Any]:
        parts = make(*arguments)
        made.extend([*parts.values(), parts["training"].accelerator_config])
        return parts

    def watched(kind: type) -> None:
        def set_attribute(self: Any, name: str, value: Any) -> None:
            module = sys._getframe(1).f_globals["__name__"]
            if module.startswith("isotype.") and any(self is each for each in made):
                found.append(f"{kind.__name__}.{name}, by {module}")
            object.__setattr__(self, name, value)

        monkeypatch.setattr(kind, "__setattr__", set_attribute, raising=False)

    for kind in (*METHODS["sft"].dataclass_types(), AcceleratorConfig):
        watched(kind)
    monkeypatch.setattr(made_in, "_built", kept)
    return found


def test_a_training_sets_no_attribute_of_its_arguments(
    changes: list[str], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    model, data = save_chat_model(tmp_path / "model"), save_rows(tmp_path / "train.jsonl", rows("sft"))
    argv = f"""--model_name_or_path {model} --dataset_name {data} --output_dir {tmp_path / "out"} --max_steps 2 --lora_r 4 --lora_target_modules q_proj
        --per_device_train_batch_size 2 --eval_split 4 --early_stopping_patience 2 --dtype bfloat16 --device cpu
        --model_init_kwargs {{"attn_implementation":"sdpa"}} --report_to none --save_steps 0.5""".split()
    outcome = training.run(parse_settings(METHODS["sft"], argv), Console(file=io.StringIO()))
    assert outcome.adapter is not None
    request.getfixturevalue("unchecked")
    further = [*argv, "--model_name_or_path", str(outcome.adapter), "--output_dir", str(tmp_path / "further")]
    assert training.run(parse_settings(METHODS["sft"], further), Console(file=io.StringIO())).record.steps
    assert changes == []


def test_other_values_make_another_record_and_leave_the_command(tmp_path: Path) -> None:
    settings = parse_settings(
        METHODS["sft"], ["--model_name_or_path", "m", "--fsdp_config", '{"fsdp_version": 2}']
    )
    config = dict(settings.command["fsdp_config"])
    other = settings.but(bf16=True, mixed_precision="bf16", fsdp="full_shard", no_such_argument=1)
    assert (settings.training.bf16, other.training.bf16, other.training.mixed_precision) == (
        False,
        True,
        "bf16",
    )
    assert other.but(seed=3).training.bf16
    assert settings.command["fsdp_config"] == config  # transformers changes the object that it gets
    assert settings.but(model_name_or_path="runs/Qwen3-0.6B").training.output_dir == "runs/sft-Qwen3-0.6B"


def test_held_back_rows_are_an_evaluation_to_take_the_best_model_by() -> None:
    flags = "--model_name_or_path m --eval_split 0.1 --load_best_model_at_end True --save_steps 0.4"
    training = parse_settings(METHODS["sft"], flags.split()).training
    assert (training.eval_strategy, training.eval_steps, training.metric_for_best_model) == (
        "steps",
        0.2,
        "loss",
    )


def test_what_transformers_refuses_of_a_decision_is_an_error() -> None:
    settings = parse_settings(
        METHODS["sft"], ["--model_name_or_path", "m", "--load_best_model_at_end", "--eval_strategy", "steps"]
    )
    with pytest.raises(UsageError, match="save and eval strategy"):
        settings.but(eval_strategy="no")


SECTIONS = {f"settings.{section}" for section in ("script", "training", "model", "dataset")}


def sets(sources: Sources) -> Iterator[str]:
    """Return `module: name.attribute` for every statement that sets an attribute of a dataclass of `settings`."""
    for module in sources.modules.values():
        if module.name == "isotype.train.command.settings" or "settings" not in module.text:
            continue  # makes them, or names none
        for function in (node for node in ast.walk(module.tree) if isinstance(node, ast.FunctionDef)):
            sections = set(_sections(function))
            for node in ast.walk(function):
                targets: list[ast.expr] = []
                if isinstance(node, ast.Assign):
                    targets = [
                        part
                        for each in node.targets
                        for part in ([*each.elts] if isinstance(each, ast.Tuple) else [each])
                    ]
                elif isinstance(node, ast.AugAssign | ast.AnnAssign):
                    targets = [node.target]
                elif isinstance(node, ast.Call) and dotted_name(node.func) == "setattr":
                    targets = [ast.Attribute(node.args[0], "*")]
                for target in targets:
                    name = (isinstance(target, ast.Attribute) and dotted_name(target.value)) or ""
                    if name in sections or ".".join(name.split(".")[-2:]) in SECTIONS:
                        yield f"{module.name}: {name}.{target.attr}"


def _sections(function: ast.FunctionDef) -> Iterator[str]:
    """Return the names that refer to a dataclass of `settings` in a function."""
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            pairs = [(node.targets[0], node.value)]
            if isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = [*zip(node.targets[0].elts, node.value.elts, strict=True)]
            for target, value in pairs:
                if (dotted_name(value) or "").split(".")[-2:-1] == ["settings"] and isinstance(
                    target, ast.Name
                ):
                    yield target.id


def test_no_statement_sets_an_attribute_of_a_section(tmp_path: Path) -> None:
    (tmp_path / "isotype").mkdir()
    (tmp_path / "isotype" / "breach.py").write_text(
        "def f(run):\n    training, extra = run.settings.training, 1\n    training.seed, extra.x = 1, 2\n"
        "    run.settings.model.y = 3\n    setattr(training, 'z', 4)\n"
    )
    breaches = ["training.seed", "run.settings.model.y", "training.*"]
    assert sorted(sets(read_sources(tmp_path))) == sorted(f"isotype.breach: {each}" for each in breaches)
    assert list(sets(read_sources())) == []

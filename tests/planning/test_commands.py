"""Commands that a plan or a check prints are accepted, and train with the requested settings."""

from __future__ import annotations

import random
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from isotype.core.errors import PrecisionError, UsageError
from isotype.planning.from_request import plan_of_request
from isotype.planning.nearest import with_nearest
from isotype.planning.request import parse_request
from isotype.planning.search import Search
from isotype.preflight.repair import plan as repairs_of
from isotype.records.finding import Finding
from isotype.train.command.command import Command
from isotype.train.command.parse import parse_command
from isotype.train.command.settings import settings_of
from isotype.train.preflight.plan import repaired_command
from isotype.train.preflight.step import check_plan
from isotype.train.preflight.step_plan import parse_options, plan_of

FREE = {
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "gradient_checkpointing",
    "gradient_checkpointing_kwargs",
}
"""Arguments that a plan chooses, with a fixed number of rows per step."""
NAMED = {"quantization", "base_memory", "dataset_name", "model_name_or_path", "fsdp", "device"}
"""Arguments that a line or note of the plan names."""

POOL: tuple[tuple[str, Any], ...] = (
    ("bf16", True), ("fp16", True), ("dtype", "bfloat16"), ("dtype", "auto"), ("quantization", "nf4"), ("quantization", "int8"),
    ("load_in_4bit", True), ("lora_r", 8), ("lora_alpha", 64), ("lora_dropout", 0), ("use_dora", True), ("use_rslora", True),
    ("lora_target_modules", ["q_proj", "v_proj"]), ("gradient_checkpointing", True), ("gradient_checkpointing", False),
    ("gradient_checkpointing", "auto"), ("per_device_train_batch_size", 6), ("per_device_train_batch_size", 1),
    ("gradient_accumulation_steps", 4), ("gradient_accumulation_steps", 7), ("max_length", 96), ("learning_rate", 3e-4),
    ("num_train_epochs", 2), ("optim", "adamw_8bit"), ("optim", "sgd"), ("output_dir", "a folder/out"), ("seed", 5),
    ("lr_scheduler_type", "cosine"), ("warmup_steps", 0.1), ("weight_decay", 0.01), ("use_peft", False), ("save_strategy", "no"),
    ("gradient_checkpointing_kwargs", {"use_reentrant": False}), ("neftune_noise_alpha", 5), ("max_grad_norm", 0.5),
    ("ask", "what's -x?"),
)  # fmt: skip


def drawn(seed: int, config: Path, folder: Path) -> tuple[str, list[str]]:
    """Draw (method, arguments of a training command), with flags in all spellings and in a file."""
    draw = random.Random(seed)
    method = draw.choice(("sft", "sft", "sft", "dpo", "reward"))
    values = dict(draw.sample(POOL, draw.randint(0, 6)))
    if method == "sft" and draw.random() < 0.3:
        values["packing"] = True
    argv, content = ["--model_name_or_path", str(config)], {}
    for name, value in values.items():
        flag = draw.choice((f"--{name}", f"--{name.replace('_', '-')}"))
        if draw.random() < 0.3:
            content[name] = value
        elif value is True and draw.random() < 0.6:
            argv.append(flag)
        elif isinstance(value, list):
            argv += [flag, *value]
        elif isinstance(value, dict):
            argv += [
                flag,
                yaml.safe_dump(value, default_flow_style=True)
                .strip()
                .replace("use_reentrant", '"use_reentrant"'),
            ]
        else:
            argv += draw.choice(([flag, str(value)], [f"{flag}={value}"]))
    if content:
        path = folder / "with space.yaml"
        path.write_text(yaml.safe_dump(content), encoding="utf-8")
        argv = ["--config", str(path), *argv]
    return method, argv


def accepted(tokens: tuple[str, ...]) -> Command:
    """Return the command parsed from a printed command, with the training's checks."""
    words = shlex.split(shlex.join(tokens))
    words = words[words.index("isotype") + 1 :]
    command = parse_command(words[0], words[1:])[0]
    settings_of(command)
    return command


def only_what_is_said(asked: Command, printed: Command, said: set[str], count: int = 1) -> None:
    changed = set(asked.difference(printed)) - FREE - said
    assert not changed, {name: asked.difference(printed)[name] for name in changed}
    assert asked.method == printed.method
    assert printed.rows == asked.rows, "other rows in a step"
    assert count >= 1


MANY = pytest.mark.exhaustive


@pytest.mark.parametrize("seed", [1, 2, *(pytest.param(seed, marks=MANY) for seed in (0, *range(3, 400)))])
def test_a_plans_command_trains_what_was_asked_for(
    seed: int, config: Path, formula: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("isotype.planning.from_request.with_rates", lambda profile: (profile, ""))
    draw, (method, argv) = random.Random(seed), drawn(seed, config, tmp_path)
    count = draw.choice((1, 1, 1, 2))
    flags = ["--device", draw.choice(("t4", "rtx4090", "h100")), "--devices", str(count)]
    flags += ["--max-memory", f"{draw.choice((3, 5, 6, 9, 40))}MiB"]
    asked = parse_command(method, argv)[0]
    try:
        plan = plan_of_request(parse_request([method, *argv, *flags])[0])
    except (UsageError, PrecisionError):
        return  # the training or the device is refused, too
    for row in plan.rows:
        printed = accepted(row.command.tokens())
        limit = {"max_length"} if row.length < 128 or "max_length" not in asked else set()
        only_what_is_said(asked, printed, NAMED | limit)
        assert row.command.processes == count


@pytest.mark.parametrize(
    "seed", [100, 102, *(pytest.param(seed, marks=MANY) for seed in (101, *range(103, 300)))]
)
def test_a_checks_commands_train_what_was_asked_for(
    seed: int, config: Path, formula: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Commands of `--fix`, and of settings that fit instead of settings that do not."""
    method, argv = drawn(seed, config, tmp_path)
    device = random.Random(seed).choice(("t4", "v100", "rtx4090"))
    asked = parse_command(method, argv)[0]
    try:
        options, command = parse_options([method, *argv, "--device", device])
        step = plan_of(options, command)
        report = check_plan(step, ("forward", "backward", "unscale", "optimizer"))
    except (UsageError, PrecisionError):
        return
    repaired = repaired_command(command, *repairs_of(report, command=True), present=False).command
    assert repaired is not None
    fixed = accepted(repaired.tokens())
    only_what_is_said(
        asked, fixed, {"dtype", "bf16", "fp16", "optim", "learning_rate", "device", "quantization"}
    )
    memory = Finding("error", "the step does not fit", kind="memory", code="IST605")
    for fix in with_nearest((memory,), step, command)[0].fixes:
        said = {name for name in NAMED | {"max_length", "dtype"} if name in fix.description} | {
            "dataset_name",
            "model_name_or_path",
            "device",
        }
        only_what_is_said(asked, accepted(fix.command), said)
        assert fix.safety == "unsafe" or not ({"quantization", "max_length", "dtype"} & said)


@pytest.mark.parametrize(
    ("method", "loss", "least"),
    [("kto", (), 2), ("kto", ("--loss_type", "apo_zero_unpaired"), 1), ("dpo", (), 1)],
)
def test_a_micro_batch_has_as_many_rows_as_the_loss_needs(
    method: str, loss: tuple[str, ...], least: int
) -> None:
    command = parse_command(method, ["--model_name_or_path", "m", *loss])[0]
    request = SimpleNamespace(rows=None, at_most=None, command=command)
    search: Any = SimpleNamespace(request=request, step_rows=8, length=8, _even_rows=int)
    steps: Any = SimpleNamespace(peak=lambda rows, length: 100 * rows, arguments=None)
    assert Search._micro_batch(search, steps, 150) == least

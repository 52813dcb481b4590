"""`auto` in a training command, and settings that fit instead of settings that do not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from rich.console import Console

from isotype.cli import training
from isotype.cli.main import main
from isotype.core.errors import UsageError
from isotype.planning.from_request import resolve_auto, words_of
from isotype.planning.nearest import advice, ran_out, with_nearest
from isotype.planning.record import Row
from isotype.records.finding import Finding
from isotype.train.command.command import Command
from isotype.train.command.parse import parse_command
from isotype.train.preflight.step_plan import parse_options, plan_of
from isotype.train.run import Room

FINDING = Finding("error", "the step does not fit", kind="memory", code="IST605")


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch, formula: object) -> None:
    """A step may take 6 MiB on every device; no rates are measured."""
    monkeypatch.setattr("isotype.planning.from_request.with_rates", lambda profile: (profile, ""))
    monkeypatch.setattr("isotype.planning.from_request.room_of", lambda profile: Room(6 * 2**20, "6 MiB"))


def arguments(config: Path, text: str) -> list[str]:
    return ["--model_name_or_path", str(config), "--device", "cpu", "--dtype", "float32", *text.split()]


def command(argv: list[str]) -> Command:
    return parse_command("sft", argv)[0]


def filled(argv: list[str]) -> tuple[tuple[str, ...], Row]:
    """Return the command line with the plan's values, and the chosen row."""
    resolved, row = resolve_auto(command(argv))
    return resolved.tokens(), row


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("--per_device_train_batch_size auto", True),
        ("--per-device-train-batch-size=auto", True),
        ("--max_length auto", True),
        ("--quantization auto", True),
        ("--gradient_checkpointing auto --dtype auto", False),
        ("--per_device_train_batch_size 8", False),
    ],
)
def test_what_asks_for_a_plan(text: str, answer: bool) -> None:
    assert bool(command(text.split()).planned) is answer


def test_rows_and_their_number_of_micro_batches(config: Path, room: None) -> None:
    """With 4 MiB of weights and 4 KiB per token, two rows of 256 tokens fit, or all eight with recomputation."""
    argv = arguments(
        config, "--max_length 256 --per_device_train_batch_size auto --gradient_checkpointing False"
    )
    tokens, row = filled(argv)
    assert (row.rows, row.accumulation, row.storage) == (2, 4, "float32")
    assert tokens[tokens.index("--per_device_train_batch_size") + 1] == "2"
    assert tokens[tokens.index("--gradient_accumulation_steps") + 1] == "4"
    assert "--quantization" not in tokens
    assert words_of(row).startswith(
        "planned: float32, 2 rows of 256 tokens × 4, checkpointing off: 6.00 MiB of the 6.00 MiB"
    )


def test_a_step_of_so_many_tokens(config: Path, room: None) -> None:
    argv = arguments(config, "--max_length 128 --per_device_train_batch_size auto --tokens_per_step 2048")
    tokens, row = filled(argv)
    assert row.tokens == 2048
    assert "--tokens_per_step" not in tokens


def test_the_length_and_the_storage(config: Path, room: None) -> None:
    tokens, row = filled(arguments(config, "--max_length auto --quantization auto"))
    assert row.length == 512  # the model's positions, because there is no data
    assert tokens[tokens.index("--max_length") + 1] == "512"
    assert ("--quantization" in tokens) is row.policy.quantized
    assert "auto" not in tokens


def test_rows_that_were_typed_are_pinned(config: Path, room: None) -> None:
    tokens, row = filled(arguments(config, "--max_length auto --per_device_train_batch_size 4"))
    assert row.rows == 4
    assert "--gradient_accumulation_steps" not in tokens


def test_nothing_fits(config: Path, room: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("isotype.planning.from_request.room_of", lambda profile: Room(2**19, "512 KiB"))
    with pytest.raises(UsageError, match="nothing fits"):
        filled(arguments(config, "--per_device_train_batch_size auto"))


def test_processes_that_are_launched_together_do_not_plan(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="--devices 2 prints the command"):
        filled(arguments(config, "--per_device_train_batch_size auto"))


def test_a_training_takes_the_plans_values_and_says_so(
    config: Path, room: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    requests: list[object] = []

    def run(settings: object, console: Console) -> None:
        requests.append(settings)
        raise UsageError("that is enough", [])

    monkeypatch.setattr("isotype.train.training.run", run)
    text = "--max_length 256 --per_device_train_batch_size auto --quantization auto --dataset_name embedded:precision_qa"
    assert main(["sft", *arguments(config, text)]) == 2
    settings: object = requests[0]
    assert settings.training.per_device_train_batch_size * settings.training.gradient_accumulation_steps == 8  # type: ignore[attr-defined]
    assert "planned: " in capsys.readouterr().out


# What does not fit


@pytest.mark.parametrize(
    ("error", "answer"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to …"), True),
        (MemoryError(), True),
        (RuntimeError("expected scalar type Half"), False),
        (KeyError("out of memory"), False),
    ],
)
def test_the_end_of_the_memory(error: Exception, answer: bool) -> None:
    assert ran_out(error) is answer


def test_a_training_that_ran_out_of_memory_says_what_fits(
    config: Path, room: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(settings: object, console: Console) -> None:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr("isotype.train.training.run", run)
    argv = arguments(config, "--max_length 256 --per_device_train_batch_size 64")
    with pytest.raises(torch.OutOfMemoryError):
        training.train("sft", argv, Console())
    line = " ".join(capsys.readouterr().err.split())
    assert "out of memory; this command fits (" in line
    assert "--per_device_train_batch_size 8 " in line
    assert "--gradient_accumulation_steps 8 " in line


def test_where_nothing_smaller_fits(
    config: Path, room: None, formula: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("isotype.planning.from_request.room_of", lambda profile: Room(2**19, "the limit"))
    assert advice(command(arguments(config, "--max_length 256"))) == (
        "out of memory, and no settings with less memory fit into 512 KiB (the limit): not traced, because weights and adapters "
        "alone exceed the limit: 4.00 MiB in float32, 1.00 MiB in int8, 1.00 MiB in nf4; isotype plan shows what fits on another "
        "device"
    )
    assert formula == []


def test_a_check_names_the_settings_that_do_not_fit_either(
    config: Path, room: None, formula: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row of 64 tokens takes 64 KiB of activations beside 1 MiB of weights in 4 or 8 bits."""
    monkeypatch.setattr("isotype.planning.from_request.room_of", lambda profile: Room(2**20, "the limit"))
    options, command = parse_options([str(config), "--device", "t4", "--dtype", "float16", "--length", "256"])
    (finding,) = with_nearest((FINDING,), plan_of(options, command), command)
    assert finding.fixes == ()
    assert finding.notes == (
        "no settings with less memory fit into 1.00 MiB (the limit): int8 needs 1.06 MiB for 1 row of 64 tokens; nf4 needs 1.06 MiB "
        "for 1 row of 64 tokens; not traced, because weights and adapters alone exceed the limit: 4.00 MiB in float16",
    )
    assert sorted(formula) == [(1, 64), (1, 64), (1, 256), (1, 256)]  # no step is traced twice


def test_a_check_of_what_does_not_fit_names_what_does(config: Path, room: None) -> None:
    """The weights alone are too large, so no smaller batch fits."""
    options, command = parse_options([str(config), "--device", "t4", "--dtype", "float16", "--length", "256"])
    step = plan_of(options, command)
    findings = with_nearest((FINDING,), step, command)
    fixes = findings[0].fixes
    assert fixes[0].verified
    assert fixes[0].text == (
        f"this command fits: isotype sft --model_name_or_path {config.parent} --dtype float16 --max_length 256 "
        "--per_device_train_batch_size 1 --dataset_name embedded:precision_qa --gradient_checkpointing True "
        "--gradient_accumulation_steps 1"
    )
    assert with_nearest(findings, step, command) is findings  # a finding already has a verified fix
    other = (Finding("warning", "a cast", code="IST201"),)
    assert with_nearest(other, step, command) is other


def test_where_other_storage_fits_no_longer_rows_are_traced(
    config: Path, room: None, formula: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("isotype.planning.from_request.room_of", lambda profile: Room(3 * 2**20, "3 MiB"))
    options, command = parse_options([str(config), "--device", "t4", "--dtype", "float16", "--length", "256"])
    fix = with_nearest((FINDING,), plan_of(options, command), command)[0].fixes[0]
    assert fix.text.startswith("this command fits, with quantization int8 instead of None")
    assert formula == [(1, 256)] * 2  # int8 and nf4: the weights alone do not fit in float16

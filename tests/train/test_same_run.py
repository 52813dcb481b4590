"""A resumed run is the same run: which settings are compared, which may change, and the continued report."""

from __future__ import annotations

import datetime
import io
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from safetensors.torch import load_file, save_file
from transformers.utils import chat_template_utils

from isotype.checkpoint.tokenizer import tokenizer_of
from isotype.core.errors import CheckpointError
from isotype.data.methods import METHODS
from isotype.report.run.record import from_json, to_json
from isotype.train import training
from isotype.train.output.resume import RUN_FILE
from isotype.train.rows.measurement_rows import rows_of_training
from tests.pairwise import few
from tests.parsed import parse_settings
from tests.train.tiny import TEMPLATE, rows, save_chat_model, save_rows

pytestmark = pytest.mark.usefixtures("unchecked")


def train(root: Path, *argv: object) -> tuple[training.Outcome, str]:
    arguments = [
        "--model_name_or_path", root / "model", "--dataset_name", root / "train.jsonl", "--output_dir", root / "out",
        "--max_steps", 2, "--save_steps", 1, "--logging_steps", 1, "--per_device_train_batch_size", 2,
        "--report_to", "none", "--dtype", "float32", "--lora_target_modules", "q_proj", *argv,
    ]  # fmt: skip
    text = io.StringIO()
    settings = parse_settings(METHODS["sft"], [str(each) for each in arguments])
    return training.run(settings, Console(file=text, width=200)), text.getvalue()


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("begun")
    save_chat_model(root / "model")
    save_rows(root / "train.jsonl", rows("sft"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("isotype.train.callback.before_first_step", lambda *_: None)
        train(root)
    return root


@pytest.fixture
def run(begun: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(begun, tmp_path / "run"))


def refused(root: Path, *argv: object) -> list[tuple[str, str, str]]:
    with pytest.raises(CheckpointError, match="belongs to a run with other settings") as caught:
        train(root, "--resume_from_checkpoint", "true", *argv)
    return [(p.given, p.expected, p.fix) for p in caught.value.problems]


def test_every_difference_is_named_at_once(run: Path):
    found = refused(
        run, "--learning_rate", 1e-3, "--lr_scheduler_type", "cosine", "--seed", 7, "--lora_alpha", 8, "--max_length", 64,
        "--per_device_train_batch_size", 4, "--optim", "sgd", "--weight_decay", 0.5,
    )  # fmt: skip
    at = "as in checkpoint-2"
    assert {given: (expected, fix) for given, expected, fix in found} == {
        "4 rows in an optimizer step": (
            f"2, {at}",
            "keep per_device_train_batch_size x gradient_accumulation_steps x processes the same",
        ),
        "--learning_rate 0.001": (f"2e-05, {at}", "--learning_rate 2e-05"),
        "--lr_scheduler_type cosine": (f"linear, {at}", "--lr_scheduler_type linear"),
        "--seed 7": (f"42, {at}", "--seed 42"),
        "--lora_alpha 8": (f"32, {at}", "--lora_alpha 32"),
        "--max_length 64": (f"1024, {at}", "--max_length 1024"),
        "--optim sgd": (f"adamw_torch_fused, {at}", "--optim adamw_torch_fused"),
        "--weight_decay 0.5": (f"0.0, {at}", "--weight_decay 0.0"),
    }


def test_other_micro_batches_and_ranks(run: Path):
    ((given, expected, _fix),) = refused(
        run, "--per_device_train_batch_size", 1, "--gradient_accumulation_steps", 2
    )
    assert (given, expected) == ("--gradient_accumulation_steps 2", "1, as in checkpoint-2")
    # As two processes with one row each would have saved it: one process with two rows is the same run.
    path = run / "out" / "checkpoint-2" / RUN_FILE
    saved = json.loads(path.read_text())
    path.write_text(json.dumps({**saved, "processes": 2, "gradient_accumulation_steps": 4}))
    (run / "out" / "checkpoint-2" / "isotype_checkpoint.json").unlink()
    outcome, _ = train(run, "--resume_from_checkpoint", run / "out" / "checkpoint-2")
    assert outcome.record.status == "finished"


def test_other_rows_and_other_weights_are_another_run(run: Path):
    lines = (run / "train.jsonl").read_text().splitlines(keepends=True)
    (run / "train.jsonl").write_text("".join(reversed(lines)))
    ((given, expected, fix),) = refused(run)
    assert given.startswith("the training rows: 20 rows, ")
    assert expected.startswith("20 rows, ")
    assert given.rsplit(", ")[-1] != expected.split(", ")[1]
    assert fix == "use the same rows in the same order, or start again in another --output_dir"
    (run / "train.jsonl").write_text("".join(lines))
    weights = load_file(run / "model" / "model.safetensors")
    save_file({name: value + 1 for name, value in weights.items()}, run / "model" / "model.safetensors")
    ((given, expected, _),) = refused(run)
    assert given.startswith("the weights of --model_name_or_path have the fingerprint ")


def test_what_may_change_does_not_matter(run: Path):
    (run / "model").rename(run / "moved")
    (run / "train.jsonl").rename(run / "rows.jsonl")
    (run / "out").rename(run / "results")
    arguments = (
        "--model_name_or_path", run / "moved", "--dataset_name", run / "rows.jsonl", "--output_dir", run / "elsewhere",
        "--logging_steps", 5, "--save_steps", 3, "--max_steps", 3, "--no_fuse",
        "--resume_from_checkpoint", run / "results" / "checkpoint-2",
    )  # fmt: skip
    outcome, text = train(run, *arguments)
    assert outcome.record.status == "finished"
    assert [step.step for step in outcome.record.steps] == [1, 2, 3]
    assert "note: --max_steps 3 instead of 2: the linear schedule continues with the new length" in text
    assert "today's date" not in text  # of a template that writes none


def test_a_checkpoint_of_another_program_is_compared_as_far_as_it_says(begun: Path, run: Path):
    for name in (RUN_FILE, "isotype_checkpoint.json", "run_report.json"):
        (run / "out" / "checkpoint-2" / name).unlink()
    found = refused(run, "--model_name_or_path", begun / "model", "--lora_r", 4, "--learning_rate", 1e-3)
    assert [given for given, _, _ in found] == ["--lora_r 4"]


# The date that a chat template writes

DATED = "{{ (date if date is defined else 'w' + strftime_now('%d')) + ' ' }}" + TEMPLATE


def on(day: int, patch: pytest.MonkeyPatch) -> None:
    """Set the clocks of transformers and isotype to a day of November 2026."""

    class Clock(datetime.datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return cls(2026, 11, day, 12, tzinfo=tz)

    class Day(datetime.date):
        @classmethod
        def today(cls) -> Any:
            return cls(2026, 11, day)

    patch.setattr(chat_template_utils, "datetime", Clock)
    patch.setattr("isotype.train.output.resume.date", Day)


@pytest.fixture(scope="module")
def begun_on_10(begun: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, training.Outcome, str]:
    """Return the folder of a run on day 10, whose model has a chat template that writes the day as a word."""
    root = Path(shutil.copytree(begun, tmp_path_factory.mktemp("dated") / "run"))
    shutil.rmtree(root / "out")
    (root / "model" / "chat_template.jinja").write_text(DATED)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("isotype.train.callback.before_first_step", lambda *_: None)
        on(10, patch)
        return root, *train(root)


@pytest.fixture
def resumable(begun_on_10: tuple[Path, training.Outcome, str], tmp_path: Path) -> Path:
    return Path(shutil.copytree(begun_on_10[0], tmp_path / "resumable"))


@pytest.fixture
def dated(resumable: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of model and rows before the run."""
    shutil.rmtree(resumable / "out")
    on(10, monkeypatch)
    return resumable


@pytest.fixture
def days(monkeypatch: pytest.MonkeyPatch) -> list[set[str]]:
    """Return the first words of the rows of each training, and of its sample questions after training."""
    found: list[set[str]] = []
    before, after = training.keep_rows, training.answers_after

    def keep_rows(trainer: Any) -> Any:
        found.append({trainer.processing_class.decode(ids[0]) for ids in trainer.train_dataset["input_ids"]})
        return before(trainer)

    def answers_after(trainer: Any, asked: Any, console: Console) -> Any:
        for _, prompt in asked:
            found[-1].add(trainer.processing_class.apply_chat_template(prompt, tokenize=False).split()[0])
        return after(trainer, asked, console)

    monkeypatch.setattr(training, "keep_rows", keep_rows)
    monkeypatch.setattr(training, "answers_after", answers_after)
    return found


@few("cached", [True, False], False)
def test_a_resumed_run_keeps_the_day_that_its_template_has_written(
    cached: bool,
    begun_on_10: tuple[Path, training.Outcome, str],
    resumable: Path,
    days: list[set[str]],
    monkeypatch: pytest.MonkeyPatch,
):
    note = "note: the chat template can write a date; the date in this run is 2026-11-10, "
    _, outcome, text = begun_on_10
    assert note + "the day on which the run started, also after a resume" in text
    assert any("2026-11-10" in each for each in outcome.record.notes)
    on(11, monkeypatch)
    if not cached:
        monkeypatch.setattr("datasets.arrow_dataset.is_caching_enabled", lambda: False)
    _, text = train(resumable, "--max_steps", 3, "--resume_from_checkpoint", "true")
    assert days == [{"w10"}]
    assert note + "the day that the resumed checkpoint-2 records" in text
    assert (
        json.loads((resumable / "out" / "checkpoint-3" / RUN_FILE).read_text())["template_date"]
        == "2026-11-10"
    )
    assert "template_date" not in (resumable / "out" / "tokenizer_config.json").read_text()


def test_another_run_has_a_day_of_its_own_and_not_one_of_the_cache(
    dated: Path, days: list[set[str]], monkeypatch: pytest.MonkeyPatch
):
    short = ("--max_steps", 1, "--save_strategy", "no")
    train(dated, *short)
    on(11, monkeypatch)
    _, text = train(dated, *short, "--output_dir", dated / "other")
    assert days == [{"w10"}, {"w11"}]
    assert "the date in this run is 2026-11-11, " in text
    # The template of --chat_template_path may be another one than the tokenizer's.
    template = dated / "given.jinja"
    (dated / "model" / "chat_template.jinja").rename(template)
    (dated / "model" / "chat_template.jinja").write_text(TEMPLATE)
    for day in (12, 13):
        on(day, monkeypatch)
        flags = ("--chat_template_path", template, "--output_dir", dated / f"given-{day}")
        _, text = train(dated, *short, *flags)
        assert f"the date in this run is 2026-11-{day}, " in text
    assert [each & {"w12", "w13"} for each in days[2:]] == [{"w12"}, {"w13"}]


@pytest.mark.parametrize("folder", ["out", "out/checkpoint-2"])
def test_a_merge_reads_the_rows_of_the_day_that_the_run_has(
    folder: str, begun_on_10: tuple[Path, training.Outcome, str], monkeypatch: pytest.MonkeyPatch
):
    root = begun_on_10[0]
    on(11, monkeypatch)
    rows, _ = rows_of_training(root / folder)
    assert rows is not None
    words = tokenizer_of(root / "out")
    assert {words.decode(ids[0]) for ids, _ in rows.texts} == {"w10"}


def test_a_checkpoint_without_a_day_goes_on_with_today_and_says_so(
    resumable: Path, days: list[set[str]], monkeypatch: pytest.MonkeyPatch
):
    checkpoint = resumable / "out" / "checkpoint-2"
    saved = json.loads((checkpoint / RUN_FILE).read_text())
    del saved["template_date"]
    (checkpoint / RUN_FILE).write_text(json.dumps(saved))
    (checkpoint / "isotype_checkpoint.json").unlink()
    on(11, monkeypatch)
    _, text = train(resumable, "--max_steps", 3, "--resume_from_checkpoint", checkpoint)
    assert days == [{"w11"}]
    assert "2026-11-11, today (checkpoint-2 records no day, and its run may have used another day)" in text


def test_a_date_in_the_rows_is_the_same_on_every_day(
    dated: Path, days: list[set[str]], monkeypatch: pytest.MonkeyPatch
):
    save_rows(dated / "train.jsonl", [{**row, "chat_template_kwargs": {"date": "w5"}} for row in rows("sft")])
    monkeypatch.setattr(training, "answers_after", lambda trainer, asked, *_: [sample for sample, _ in asked])
    for day in (10, 11):
        on(day, monkeypatch)
        train(dated, "--output_dir", dated / f"out-{day}", "--max_steps", 1, "--save_strategy", "no")
    assert days == [{"w5"}, {"w5"}]


# The report


def report(root: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((root / "out" / "run_report.json").read_text())
    return found


def test_a_report_goes_on_and_keeps_time_and_answers(run: Path):
    before = report(run)
    train(run, "--max_steps", 4, "--resume_from_checkpoint", "true")
    after = report(run)
    assert [each["step"] for each in after["steps"]] == [1, 2, 3, 4]
    assert after["steps"][:2] == before["steps"]
    assert after["resumed_from"] == 2
    assert after["earlier_seconds"] == pytest.approx(sum(each["seconds"] for each in before["steps"]))
    assert from_json((run / "out" / "run_report.json").read_text()) is not None
    text = (run / "out" / "run_report.json").read_text()
    assert to_json(from_json(text)) == text


def test_a_finished_run_that_is_resumed_keeps_its_report(run: Path):
    before = report(run)
    outcome, _ = train(run, "--resume_from_checkpoint", "true")
    assert outcome.record.status == "finished"
    assert report(run)["steps"] == before["steps"]


@pytest.mark.parametrize("resume", [(), ("--resume_from_checkpoint", "checkpoint-1")], ids=["new", "resumed"])
def test_a_run_that_fails_before_its_first_step_leaves_the_report(
    resume: tuple[str, ...], run: Path, monkeypatch: pytest.MonkeyPatch
):
    before = (run / "out" / "run_report.json").read_bytes()

    def broken(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no step today")

    monkeypatch.setattr("transformers.Trainer.training_step", broken)
    where = (resume[0], run / "out" / resume[1]) if resume else ()
    with pytest.raises(RuntimeError, match="no step today"):
        train(run, *where)
    assert (run / "out" / "run_report.json").read_bytes() == before


# What a checkpoint holds


def test_bytes_that_have_changed_are_found_and_an_older_checkpoint_is_taken(run: Path):
    path = run / "out" / "checkpoint-2" / "adapter_model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    outcome, text = train(run, "--resume_from_checkpoint", "true")
    assert (
        f"note: {path.parent} is not complete: adapter_model.safetensors differs from the file that was saved"
        in text
    )
    assert f"resuming from {run / 'out' / 'checkpoint-1'}" in text
    assert [step.step for step in outcome.record.steps] == [1, 2]


# One folder, one writer


def test_a_second_run_into_a_folder_is_refused(run: Path):
    from isotype.core.errors import UsageError
    from isotype.core.files import LOCK_FILE, only_writer

    with only_writer(run / "out", "isotype sft --seed 1") as unlocked:
        assert unlocked is None
        with pytest.raises(UsageError, match="another run writes into the output directory") as caught:
            train(run)
        given = caught.value.problems[0].given
        assert given.startswith(f"{run / 'out'} is written by process {os.getpid()} on ")
        assert given.endswith(": isotype sft --seed 1")
        assert f"kill {os.getpid()} on" in caught.value.problems[0].fix
    assert not (run / "out" / LOCK_FILE).exists()
    train(run, "--max_steps", 1, "--save_strategy", "no")
    assert not (run / "out" / LOCK_FILE).exists()

"""`--early_stopping_patience` ends a run whose loss no longer improves, prints it, and counts on after a resume."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from isotype.core.errors import UsageError
from isotype.data.methods import METHODS
from isotype.train import training
from isotype.train.validate import check_settings
from tests.parsed import parse_settings
from tests.train.tiny import rows, save_chat_model, save_rows

pytestmark = pytest.mark.usefixtures("unchecked")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("model"))


def arguments(path: Path, out: Path, *more: object) -> list[str]:
    data = save_rows(out.parent / "train.jsonl", rows("sft"))
    # Every evaluation is worse than the one before it where no loss is better by a thousand.
    argv = f"""--model_name_or_path {path} --dataset_name {data} --output_dir {out} --max_steps 12 --logging_steps 1
        --per_device_train_batch_size 2 --lora_r 4 --lora_target_modules q_proj --eval_split 4 --eval_strategy steps --eval_steps 2 --device cpu
        --early_stopping_threshold 1000 --report_to none""".split()
    return [*argv, *map(str, more)]


def train(path: Path, out: Path, *more: object) -> tuple[training.Outcome, str]:
    text = io.StringIO()
    settings = parse_settings(METHODS["sft"], arguments(path, out, *more))
    return training.run(settings, Console(file=text, width=300)), text.getvalue()


def test_it_stops_says_so_and_counts_on_after_a_resume(path: Path, tmp_path: Path) -> None:
    patience = ("--early_stopping_patience", 2)
    outcome, text = train(path, tmp_path / "once", *patience, "--save_steps", 4)
    # The first evaluation is the best there is; the second and the third are no better by a thousand.
    assert (outcome.record.status, len(outcome.record.steps)) == ("finished", 6)
    stopped = "stopped early at step 6 of 12: 2 evaluations did not improve the loss (best: "
    assert stopped in text
    assert any(stopped in note for note in outcome.record.notes)
    assert "early stopping saves the model of its last step; --load_best_model_at_end True" in text
    again, text = train(
        path, tmp_path / "once", *patience, "--resume_from_checkpoint", tmp_path / "once" / "checkpoint-4"
    )
    assert len(again.record.steps) == 6
    assert stopped in text


def test_the_best_model_is_taken_where_it_is_asked_for(path: Path, tmp_path: Path) -> None:
    more = ("--early_stopping_patience", 1, "--load_best_model_at_end", True, "--save_steps", 2)
    outcome, text = train(path, tmp_path / "best", *more)
    assert len(outcome.record.steps) == 4
    assert "early stopping saves the model of its last step" not in text
    best, final = (tmp_path / "best" / name for name in ("checkpoint-2", "."))
    assert (best / "adapter_model.safetensors").read_bytes() != b""
    state = (tmp_path / "best" / "checkpoint-4" / "trainer_state.json").read_text()
    lower = min(outcome.record.evals, key=lambda each: each.loss)
    assert f"checkpoint-{lower.step}" in state
    kept = tmp_path / "best" / f"checkpoint-{lower.step}"
    assert (final / "adapter_model.safetensors").read_bytes() == (
        kept / "adapter_model.safetensors"
    ).read_bytes()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--early_stopping_patience 3", "an evaluation on held-back rows"),
        ("--early_stopping_patience 0 --eval_split 0.2", "at least 1"),
        ("--early_stopping_threshold 0.1", "also --early_stopping_patience"),
        ("--early_stopping_patience 2 --early_stopping_threshold -1 --eval_split 0.2", "at least 0"),
    ],
)
def test_what_it_cannot_go_by_is_refused(path: Path, tmp_path: Path, flags: str, words: str) -> None:
    argv = ["--model_name_or_path", str(path), "--dataset_name", "x", "--output_dir", str(tmp_path)]
    with pytest.raises(UsageError, match=words):
        check_settings(parse_settings(METHODS["sft"], [*argv, *flags.split()]))

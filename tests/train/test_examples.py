"""The data of a run: column names, held-back rows, lengths, cuts, padding, the example; and a start from an adapter."""

from __future__ import annotations

import io
import json
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from safetensors.torch import load_file

from isotype.core.errors import DataError, Problem, UsageError
from isotype.data.methods import METHODS
from isotype.data.reading import ColumnMap, parse_columns
from isotype.report.run.record import DataSummary
from isotype.train import training
from isotype.train.describe import data_summary, percentiles, planned_epochs, show_data
from isotype.train.rows.lengths import Lengths, padding_share
from tests.pairwise import few
from tests.parsed import parse_settings
from tests.train.tiny import rows, save_chat_model, save_rows

pytestmark = pytest.mark.usefixtures("unchecked")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("models") / "tiny")


def train(method: str, model: Path, data: Path, out: Path, *argv: object) -> tuple[training.Outcome, str]:
    fixed = ["--model_name_or_path", model, "--dataset_name", data, "--output_dir", out, "--max_steps", 2]
    text = io.StringIO()
    settings = parse_settings(
        METHODS[method],
        [str(a) for a in (*fixed, "--save_strategy", "no", "--lora_target_modules", "q_proj", *argv)],
    )
    return training.run(settings, Console(file=text, width=80)), text.getvalue()


# --- columns ----------------------------------------------------------------------------------------------


def test_alpaca_in_one_flag(model, tmp_path):
    data = tmp_path / "alpaca.jsonl"
    given = [{"instruction": "w1 w2", "input": "w3" * (n % 2), "output": f"w{n}", "id": n} for n in range(12)]
    data.write_text("".join(json.dumps(row) + "\n" for row in given))
    _, text = train("sft", model, data, tmp_path / "out", "--columns", "alpaca", "--eval_split", "0.25")
    assert "data: 9 rows, 3 held back" in text
    assert "held-back loss" in text


def test_columns_of_every_kind_of_file(tmp_path):
    from isotype.data.load import load_training_data
    from isotype.data.reading import Reading, parse_columns

    (tmp_path / "a.csv").write_text("question,answer\n1 and 2,3\nw1,true\n")
    script = SimpleNamespace(
        dataset_name=str(tmp_path / "a.csv"), dataset_train_split="train", dataset_test_split="test",
        dataset_config=None, dataset_streaming=False,
    )  # fmt: skip

    def loaded() -> list[dict[str, Any]]:
        reading = Reading("sft", parse_columns("prompt=question,completion=answer"))
        found = load_training_data(script, None, reading, need_test=False)
        return list(found["train"])

    assert loaded() == [
        {"prompt": "1 and 2", "completion": "3"},
        {"prompt": "w1", "completion": "true"},  # a cell of a named column is text
    ]
    import pandas

    pandas.DataFrame({"question": ["w1"], "answer": ["w2"]}).to_parquet(tmp_path / "a.parquet")
    script.dataset_name = str(tmp_path / "a.parquet")
    assert loaded() == [{"prompt": "w1", "completion": "w2"}]
    script.dataset_name = str(tmp_path / "b.jsonl")
    (tmp_path / "b.jsonl").write_text('{"q": "w1", "answer": "w2"}\n')
    with pytest.raises(DataError, match=r"b\.jsonl.*no column 'question', which --columns names") as caught:
        loaded()
    assert "'q', 'answer'" in str(caught.value)


@pytest.mark.parametrize("text", ["", "alpacca", "prompt=", "=x", "prompt=a,b"])
def test_columns_that_say_nothing(text):
    with pytest.raises(DataError, match="the columns cannot be parsed"):
        parse_columns(text)


@given(st.dictionaries(st.sampled_from("abcd"), st.text(max_size=3), max_size=4))
def test_a_map_loses_no_other_column(row):
    found = ColumnMap((("prompt", ("a", "b")),)).apply(row)
    if {"a", "b"} <= set(row):
        assert found == {**{k: v for k, v in row.items() if k in "cd"}, "prompt": found["prompt"]}
        assert found["prompt"] == "\n\n".join(filter(None, (row["a"], row["b"])))
    else:
        assert isinstance(found, Problem)


# --- lengths and padding ----------------------------------------------------------------------------------


def test_packed_data_is_counted_as_rows_and_packs(model, tmp_path):
    data = tmp_path / "train.jsonl"
    data.write_text('{"text": "w1 w2 w1 w2"}\n' * 12)
    flags = ("--packing", "True", "--max_length", 16, "--per_device_train_batch_size", 2, "--max_steps", 1)
    outcome, text = train("sft", model, data, tmp_path / "out", *flags)
    found = outcome.record.data
    assert (found.rows, found.effective_batch) == (12, 2)
    assert 3 <= found.packs <= 6
    assert f"data: 12 rows in {found.packs} packs; 2 packs a step, " in text


def test_the_data_is_summed_up_before_training(model, tmp_path):
    data = tmp_path / "train.jsonl"
    lines = [{"prompt": "w1 " * 5, "completion": "w2"}] * 15 + [
        {"prompt": "w1 ", "completion": " ".join(["w2"] * 30)}
    ] * 5
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    outcome, text = train(
        "sft", model, data, tmp_path / "out", "--max_length", 16, "--per_device_train_batch_size", 4,
        "--gradient_accumulation_steps", 2,
    )  # fmt: skip
    found = outcome.record.data
    assert (found.rows, found.effective_batch, found.epochs) == (20, 8, pytest.approx(16 / 20, abs=0.1))
    # five prompt tokens, one answer, the end; and one, thirty, the end
    assert found.lengths == (7, 32, 32)
    assert (found.cut_rows, found.cut_share) == (5, pytest.approx(5 * 16 / (15 * 7 + 5 * 32)))
    assert 0 < found.padding_share < 0.6
    assert "note: 5 of 20 rows are longer than max_length 16: " in text
    assert "given    w1 w1 w1 w1 w1" in text
    assert "learned  w2 </s>" in text


def test_preference_rows_are_as_long_as_their_longest_answer(model, tmp_path):
    data = tmp_path / "pairs.jsonl"
    data.write_text(json.dumps({"prompt": "w1 w1 ", "chosen": "w2", "rejected": "w3 w3 w3"}) + "\n")
    outcome, _ = train("dpo", model, data, tmp_path / "out", "-q")
    assert outcome.record.data.lengths == (6, 6, 6)


@given(st.lists(st.integers(1, 200), min_size=1, max_size=7), st.integers(1, 8))
def test_padding_share_is_that_of_all_batches(tokens, rows):
    batches = list(combinations(tokens, min(rows, len(tokens))))
    padded = sum(max(batch) * len(batch) for batch in batches)
    assert padding_share(tokens, rows) == pytest.approx(1 - sum(map(sum, batches)) / padded)


def test_percentiles():
    assert percentiles([5]) == (5, 5, 5)
    assert percentiles(range(1, 101)) == (50, 90, 99)


def test_a_long_data_set_is_estimated_from_its_first_rows():
    arguments = SimpleNamespace(
        per_device_train_batch_size=1, gradient_accumulation_steps=1, world_size=1, max_steps=-1, num_train_epochs=3.0
    )  # fmt: skip
    trainer = SimpleNamespace(
        train_dataset=range(4000), eval_dataset=None, args=arguments, state=SimpleNamespace(epoch=None),
    )  # fmt: skip
    arguments.max_length = 10
    found = data_summary(trainer, Lengths((5,) * 990 + (50,) * 10, 4000))
    assert (found.cut_rows, found.epochs, found.padding_share) == (40, 3.0, 0.0)


def test_a_stream_has_no_summary():
    assert data_summary(SimpleNamespace(train_dataset=iter(()), eval_dataset=None)) is None


def test_a_long_example_is_shortened():
    text = io.StringIO()
    show_data(Console(file=text, width=80), DataSummary(1, 0, 8, 1.0), [(False, "a\n" * 900), (True, "b")])
    assert "[…]" in text.getvalue()
    assert text.getvalue().count("\n") < 660


# --- rows held back ---------------------------------------------------------------------------------------


@few("share", ["0.2", "4"], "0.2")
def test_rows_are_held_back_and_never_trained_on(model, tmp_path, share):
    data = save_rows(tmp_path / "train.jsonl", rows("sft"))
    outcome, _ = train("sft", model, data, tmp_path / "out", "--eval_split", share)
    assert (outcome.record.data.rows, outcome.record.data.held_back) == (16, 4)
    assert outcome.record.evals


@pytest.mark.parametrize("share", ["0", "20", "-1", "1e9"])
def test_rows_that_cannot_be_held_back(model, tmp_path, share):
    data = save_rows(tmp_path / "train.jsonl", rows("sft"))
    with pytest.raises(UsageError, match="--eval_split"):
        train("sft", model, data, tmp_path / "out", "--eval_split", share)


# --- from an adapter --------------------------------------------------------------------------------------


def test_a_run_starts_from_an_adapter(model, tmp_path):
    first, pairs = tmp_path / "sft", tmp_path / "pairs.jsonl"
    data = save_rows(tmp_path / "train.jsonl", rows("sft"))
    train("sft", model, data, first, "--lora_r", 4, "--dtype", "bfloat16", "--learning_rate", "1e-2")
    pairs.write_text(json.dumps({"prompt": "w1 w1 ", "chosen": "w2", "rejected": "w3 w3 w3"}) + "\n")
    outcome, _ = train("dpo", first, pairs, tmp_path / "dpo", "--learning_rate", "0")
    # Nothing is learned at rate 0: the values are the first run's to the last digit, and the dtypes too.
    before, after = (load_file(place / "adapter_model.safetensors") for place in (first, tmp_path / "dpo"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert any(value.abs().max() > 0 for name, value in before.items() if "lora_B" in name)
    assert outcome.record.model == str(model)
    assert {row.dtype for row in outcome.record.policy if row.role.startswith("matmuls")} == {"bfloat16"}
    with pytest.raises(UsageError) as caught:
        train("dpo", first, pairs, tmp_path / "no", "--lora_r", 8, "--use_dora", "True")
    assert "--lora_r 8" in str(caught.value)
    assert "the adapter's value: 4" in str(caught.value)
    assert "--use_dora True" in str(caught.value)
    with pytest.raises(UsageError, match=r"an adapter for CAUSAL_LM(.|\n)*isotype merge"):
        train("reward", first, pairs, tmp_path / "no")


@pytest.mark.parametrize(
    ("rows", "batch", "accumulated", "steps", "drop"),
    [(97, 8, 1, 32, False), (20, 8, 2, 5, False), (20, 8, 2, 3, True), (7, 16, 4, 2, False)],
)
def test_epochs_that_are_planned_are_those_that_the_trainer_counts(
    tmp_path, rows: int, batch: int, accumulated: int, steps: int, drop: bool
):
    """The console shows the same number of epochs before a run as the report after it."""
    arguments = transformers.TrainingArguments(
        str(tmp_path),
        max_steps=steps,
        per_device_train_batch_size=batch // accumulated,
        gradient_accumulation_steps=accumulated,
        dataloader_drop_last=drop,
        report_to="none",
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(()))

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": (self.weight * x).mean()}

    data = [{"x": torch.ones(1)} for _ in range(rows)]
    trainer = transformers.Trainer(Model(), arguments, train_dataset=data)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    assert planned_epochs(arguments, rows, batch) == pytest.approx(trainer.state.epoch)

"""Lengths of rows: the length of a step, and the tokens that `max_length` cuts off."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import LlamaConfig

from isotype.checkpoint import checkpoint
from isotype.cli.main import main
from isotype.core.errors import DataError
from isotype.train.models import processing_class
from isotype.train.preflight.step import check_plan
from isotype.train.preflight.step_plan import parse_options, plan_of
from isotype.train.rows.lengths import Lengths, RowTokens
from tests.checkpoint.test_gguf_export import byte_level, tiny, write_gguf
from tests.train.tiny import rows, save_chat_model, save_rows


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("model"))


def turn(role: str, words: int) -> list[dict[str, str]]:
    return [{"role": role, "content": "w1 " * words}]


@pytest.mark.parametrize(
    ("method", "row", "length", "prompt"),
    [
        ("sft", {"input_ids": [1, 2, 3]}, 3, 0),
        ("sft", {"text": "w1 w2 w3"}, 4, 0),
        ("sft", {"prompt": "w1 w2 ", "completion": "w3"}, 4, 2),
        ("sft", {"messages": turn("user", 2) + turn("assistant", 3)}, 11, 0),
        ("dpo", {"prompt": "w1 ", "chosen": "w2", "rejected": "w3 w4 w5"}, 5, 1),
        ("dpo", {"chosen": "w1 w2 w3", "rejected": "w1 w2 w4 w5"}, 5, 2),
        ("dpo", {"chosen": "w1", "rejected": "w2"}, 2, 0),
        (
            "kto",
            {name: turn("user", 2) + turn("assistant", n) for name, n in (("chosen", 3), ("rejected", 1))},
            11,
            7,
        ),
        ("kto", {"prompt": turn("user", 2), "completion": turn("assistant", 3), "label": True}, 11, 7),
        ("grpo", {"prompt": turn("user", 2)}, 7, 0),
    ],
)
def test_the_length_of_a_row(model, method, row, length, prompt):
    lengths = RowTokens(method, processing_class(model)).lengths([row])
    assert lengths == Lengths((length,), 1, prompt=prompt, answers=lengths.answers)
    assert [max(answers) for answers in lengths.answers] == [length]
    assert [len(answers) for answers in lengths.answers] == [2 if "chosen" in row else 1]


def test_as_many_tokens_are_asked_as_in_the_shortest_prompt(model):
    rows = [{"prompt": "w1 " * words, "chosen": "w2", "rejected": "w3"} for words in (5, 2, 9)]
    assert RowTokens("dpo", processing_class(model)).lengths(rows).prompt == 2


@pytest.mark.parametrize(("argv", "prompt"), [([], 2), (["--completion_only_loss", "False"], 0)])
def test_a_step_learns_no_prompt_unless_asked_to(model, tmp_path, argv, prompt):
    data = save_rows(tmp_path / "rows.jsonl", [{"prompt": "w1 w2 ", "completion": "w3"}] * 4)
    command = ["sft", "--model_name_or_path", model, "--dataset_name", data, "--device", "cpu", *argv]
    assert plan_of(*parse_options([*map(str, command)])).prompt == prompt


@pytest.mark.parametrize(
    ("argv", "rows", "step_rows"),
    [
        (["--per_device_train_batch_size", 2, "--gradient_accumulation_steps", 2], 2, 4),
        (["--per_device_train_batch_size", 2, "--gradient_accumulation_steps", 9], 2, 6),
        (["--per_device_train_batch_size", 6, "--gradient_accumulation_steps", 2], 6, 6),
        (["--per_device_train_batch_size", 8, "--gradient_accumulation_steps", 2], 6, 6),
        (["--per_device_train_batch_size", 2, "--packing", "True", "--max_length", 16], 2, 2),
        (["--batch", 8, "--gradient_accumulation_steps", 2], 8, 16),
    ],
)
def test_a_step_ends_with_the_epoch(model, tmp_path, argv, rows, step_rows):
    data = save_rows(tmp_path / "rows.jsonl", [{"text": "w1 w2 w3 w4"}] * 6)
    accumulated = [] if "--gradient_accumulation_steps" in argv else ["--gradient_accumulation_steps", 8]
    command = ["sft", "--model_name_or_path", model, "--dataset_name", data, "--device", "cpu"]
    plan = plan_of(*parse_options([*map(str, (*command, *argv, *accumulated))]))
    assert (plan.rows, plan.step_rows) == (rows, step_rows)


def test_what_is_cut():
    lengths = Lengths((10, 20, 30, 40), 4)
    assert lengths.cut(None) is lengths.cut(40) is None
    assert lengths.cut(25) == (
        "2 of 4 rows are longer than max_length 25: 20 of 100 tokens are cut; the longest has 40"
    )
    assert lengths.cut(25, True) == "2 of 4 rows are longer than max_length 25: left out; the longest has 40"
    assert "2 of 4 rows (of 400, a sample)" in str(Lengths((10, 20, 30, 40), 400).cut(25))


def test_a_row_that_the_template_refuses(model):
    tokenizer = processing_class(model)
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(DataError, match="row 1: roles must alternate"):
        RowTokens("sft", tokenizer).lengths([{"messages": turn("user", 2)}])


def test_of_streams_and_images_nothing_is_known(model):
    assert RowTokens("sft", None).lengths(iter([])) is None
    assert RowTokens("sft", None).lengths([{"messages": [], "images": []}]) is None


def check(capsys, model: Path, data: object, *argv: object) -> tuple[int, str, str]:
    command = ["check", "sft", "--model_name_or_path", model, "--dataset_name", data, "--device", "h100"]
    status = main([str(each) for each in (*command, *argv)])
    out, err = capsys.readouterr()
    return status, out, err


def test_check_opens_the_data_set(capsys, model, tmp_path):
    data = save_rows(tmp_path / "train.jsonl", rows("sft", 5))
    status, out, _ = check(capsys, model, data, "--json")
    longest = max(
        len(r["prompt"][0]["content"].split() + r["completion"][0]["content"].split()) for r in rows("sft", 5)
    )
    assert status == 0
    found = json.loads(out)["setup"]
    # Of 8 rows asked for there are 5; a trainer may add a token at the end.
    assert found["batch"]["input_ids"] == [5, longest + 7]
    counted = f"counted by the tokenizer of {model} (64 tokens in its vocabulary)"
    fullest = "the fullest batch has 87 tokens and 13 of padding"
    assert found["data"] == f"the longest of 5 rows has {longest + 6} tokens; {counted}; {fullest}"
    assert found["details"] == [
        "LoRA r 16 alpha 32 on down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj",
        "no gradient checkpointing",
    ]
    argv = ["sft", "--model_name_or_path", model, "--dataset_name", data, "--max_length", 16]
    plan = plan_of(*parse_options([str(each) for each in argv]))
    assert plan.length == 16
    assert "are longer than max_length 16: " in plan.data


def test_check_counts_by_the_tokenizer_of_a_gguf_file(tmp_path, monkeypatch):
    """`embedded:smollm2` is a GGUF file with a tokenizer."""
    write_gguf(tiny("llama"), byte_level(), tmp_path / "small.gguf", "q8_0", "small")
    monkeypatch.setattr(checkpoint, "embedded_file", lambda name: tmp_path / "small.gguf")
    data = tmp_path / "train.jsonl"
    data.write_text(
        '{"prompt": "Which dtype has 8 bits of exponent?", "completion": "bfloat16"}\n', encoding="utf-8"
    )
    argv = ["sft", "--model_name_or_path", "embedded:smollm2", "--dataset_name", str(data)]
    plan = plan_of(*parse_options(argv))
    assert plan.length is not None
    assert 8 < plan.length < 40
    assert "of embedded:smollm2 (385 tokens in its vocabulary)" in plan.data
    assert not any("tokenizer" in note for note in plan.notes)


def test_what_the_rows_are_read_as_is_said_of_the_data(model, tmp_path):
    """The note belongs to the data, not to the list of what was not traced: nothing is missing."""
    turns = [{"from": "human", "value": "w1"}, {"from": "gpt", "value": "w2"}]
    data = save_rows(tmp_path / "chats.jsonl", [{"conversations": turns}] * 2)
    argv = ["sft", "--model_name_or_path", str(model), "--dataset_name", str(data)]
    plan = plan_of(*parse_options(argv))
    assert plan.data.startswith("the longest of 2 rows has ")
    assert "2 of 'human' as user" in plan.data
    assert plan.notes == ()


def test_a_check_sees_which_layers_the_training_fuses_together(tmp_path):
    """Llama reads the values of its mask, which a weightless model lacks; formerly the search was given up with a note."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    LlamaConfig(**sizes, intermediate_size=48, use_cache=False).save_pretrained(tmp_path)
    plan = plan_of(*parse_options(["sft", "--model_name_or_path", str(tmp_path), "--device", "cpu-avx2"]))
    report = check_plan(plan, ("forward",))
    assert report.ok
    assert "one by one" not in str(report)


def test_check_reads_columns_and_holds_rows_back_as_the_training_does(capsys, model, tmp_path):
    data = tmp_path / "train.jsonl"
    data.write_text('{"question": "one two", "answer": "three"}\n' * 4, encoding="utf-8")
    argv = ["--columns", "prompt=question,completion=answer", "--eval_strategy", "steps", "--eval_steps", 1]
    status, out, _ = check(capsys, model, data, *argv, "--eval_split", 0.5, "--json")
    assert status == 0
    assert json.loads(out)["setup"]["data"].startswith("the longest of 2 rows has ")
    assert check(capsys, model, data, *argv)[0] == 2  # no rows to evaluate on
    status, _, err = check(capsys, model, data, *argv, "--eval_split", 0.9)
    assert status == 2
    assert "this value holds back 4" in err


def test_check_refuses_what_the_training_would_refuse(capsys, model, tmp_path):
    data = save_rows(tmp_path / "train.jsonl", [{"question": "w1", "reply": "w2"}])
    status, _, err = check(capsys, model, data)
    assert status == 2
    assert "rename 'question' to 'prompt'" in err
    status, _, err = check(capsys, model, tmp_path / "tran.jsonl")
    assert status == 2
    assert f"there is no file or directory '{tmp_path / 'tran.jsonl'}'" in err
    status, _, err = check(capsys, model, save_rows(data, rows("sft", 2)), "--eos_token", "nonsense")
    assert status == 2
    assert "--eos_token nonsense" in err


def test_the_row_that_a_template_fails_on_is_named(tmp_path) -> None:
    from transformers import AutoTokenizer

    from isotype.core.errors import DataError
    from tests.refusals import refused
    from tests.train.tiny import TEMPLATE, save_chat_model

    tokenizer = AutoTokenizer.from_pretrained(save_chat_model(tmp_path))
    tokenizer.chat_template = TEMPLATE.replace("m['content']", "m['content'] ~ (1 / m['content']|length)")
    sound = [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2"}]
    rows = [{"messages": sound}, {"messages": [{"role": "user", "content": ""}, sound[1]]}]
    assert refused(DataError, RowTokens("sft", tokenizer, source="d.jsonl").lengths, rows).startswith(
        "the model's chat template raises an error for a row\n  - d.jsonl, row 2: ZeroDivisionError: division by zero\n"
    )

"""Labels of the assistant's tokens with any chat template, compared with the marked templates that TRL has."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trl
from datasets import Dataset, DatasetDict
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from isotype.core.errors import DataError, UsageError
from isotype.train.command.command import specs
from isotype.train.rows.assistant import labelled_row, labelled_rows
from tests.train.tiny import save_chat_model

TEMPLATES = Path(trl.__file__).parent / "chat_templates"
SPECIAL = (
    "<|im_start|>", "<|im_end|>", "<|end|>", "<|user|>", "<|assistant|>", "<|start_header_id|>", "<|end_header_id|>",
    "<|eot_id|>", "<start_of_turn>", "<end_of_turn>", "<s>", "</s>",
)  # fmt: skip
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def tokenizer_of(template: str) -> Any:
    """Return a tokenizer of bytes: each character boundary is a token boundary, so the reference is exact."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({token: at for at, token in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=made, chat_template=template, bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )


def turn(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


SINGLE = [turn("user", "2+2?"), turn("assistant", "It is 4.")]
LONGER = [*SINGLE, turn("user", "Sûre?"), turn("assistant", "Yes ☺.\n\nQuite.")]
SYSTEM = [turn("system", "Be brief."), *LONGER]


def learned(tokenizer: Any, row: dict[str, Any], whole: bool = False) -> str:
    labels = labelled_row(row, 0, tokenizer=tokenizer, whole=whole)["labels"]
    return str(tokenizer.decode([label for label in labels if label != -100]))


@pytest.mark.parametrize("chat", [SINGLE, LONGER, SYSTEM], ids=["single", "longer", "system"])
@pytest.mark.parametrize("name", ["llama3", "gemma", "qwen2_5"])
def test_as_the_marked_template_of_the_same_model(name: str, chat: list[dict[str, Any]]) -> None:
    if name == "gemma" and chat[0]["role"] == "system":
        chat = chat[1:]  # its template refuses a system message
    plain = tokenizer_of((TEMPLATES / f"{name}.jinja").read_text())
    marked = tokenizer_of((TEMPLATES / f"{name}_training.jinja").read_text())
    reference = marked.apply_chat_template(
        chat, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    row = labelled_row({"messages": chat}, 0, tokenizer=plain, whole=False)
    assert row["input_ids"] == reference["input_ids"]
    expected = [
        token if bit else -100
        for token, bit in zip(reference["input_ids"], reference["assistant_masks"], strict=True)
    ]
    if name == "qwen2_5":
        # TRL's version marks the line break of the header too, which the prompt for an answer ends with.
        starts = [at for at, token in enumerate(expected) if token != -100 and expected[at - 1] == -100]
        for at in starts:
            expected[at] = -100
    assert row["labels"] == expected


def test_turns_of_a_prompt() -> None:
    row = {"prompt": LONGER[:3], "completion": LONGER[3:]}
    assert learned(tokenizer_of(CHATML), row) == "Yes ☺.\n\nQuite.<|im_end|>\n"
    assert learned(tokenizer_of(CHATML), row, whole=True) == (
        "It is 4.<|im_end|>\nYes ☺.\n\nQuite.<|im_end|>\n"
    )


def test_tools_and_turns_beside_one_another() -> None:
    chat = [*SINGLE, turn("tool", "4"), turn("assistant", "4."), turn("assistant", "Yes.")]
    row = {"messages": chat, "tools": '[{"name": "f"}]', "chat_template_kwargs": {"extra": 1}}
    assert learned(tokenizer_of(CHATML), row) == "It is 4.<|im_end|>\n4.<|im_end|>\nYes.<|im_end|>\n"


def test_a_conversation_that_the_assistant_opens() -> None:
    assert learned(tokenizer_of(CHATML), {"messages": [SINGLE[1], *SINGLE]}) == "It is 4.<|im_end|>\n" * 2


def test_a_prompt_for_an_answer_that_says_more_than_the_answers_have() -> None:
    thinking = CHATML.replace("assistant\\n' }}{% endif", "assistant\\n<think>\\n' }}{% endif")
    assert learned(tokenizer_of(thinking), {"messages": LONGER}) == (
        "It is 4.<|im_end|>\nYes ☺.\n\nQuite.<|im_end|>\n"
    )


FORGETFUL = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{% if m.role == 'assistant' and loop.last %}{{ '<think>\\n</think>\\n' }}{% endif %}"
    "{{ m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def test_a_template_that_writes_earlier_turns_otherwise() -> None:
    tokenizer = tokenizer_of(FORGETFUL)
    assert learned(tokenizer, {"messages": SINGLE}) == "<think>\n</think>\nIt is 4.<|im_end|>\n"
    with pytest.raises(DataError) as caught:
        labelled_row({"messages": LONGER}, 6, tokenizer=tokenizer, whole=False)
    (problem,) = caught.value.problems
    assert problem.given == (
        "row 7: the chat template renders message 2 differently if other messages follow"
    )
    assert "--chat_template_path" in problem.fix


def test_a_refusal_of_the_template_names_the_row() -> None:
    strict = "{{ raise_exception('no systems') if messages[0].role == 'system' }}" + CHATML
    with pytest.raises(DataError, match="row 1: no systems"):
        labelled_row({"messages": SYSTEM}, 0, tokenizer=tokenizer_of(strict), whole=False)


def settings_of(**training: Any) -> Any:
    plain = {
        "assistant_only_loss": True, "completion_only_loss": None, "dataset_num_proc": None, "chat_template_path": None,
    }  # fmt: skip
    of_data = {
        "dataset_train_split": "train",
        "data_name": "d",
        "command": SimpleNamespace(specs=specs("sft")),
    }
    return SimpleNamespace(**{**plain, **training}, **of_data)


def test_rows_are_labelled_where_trl_finds_nothing() -> None:
    data = DatasetDict(
        {"train": Dataset.from_list([{"messages": SINGLE, "id": 1}, {"messages": SYSTEM, "id": 2}])}
    )
    rows = labelled_rows(settings_of(), tokenizer_of(CHATML), data, print)
    assert rows["train"].column_names == ["input_ids", "labels"]
    assert len(rows["train"]) == 2
    marked = tokenizer_of((TEMPLATES / "llama3_training.jinja").read_text())
    assert labelled_rows(settings_of(), marked, data, print) is data
    known = tokenizer_of((TEMPLATES / "qwen3.jinja").read_text())
    assert labelled_rows(settings_of(), known, data, print) is data
    assert labelled_rows(settings_of(assistant_only_loss=False), tokenizer_of(CHATML), data, print) is data


def test_a_template_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "marked.jinja"
    path.write_text((TEMPLATES / "llama3_training.jinja").read_text())
    data = {"train": Dataset.from_list([{"messages": LONGER}])}
    assert (
        labelled_rows(settings_of(chat_template_path=str(path)), tokenizer_of(FORGETFUL), data, print) is data
    )


@pytest.mark.parametrize("row", [{"text": "a"}, {"prompt": "a", "completion": "b"}])
def test_rows_without_turns(row: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as caught:
        labelled_rows(settings_of(), tokenizer_of(CHATML), {"train": Dataset.from_list([row])}, print)
    (problem,) = caught.value.problems
    assert problem.given.startswith("--assistant_only_loss with the columns ")
    assert problem.fix.startswith("omit --assistant_only_loss")


LEFT = [
    {"role": "user", "content": "w1"},
    {"role": "assistant", "content": "w2", "weight": 0, "train": None},
    {"role": "user", "content": "w3", "masked": True},
    {"role": "assistant", "content": "w4", "weight": 1.0},
]


@pytest.mark.parametrize(
    ("only", "prompt", "learned"),
    [
        (True, 0, "w4 </s>"),
        (False, 0, "<s> user w1 </s> <s> assistant <s> assistant w4 </s>"),
        (True, 3, "w4 </s>"),
        (False, 3, "w4 </s>"),
    ],
)
def test_turns_that_are_marked_are_not_learned(only, prompt, learned, tmp_path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(save_chat_model(tmp_path))
    row = {"prompt": LEFT[:prompt], "completion": LEFT[prompt:]} if prompt else {"messages": LEFT}
    made = labelled_row(row, 0, tokenizer=tokenizer, whole=False, only=only)
    turns = [{key: turn[key] for key in ("role", "content")} for turn in LEFT]
    assert made["input_ids"] == tokenizer.apply_chat_template(turns, return_dict=False)
    kept = [token for token, label in zip(made["input_ids"], made["labels"], strict=True) if label == token]
    assert tokenizer.decode(kept) == learned
    assert {
        label for token, label in zip(made["input_ids"], made["labels"], strict=True) if label != token
    } == {-100}


def test_marks_are_honoured_without_the_assistant_only_loss_and_said() -> None:
    said: list[str] = []
    data = DatasetDict({"train": Dataset.from_list([{"messages": LEFT}, {"messages": SINGLE}])})
    settings = settings_of(assistant_only_loss=False)
    plain = DatasetDict({"train": Dataset.from_list([{"messages": SINGLE}])})
    assert labelled_rows(settings, tokenizer_of(CHATML), plain, said.append) is plain
    rows = labelled_rows(settings, tokenizer_of(CHATML), data, said.append)["train"]
    assert rows.column_names == ["input_ids", "labels"]
    assert -100 in rows[0]["labels"]
    assert rows[1]["labels"] == rows[1]["input_ids"]
    assert said == ["2 turns without loss, as the rows request; the loss includes everything else"]

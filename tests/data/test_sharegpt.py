"""ShareGPT's {from, value} messages in every kind of storage, and mixtures of data sets of unlike form."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import datasets
import pytest

from isotype.data.sharegpt import SPEAKERS
from tests.data import loading
from tests.data.loading import Row, lines, mixture, refusal, write

pytestmark = pytest.mark.usefixtures("place")

SHARED = [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]
STANDARD = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]


def load(name: str | None, config: Any = None, **options: Any) -> tuple[list[Row], list[str]]:
    """The rows to train on, and what is said of them."""
    said: list[str] = []
    return list(loading.load(name, config=config, said=said, **options)["train"]), said


def as_lines(values: list[Row]) -> str:
    write("t.jsonl", lines(*values))
    return "t.jsonl"


def as_parquet(values: list[Row]) -> str:
    datasets.Dataset.from_list(values).to_parquet("t.parquet")
    return "t.parquet"


def as_saved(values: list[Row]) -> str:
    datasets.Dataset.from_list(values).save_to_disk("saved")
    return "saved"


STORAGES = (as_lines, as_parquet, as_saved)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("store", STORAGES)
def test_conversations_come_under_the_roles_of_templates(
    store: Callable[[Any], str], streaming: bool
) -> None:
    values = [{"conversations": [{"from": "system", "value": "Be brief."}, *SHARED]}] * 2
    data, said = load(store(values), dataset_streaming=streaming)
    assert data == [{"messages": [{"role": "system", "content": "Be brief."}, *STANDARD]}] * 2
    (line,) = said
    assert "2 of 'human' as user, 2 of 'gpt' as assistant" in line.replace("2 of 'system' as system, ", "")


@pytest.mark.parametrize("store", STORAGES)
def test_a_speaker_that_nobody_knows_is_refused_with_its_row(store: Callable[[Any], str]) -> None:
    values = [
        {"conversations": SHARED},
        {"conversations": [*SHARED, {"from": "narrator", "value": "Meanwhile"}]},
    ]
    text = refusal(store(values))
    assert "2: column 'conversations' holds a message from 'narrator'\n" in text
    assert f"expected  one of {', '.join(SPEAKERS)}\n" in text
    assert (
        "fix       rename the speaker; if the chat template has such a role, write {role, content} messages"
        in text
    )


def test_a_speaker_beyond_the_checked_rows_is_refused_with_its_row() -> None:
    values = [{"conversations": SHARED}] * 1001 + [{"conversations": [{"from": "narrator", "value": "a"}]}]
    assert "t.parquet, row 1002: column 'conversations' holds a message from 'narrator'" in refusal(
        as_parquet(values)
    )


def test_rows_are_counted_within_their_own_file() -> None:
    datasets.Dataset.from_list([{"conversations": SHARED}] * 3).to_parquet("d/a.parquet")
    datasets.Dataset.from_list([{"conversations": [{"from": "narrator", "value": "a"}]}]).to_parquet(
        "d/b.parquet"
    )
    assert "b.parquet, row 1: column 'conversations' holds a message from 'narrator'" in refusal("d")


@pytest.mark.parametrize(("name", "role"), [item for item in SPEAKERS.items() if "," not in item[1]])
def test_every_name_that_data_sets_use(name: str, role: str) -> None:
    said = [{"from": name.upper(), "value": "a"}, {"from": "gpt", "value": "b"}]
    (row,), _ = load(as_lines([{"conversations": said}]))
    assert row["messages"][0] == {"role": role, "content": "a"}


def test_a_call_of_a_function_becomes_a_tool_call() -> None:
    call = {"name": "add", "arguments": {"a": 2}}
    chat = [SHARED[0], {"from": "function_call", "value": json.dumps(call)}]
    chat += [{"from": "observation", "value": "4"}, SHARED[1]]
    (row,), _ = load(as_lines([{"conversations": chat, "tools": "[]"}]))
    assert [message["role"] for message in row["messages"]] == ["user", "assistant", "tool", "assistant"]
    assert row["messages"][1]["tool_calls"] == [{"type": "function", "function": call}]
    chat[1]["value"] = "add(2)"
    assert "holds a 'function_call' whose 'value' is no tool call" in refusal(
        as_lines([{"conversations": chat}])
    )


def test_a_system_column_is_the_first_message() -> None:
    data, _ = load(as_lines([{"system": "Be brief.", "conversations": SHARED}]))
    assert data == [{"messages": [{"role": "system", "content": "Be brief."}, *STANDARD]}]


@pytest.mark.parametrize("store", STORAGES)
def test_an_answer_may_be_one_message(store: Callable[[Any], str]) -> None:
    for chat, answer in ((SHARED[:1], SHARED[1]), (STANDARD[:1], STANDARD[1])):
        (row,), _ = load(store([{"prompt": chat, "chosen": answer, "rejected": answer}]), method="dpo")
        assert row == {"prompt": STANDARD[:1], "chosen": STANDARD[1:], "rejected": STANDARD[1:]}
    assert "column 'chosen' is an object" in refusal(
        store([{"prompt": STANDARD[:1], "chosen": {"text": "4"}, "rejected": STANDARD[1]}]), method="dpo"
    )


@pytest.mark.parametrize("store", STORAGES)
def test_a_labelled_conversation_is_labelled_for_its_last_message(store: Callable[[Any], str]) -> None:
    expected = {"prompt": STANDARD[:1], "completion": STANDARD[1:], "label": True}
    for name, chat in (("messages", STANDARD), ("messages", SHARED)):
        (row,), _ = load(store([{name: chat, "label": True}]), method="kto")
        assert row == expected
    rows = [{"prompt": "2+2?", "completion": SHARED, "label": True}]
    config = mixture({"path": store(rows), "columns": {"messages": "completion"}})
    (row,), _ = load(None, config, method="kto")
    assert row == expected


def test_the_other_columns_of_chats() -> None:
    pair = {"prompt": SHARED[:1], "chosen": SHARED[1:], "rejected": [{"from": "gpt", "value": "5"}]}
    ((row),), _ = load(as_lines([pair]), method="dpo")
    assert row["prompt"] == STANDARD[:1]
    assert row["chosen"] == STANDARD[1:]
    (row,), _ = load(as_lines([{"conversations": STANDARD}]))
    assert row == {"messages": STANDARD}
    (row,), _ = load(as_lines([{"messages": STANDARD, "conversations": SHARED[:1]}]))
    assert row == {"messages": STANDARD}


# --- mixtures --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("store", [as_parquet, as_saved])
@pytest.mark.parametrize("streaming", [False, True])
def test_data_sets_of_unlike_form_become_conversations(store: Callable[[Any], str], streaming: bool) -> None:
    write("share.jsonl", lines({"conversations": SHARED, "id": 1}))
    write("chats.jsonl", lines({"messages": STANDARD, "id": "a"}))
    write("pairs.csv", "question,answer\n2+2?,4\n")
    other = store([{"prompt": STANDARD[:1], "completion": STANDARD[1:]}])
    config = mixture(
        {"path": "share.jsonl"},
        {"path": "chats.jsonl"},
        {"path": "pairs.csv", "columns": {"prompt": "question", "completion": "answer"}},
        {"path": other},
        streaming=streaming,
    )
    data, said = load(None, config)
    assert data == [{"messages": STANDARD}] * 4
    assert said[0] == (
        f"'pairs.csv', '{other}': prompts and completions become conversations, like the rest of the mixture; "
        "the loss includes prompts, unless --assistant_only_loss True is given"
    )
    assert said[1].startswith("share.jsonl: ShareGPT messages get the roles of chat templates: ")


@pytest.mark.parametrize("reverse", [False, True])
def test_a_stream_that_is_converted_and_a_file_keep_their_types(reverse: bool) -> None:
    write("share.jsonl", lines({"conversations": SHARED}))
    write("chats.jsonl", lines({"messages": STANDARD}))
    entries = [{"path": "json", "data_files": "share.jsonl"}, {"path": "chats.jsonl"}]
    data, _ = load(None, mixture(*(reversed(entries) if reverse else entries), streaming=True))
    assert data == [{"messages": STANDARD}] * 2


def test_concatenated_streams_have_the_types_that_the_first_one_needs() -> None:
    """Once this fails, `isotype.data.mixture._typed` can go."""
    kinds = datasets.Features({"x": datasets.Json()})
    stored = datasets.Dataset.from_dict({"x": [{"a": 1}]}, features=kinds).to_iterable_dataset()
    both = datasets.concatenate_datasets([stored.map(dict, features=kinds), stored])
    assert [row["x"] for row in both] == [{"a": 1}, '{"a":1}']


def test_messages_of_unlike_keys_fit_together() -> None:
    call = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "f"}}],
    }
    write("a.jsonl", lines({"messages": STANDARD}))
    write("b.jsonl", lines({"messages": [STANDARD[0], call], "tools": "[]"}))
    other = as_parquet([{"messages": [{**turn, "name": "x"} for turn in STANDARD]}])
    data, _ = load(None, mixture({"path": "a.jsonl"}, {"path": "b.jsonl"}, {"path": other}))
    assert data[0]["messages"] == STANDARD
    assert data[1]["messages"][1] == call
    assert [turn["content"] for turn in data[2]["messages"]] == ["2+2?", "4"]


def test_plain_and_spoken_prompts_keep_their_form() -> None:
    write("a.jsonl", lines({"prompt": "2+2?", "completion": "4"}))
    write("b.jsonl", lines({"prompt": STANDARD[:1], "completion": STANDARD[1:]}))
    data, said = load(None, mixture({"path": "a.jsonl"}, {"path": "b.jsonl"}))
    assert data == [{"prompt": STANDARD[:1], "completion": STANDARD[1:]}] * 2
    assert said == ["'a.jsonl': plain prompts and answers become messages, like the rest of the mixture"]


def test_a_mixture_names_file_and_row_of_that_file() -> None:
    write("a.jsonl", lines({"conversations": SHARED}, {"conversations": [{"from": "judge", "value": "a"}]}))
    write("b.jsonl", "\n" + lines({"messages": STANDARD}, {"messages": None}))
    other = as_parquet([{"messages": STANDARD}, {"messages": [{"role": "usr", "content": "a"}, STANDARD[1]]}])
    text = refusal(None, config=mixture({"path": "a.jsonl"}, {"path": "b.jsonl"}, {"path": other}))
    assert "  - a.jsonl, line 2: column 'conversations' holds a message from 'judge'\n" in text
    assert "  - b.jsonl, line 3: column 'messages' is null\n" in text
    assert "  - t.parquet, row 2: column 'messages' holds a message of the role 'usr'\n" in text


def test_text_has_no_turns() -> None:
    write("a.jsonl", lines({"text": "a"}))
    write("b.jsonl", lines({"messages": STANDARD}))
    text = refusal(None, config=mixture({"path": "a.jsonl"}, {"path": "b.jsonl"}))
    assert "  - 'a.jsonl' holds 'text'; 'b.jsonl' holds 'messages'\n" in text


def test_columns_of_an_entry_are_refused_by_its_name() -> None:
    write("a.jsonl", lines({"q": "a", "a": "b"}))
    text = refusal(
        None, config=mixture({"path": "a.jsonl", "columns": {"prompt": "question", "completion": "a"}})
    )
    assert "no column 'question', which `columns` of a.jsonl names" in text
    text = refusal(None, config=mixture({"path": "a.jsonl", "columns": 3}))
    assert "`columns` of a.jsonl: 3\n" in text


def test_shares_of_a_mixture() -> None:
    write("a.jsonl", lines(*({"text": f"a{i}"} for i in range(8))))
    write("b.jsonl", lines(*({"text": f"b{i}"} for i in range(8))))
    config = mixture({"path": "a.jsonl", "fraction": 1}, {"path": "b.jsonl", "fraction": 3})
    data, _ = load(None, config)
    assert [row["text"] for row in data] == ["a0", "a1", "a2", *(f"b{i}" for i in range(8))]


def test_plain_turns_become_messages() -> None:
    data, _ = load(as_lines([{"prompt": "2+2?", "completion": "4"}]), chat=True)
    assert data == [{"prompt": STANDARD[:1], "completion": STANDARD[1:]}]

"""Training data: what is accepted, what comes back, and every message when it is not."""

from __future__ import annotations

import csv
import io
import json
import logging
import tempfile
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isotype.core.errors import DataError
from isotype.data import locate
from isotype.data.locate import looks_like_path
from isotype.data.methods import METHODS
from tests.data.loading import Row, lines, load, mixture, refusal, write

USER = [{"role": "user", "content": "What is 2+2?"}]
ASSISTANT = [{"role": "assistant", "content": "4"}]
OTHER = [{"role": "assistant", "content": "5"}]
CHATML = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
pytestmark = pytest.mark.usefixtures("place")


# --- every format of every method ------------------------------------------------------------------------------

FORMATS: Mapping[str, tuple[dict[str, Any], ...]] = {
    "sft": (
        {"text": "a"},
        {"messages": USER + ASSISTANT},
        {"prompt": "a", "completion": "b"},
        {"prompt": USER, "completion": ASSISTANT},
        {"conversations": [{"from": "user", "value": "a"}, {"from": "assistant", "value": "b"}]},
        {"input_ids": [1, 2, 3]},
        {"input_ids": [1, 2, 3], "labels": [-100, 2, 3]},
        {
            "prompt": USER,
            "completion": ASSISTANT,
            "tools": [{"name": "f"}],
            "chat_template_kwargs": {"t": True},
        },
        {"prompt": USER, "completion": ASSISTANT, "tools": '[{"name": "f"}]'},
        {"prompt": USER, "completion": ASSISTANT, "tools": None},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}, *ASSISTANT]},
        {"messages": [*USER, {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}]},
    ),
    "dpo": (
        {"prompt": "a", "chosen": "b", "rejected": "c"},
        {"prompt": USER, "chosen": ASSISTANT, "rejected": OTHER},
        {"chosen": "ab", "rejected": "ac"},
        {"chosen": USER + ASSISTANT, "rejected": USER + OTHER},
        {"prompt": "a", "chosen": "b", "rejected": "c", "ref_chosen_logps": -1.5, "ref_rejected_logps": -2.5},
    ),
    "reward": (
        {"prompt": "a", "chosen": "b", "rejected": "c"},
        {"chosen": USER + ASSISTANT, "rejected": USER + OTHER, "margin": 0.5},
        {"chosen_ids": [1, 2], "rejected_ids": [1, 3]},
    ),
    "kto": (
        {"prompt": "a", "completion": "b", "label": True},
        {"prompt": USER, "completion": ASSISTANT, "label": False},
        {"prompt": "a", "chosen": "b", "rejected": "c"},
        {"chosen": USER + ASSISTANT, "rejected": USER + OTHER},
    ),
    "grpo": ({"prompt": "a"}, {"prompt": USER}, {"prompt": USER, "answer": 4, "steps": [1.5, 2.0]}),
    "rloo": ({"prompt": "a"}, {"prompt": USER, "solution": "4"}),
}


@pytest.mark.parametrize(
    ("method", "row"), [(method, row) for method, rows in FORMATS.items() for row in rows], ids=str
)
def test_every_format_of_every_method_comes_back_as_written(method: str, row: dict[str, Any]) -> None:
    write("train.jsonl", lines(row, row))
    loaded = load("train.jsonl", method)
    assert isinstance(loaded, datasets.DatasetDict)
    # tests/data/test_sharegpt.py has what becomes of {from, value} messages.
    expected = {"messages": CHATML} if "conversations" in row else row
    assert loaded["train"].to_list() == [expected, expected]


def test_the_formats_cover_the_table() -> None:
    for method, accepted in METHODS.items():
        for item in accepted.formats:
            assert any(set(item.required) <= set(row) for row in FORMATS[method])


def test_the_text_column_may_have_another_name() -> None:
    write("train.jsonl", lines({"body": "a"}))
    assert load("train.jsonl", text_field="body")["train"].to_list() == [{"body": "a"}]


# --- kinds of file ---------------------------------------------------------------------------------------------

ROWS = [
    {"prompt": "ein\nzwei, „drei“ \U0001f600", "completion": "7"},
    {"prompt": "NA", "completion": "2020-01-01"},
]


def separated(rows: list[Row], delimiter: str) -> bytes:
    stream = io.StringIO(newline="")
    writer = csv.DictWriter(stream, rows[0], delimiter=delimiter, quoting=csv.QUOTE_MINIMAL)
    writer.writeheader()
    writer.writerows(rows)
    return stream.getvalue().encode()


def parquet(rows: list[Row]) -> bytes:
    stream = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), stream)
    return stream.getvalue()


WRITERS: dict[str, Callable[[list[Row]], bytes]] = {
    "jsonl": lambda rows: lines(*rows).encode(),
    "json": lambda rows: json.dumps(rows, indent=1).encode(),
    "csv": lambda rows: separated(rows, ","),
    "tsv": lambda rows: separated(rows, "\t"),
    "parquet": parquet,
}


@pytest.mark.parametrize("kind", WRITERS)
def test_each_kind_of_file_keeps_text_as_text(kind: str) -> None:
    write(f"with [brackets]/train.{kind}", WRITERS[kind](ROWS))
    assert load(f"with [brackets]/train.{kind}")["train"].to_list() == ROWS
    assert list(load(f"./with [brackets]/train.{kind}", dataset_streaming=True)["train"]) == ROWS


@pytest.mark.parametrize(
    ("name", "content", "texts"),
    [
        ("a.txt", "\ufeffone\r\n\r\ntwo\n", ["one\n\ntwo\n"]),
        ("a.jsonl", '\ufeff{"text": "a\\r\\nb"}\r\n\r\n   \r\n{"text": "c"}', ["a\r\nb", "c"]),
        ("a.csv", '\ufefftext\r\n"a\r\nb"\r\n\r\nc\r\n', ["a\r\nb", "c"]),
        ("a.json", '\ufeff\r\n[\r\n{"text": "a"}\r\n]\r\n', ["a"]),
        ("long.csv", "text\n" + "x" * 200_000 + "\n", ["x" * 200_000]),
    ],
    ids=["a text", "jsonl", "csv", "json", "long cells"],
)
def test_byte_order_marks_crlf_and_blank_lines(name: str, content: str, texts: list[str]) -> None:
    write(name, content)
    assert load(name)["train"].to_list() == [{"text": text} for text in texts]


def test_csv_columns_beside_the_text_are_typed_by_all_their_rows() -> None:
    write(
        "train.csv",
        ',prompt,whole,real,truth,words,code,none\n0,"1",1,1,true,1,007,\n1,"2",,2.5,False,x,10,\n',
    )
    columns = {
        "Unnamed: 0": [0, 1],
        "prompt": ["1", "2"],
        "whole": [1, None],
        "real": [1.0, 2.5],
        "truth": [True, False],
        "words": ["1", "x"],
        "code": ["007", "10"],
        "none": [None, None],
    }
    assert load("train.csv", "grpo")["train"].to_dict() == columns


def test_objects_with_different_keys_are_not_padded() -> None:
    calls = [
        {"name": "light", "arguments": {"room": "hall"}},
        {"name": "play", "arguments": {"list": "x", "n": 2}},
    ]
    messages = [*USER, {"role": "assistant", "content": None, "tool_calls": calls}, *ASSISTANT]
    rows = [{"messages": USER + ASSISTANT}, {"messages": messages}]
    write("train.jsonl", lines(*rows))
    assert load("train.jsonl")["train"].to_list() == rows


def test_a_changed_file_is_never_served_from_the_cache() -> None:
    write("train.jsonl", lines({"text": "a"}))
    load("train.jsonl")
    write("train.jsonl", lines({"text": "b"}))
    assert load("train.jsonl")["train"]["text"][:] == ["b"]


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)
TURNS = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": TEXTS}),
    min_size=1,
    max_size=3,
)


def rows_of(values: Mapping[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[list[dict[str, Any]]]:
    return st.lists(st.fixed_dictionaries(dict(values)), min_size=1, max_size=5)


PLAIN_KTO = rows_of({"prompt": TEXTS, "completion": TEXTS, "label": st.booleans()})
ANSWERED = TURNS.map(lambda turns: [*turns, *ASSISTANT])
SPOKEN_KTO = rows_of({"prompt": TURNS, "completion": ANSWERED, "label": st.booleans()})


def round_trip(rows: list[Row], kind: str, method: str = "kto") -> list[Row]:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", Path(folder) / "cache")
        file = write(f"{folder}/rows.{kind}", WRITERS[kind](rows))
        return list(load(str(file), method)["train"].to_list())


@pytest.mark.parametrize("kind", WRITERS)
@settings(max_examples=8)
@given(rows=PLAIN_KTO)
def test_any_plain_rows_come_back_equal(kind: str, rows: list[Row]) -> None:
    assert round_trip(rows, kind) == rows


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet"])
@settings(max_examples=8)
@given(rows=SPOKEN_KTO)
def test_any_conversations_come_back_equal(kind: str, rows: list[Row]) -> None:
    assert round_trip(rows, kind) == rows


SCALARS = st.none() | st.booleans() | st.integers(-(2**40), 2**40) | TEXTS
OBJECTS = st.dictionaries(
    st.text("abcdef_", min_size=1, max_size=6),
    st.recursive(
        SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3)
    ),
    max_size=3,
)


@settings(max_examples=12)
@given(rows=rows_of({"prompt": TEXTS, "answer": OBJECTS, "notes": st.lists(OBJECTS, max_size=2)}))
def test_any_objects_in_further_columns_come_back_equal(rows: list[Row]) -> None:
    assert round_trip(rows, "jsonl", "grpo") == rows


# --- where data lies -------------------------------------------------------------------------------------------


A, B, C = (lines({"text": text}) for text in "abc")
# the name, the files, the texts of each split
PLACES: dict[str, tuple[str, dict[str, str | bytes], dict[str, list[str]]]] = {
    "words in file names": (
        "d",
        {
            "d/train-00000-of-00002.jsonl": A,
            "d/train-00001-of-00002.jsonl": B,
            "d/my_eval.jsonl": C,
            "d/extra.jsonl": "not even JSON, but not asked for",
            "d/README.md": "# not data",
            "d/dataset_info.json": "{}",
        },
        {"train": ["a", "b"], "test": ["c"]},
    ),
    "no such words": ("d", {"d/1.json": f"[{A}]", "d/2.jsonl": B}, {"train": ["a", "b"]}),
    "files in folders": (
        "d",
        {"d/data/train-0.jsonl": A, "d/test/0.jsonl": B, "d/.hidden/train.jsonl": C},
        {"train": ["a"], "test": ["b"]},
    ),
    "shards of parquet": (
        "./d",
        {"d/train-0.parquet": parquet([{"text": "a"}]), "d/train-1.parquet": parquet([{"text": "b"}])},
        {"train": ["a", "b"]},
    ),
    "a sibling of the file": (
        "train.jsonl",
        {"train.jsonl": A, "test.csv": "text\nb\n"},
        {"train": ["a"], "test": ["b"]},
    ),
}


@pytest.mark.parametrize("title", PLACES)
def test_the_splits_of_a_place(title: str) -> None:
    name, files, splits = PLACES[title]
    for file, content in files.items():
        write(file, content)
    loaded = load(name, evaluate="test" in splits)
    assert {split: loaded[split]["text"][:] for split in loaded} == splits
    assert set(load(name)) == {"train"}


@pytest.mark.parametrize("streaming", [False, True])
def test_directories_of_save_to_disk(streaming: bool) -> None:
    one, two = datasets.Dataset.from_list([{"text": "a"}]), datasets.Dataset.from_list([{"text": "b"}])
    one.save_to_disk("single")
    datasets.DatasetDict({"train": one, "held": two}).save_to_disk("both")
    loaded = load("single", dataset_streaming=streaming)
    assert list(loaded["train"]) == [{"text": "a"}]
    loaded = load("both", evaluate=True, dataset_test_split="held", dataset_streaming=streaming)
    assert list(loaded["held"]) == [{"text": "b"}]


def test_embedded_data_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    write("shipped/tiny/train.jsonl", A)
    write("shipped/tiny/test.jsonl", B)
    monkeypatch.setattr(locate, "embedded_root", lambda: Path("shipped"))
    loaded = load("embedded:tiny", evaluate=True)
    assert {split: loaded[split]["text"][:] for split in loaded} == {"train": ["a"], "test": ["b"]}


def test_the_data_set_that_ships_in_the_package() -> None:
    loaded = load("embedded:precision_qa", evaluate=True)
    files = locate.embedded_root() / "precision_qa"
    for split in ("train", "test"):
        written = (files / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
        assert loaded[split].to_list() == [json.loads(line) for line in written]
        assert loaded[split].num_rows > 50


@pytest.mark.parametrize(
    "name", ["x.jsonl", "X.CSV", "./x", "../x", "~/x", "/x", "a/b/c", "a/b.xlsx", "a\\b\\c"]
)
def test_names_that_are_paths(name: str) -> None:
    assert looks_like_path(name)


@pytest.mark.parametrize("name", ["imdb", "trl-lib/Capybara", "owner/data-v1.5", "Salesforce/wikitext"])
def test_names_that_are_hub_ids(name: str) -> None:
    assert not looks_like_path(name)


@pytest.mark.parametrize("streaming", [False, True])
def test_what_the_hub_returns_is_checked(monkeypatch: pytest.MonkeyPatch, streaming: bool) -> None:
    rows = [{"prompt": "a", "completion": "b", "label": int(i != 3)} for i in range(5)]
    table = datasets.Dataset.from_list(rows)
    split = table.to_iterable_dataset() if streaming else table
    kind = datasets.IterableDatasetDict if streaming else datasets.DatasetDict
    seen: dict[str, Any] = {}

    def from_hub(path: str, **kwargs: Any) -> Any:
        seen.update(path=path, **kwargs)
        return kind({"train": split, "test": split})

    monkeypatch.setattr(datasets, "load_dataset", from_hub)
    text = refusal("owner/name", "kto", dataset_config="main", dataset_streaming=streaming)
    assert seen == {"path": "owner/name", "name": "main", "streaming": streaming}
    assert text == (
        "The data set 'owner/name' cannot be trained on\n"
        "  - split 'train', rows 1, 2, 3 and 2 more: column 'label' is a number\n"
        "    expected  true or false\n"
        "    fix       write true for a good completion and false for a bad one"
    )
    loaded = load("owner/name", "sft", evaluate=True, dataset_streaming=streaming)
    assert isinstance(loaded, kind)
    assert list(loaded["test"]) == rows


def test_files_of_a_folder_that_are_not_read_are_named() -> None:
    row = '{"text": "a"}'
    for name in ("d/train.jsonl", "d/extra.jsonl", "d/test.jsonl", "d/more/train.jsonl"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        write(name, row)
    said: list[str] = []
    load("d", said=said)
    assert said == ["d: not read: extra.jsonl, test.jsonl, more/train.jsonl"]
    load("d/train.jsonl", said=said)
    load("d", evaluate=True, said=said)
    assert said[1:] == ["d: not read: extra.jsonl, more/train.jsonl"]


def test_an_empty_row_behind_the_sample_is_named() -> None:
    """TRL raised KeyError: 'text' for null, and trained on the empty answer."""
    for last in (None, ""):
        table = pyarrow.table({"prompt": ["a"] * 1500, "completion": ["b"] * 1499 + [last]})
        pyarrow.parquet.write_table(table, "t.parquet")
        assert "t.parquet, row 1500: column 'completion' is" in refusal("t.parquet")
    assert len(load("t.parquet", "grpo")["train"]) == 1500


@pytest.mark.parametrize(
    ("chat", "problem"),
    [
        ([*USER, {"role": "asistant", "content": "4"}], "holds a message of the role 'asistant'"),
        ([*USER, {"role": None, "content": "4"}], "holds a message without 'role'"),
        (USER, "holds no message of the assistant"),
        ([{"role": "user", "content": None}, *ASSISTANT], "holds a message without 'content'"),
    ],
)
def test_a_faulty_chat_behind_the_sample_is_named(chat: list[Row], problem: str) -> None:
    rows = [[*USER, *ASSISTANT]] * 1499
    pyarrow.parquet.write_table(pyarrow.table({"messages": [*rows, chat]}), "t.parquet")
    assert f"t.parquet, row 1500: column 'messages' {problem}" in refusal("t.parquet")
    if chat is USER:
        pyarrow.parquet.write_table(pyarrow.table({"talk": [*rows, chat]}), "t.parquet")
        assert "t.parquet, row 1500: column 'messages'" in refusal("t.parquet", columns="messages=talk")


def test_sound_chats_behind_the_sample_are_loaded() -> None:
    rows = [[*USER, *ASSISTANT]] * 1499
    pyarrow.parquet.write_table(pyarrow.table({"messages": rows}), "t.parquet")
    assert len(load("t.parquet")["train"]) == 1499


def test_values_that_json_does_not_have_are_kept() -> None:
    """A date in a message ended with KeyError."""
    when = datetime(2024, 5, 1)
    row = {"talk": [{**turn, "sent": when} for turn in CHATML], "label": when}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row] * 2), "t.parquet")
    rows = load("t.parquet", columns="messages=talk")["train"]
    assert rows["label"][:] == [when] * 2
    assert [turn["content"] for turn in rows[0]["messages"]] == ["a", "b"]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_column_of_the_data_is_not_replaced(kind: str) -> None:
    rows: list[Row] = [{"prompt": "a", "q": "b", "completion": "c"}]
    write(f"t.{kind}", WRITERS[kind](rows))
    assert (
        "--columns renames 'q' to 'prompt', but the data has another column 'prompt'\n"
        "    expected  different names for the columns\n"
        "    fix       to keep both, also rename the column of the data: add other=prompt; to train on the data's 'prompt', remove prompt=q"
    ) in refusal(f"t.{kind}", columns="prompt=q")
    row = {"prompt": "b", "other": "a", "completion": "c"}
    assert load(f"t.{kind}", columns="prompt=q,other=prompt")["train"][0] == row
    with pytest.raises(DataError, match="two columns would become one"):
        load(f"t.{kind}", columns="prompt=q,prompt=prompt")


def test_pairs_need_the_same_first_message() -> None:
    """TRL ended with "Cannot apply chat template to an empty conversation"."""
    write("t.jsonl", lines({"chosen": CHATML, "rejected": [{"role": "user", "content": "c"}, *ASSISTANT]}))
    for method in ("dpo", "kto"):
        assert "line 1: 'chosen' and 'rejected' begin with different messages" in refusal("t.jsonl", method)


def test_the_answers_of_pairs_with_a_prompt_may_differ() -> None:
    """Also if the method reads other columns: the only problem is then the method."""
    answers = {"chosen": ASSISTANT, "rejected": [{"role": "assistant", "content": "other"}]}
    write("t.jsonl", lines({"prompt": [{"role": "user", "content": "c"}], **answers}))
    message = refusal("t.jsonl", "sft")
    assert "these columns fit isotype dpo" in message
    assert "begin with different messages" not in message
    assert len(load("t.jsonl", "reward")["train"]) == 1


def test_a_key_that_occurs_twice_is_refused() -> None:
    write("t.jsonl", '{"text": "a", "text": "b"}')
    assert "t.jsonl, line 1: not JSON: the key 'text' occurs twice in an object" in refusal("t.jsonl")


def test_a_prompt_that_is_a_list_of_texts_is_refused() -> None:
    """The line about captions called `.get` of a text."""
    write("t.jsonl", '{"prompt": ["a"], "completion": ["b"]}')
    assert "column 'prompt' holds text where a message belongs" in refusal("t.jsonl")


def test_a_format_is_no_data_set() -> None:
    """`datasets` reads every JSON file below the working folder, such as the model's config."""
    write("train.jsonl", '{"text": "a"}')
    assert "'json' is a format of `datasets`" in refusal("json")


def test_a_hub_data_set_that_does_not_load(monkeypatch: pytest.MonkeyPatch) -> None:
    def from_hub(path: str, **kwargs: Any) -> Any:
        raise ValueError("Config name is missing.\nPlease pick one among: ['main']")

    monkeypatch.setattr(datasets, "load_dataset", from_hub)
    assert refusal("owner/name").splitlines()[1:] == [
        "  - 'owner/name' is no file or directory on this machine, and the hub data set cannot be loaded: Config name is missing.",
        "    expected  a hub data set of plain data files",
        "    fix       check the spelling, the configuration, the split and your access to the data set, or name a local file",
    ]


@pytest.mark.parametrize("name", ["t.jsonl", "t.parquet"])
def test_a_file_that_may_not_be_read(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write(name, "{}")

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise PermissionError(13, "Permission denied", name)

    monkeypatch.setattr(Path, "open", refuse)
    assert refusal(name).splitlines()[1:] == [
        f"  - {name}: cannot be read: Permission denied",
        "    expected  a file that you are allowed to read",
        "    fix       check its permissions",
    ]


def test_parquet_cut_in_the_middle() -> None:
    whole = parquet([{"text": str(i) * 100} for i in range(1000)])
    write("t.parquet", whole[:500] + bytes(500) + whole[1000:])
    text = refusal("t.parquet")
    assert "\n  - t.parquet: " in text
    assert text.endswith(
        "    expected  parquet files that can be read as one table\n"
        "    fix       write the files with the same columns and types, or name a single file"
    )


def test_every_problem_of_every_split_at_once_and_at_most_ten() -> None:
    write("d/train.jsonl", lines({"text": "a"}, *[{"text": "a", f"x{i}": 1} for i in range(8)]))
    write("d/test.jsonl", lines({"text": "a"}, *[{"text": "a", f"y{i}": 1} for i in range(5)]))
    text = refusal("d", evaluate=True)
    assert text.count("  - ") == 10
    assert "  - test.jsonl, line 3: the row adds 'y1'\n" in text
    assert "y2" not in text
    assert text.endswith("\n  = 3 more problems not shown")


# --- mixtures --------------------------------------------------------------------------------------------------


def test_a_mixture_of_local_files_goes_through_trl() -> None:
    write("a.jsonl", lines(*[{"text": f"a{i}", "prompt": "unused"} for i in range(4)]))
    write("b.csv", "text\n2020-01-01\n7\n")
    write("d/train.jsonl", lines({"text": "t"}))
    write("d/test.jsonl", lines({"text": "u"}))
    write("p.parquet", parquet([{"text": "p"}]))
    config = mixture(
        {"path": "a.jsonl", "columns": ["text"], "split": "train[:2]"},
        {"path": "b.csv"},
        {"path": "d", "split": "train+test"},
        {"path": "p.parquet"},
    )
    loaded = load(None, config=config)
    assert loaded["train"]["text"][:] == ["a0", "a1", "2020-01-01", "7", "t", "u", "p"]
    assert config.datasets[0].path == "a.jsonl"
    config = mixture({"path": "a.jsonl", "columns": ["text"]}, test_split_size=0.25)
    split = load(None, config=config, evaluate=True)
    assert (split["train"].num_rows, split["test"].num_rows) == (3, 1)


def test_a_mixture_wins_over_a_name_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    write("a.jsonl", lines({"text": "a"}))
    with caplog.at_level(logging.WARNING, "isotype.data.load"):
        loaded = load("b.jsonl", config=mixture({"path": "a.jsonl"}))
    assert loaded["train"]["text"][:] == ["a"]
    said = "Both `datasets` and `dataset_name` are given: `datasets` is used, dataset_name 'b.jsonl' is not."
    assert [record.getMessage() for record in caplog.records] == [said]


# --- import ----------------------------------------------------------------------------------------------------


def test_importing_loads_no_library() -> None:
    import subprocess
    import sys

    code = (
        "import sys, isotype.data.load\n"
        "print([m for m in ('datasets', 'trl', 'transformers', 'peft', 'pyarrow') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_masks_beside_token_ids_become_labels(kind: str, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    row = {"input_ids": [0, 7, 8, 9, 0], "loss_mask": [1, 0, 1, 1, 1], "completion_mask": [0, 0, 0, 1, 1]}
    write(f"t.{kind}", WRITERS[kind]([{**row, "attention_mask": [0, 1, 1, 1, 0]}]))
    labels = {False: [-100, -100, 9], True: [-100, 8, 9]}
    for prompts, expected in labels.items():
        taken = load(f"t.{kind}", prompts=prompts)["train"].to_list()
        assert taken == [{"input_ids": [7, 8, 9], "labels": expected}]


def test_a_text_is_one_example_and_its_lines_on_request() -> None:
    write("book.txt", "one\n\n two\n")
    said: list[str] = []
    assert load("book.txt", said=said)["train"].to_list() == [{"text": "one\n\n two\n"}]
    assert load("book.txt", lines=True, said=said)["train"].to_list() == [{"text": "one"}, {"text": " two"}]
    assert said == [
        "book.txt: each file is one example, which is cut to max_length; --packing True "
        "--packing_strategy bfd_split trains on whole files, and --text_lines True trains on single lines",
        "book.txt: each line is an example and gets an end token",
    ]


def test_what_nothing_reads_is_said_with_its_name_and_number() -> None:
    part = {"type": "text", "text": "a", "cache_control": {"type": "x"}}
    turns = [
        {"role": "user", "content": [part], "date": "now"},
        {"role": "assistant", "content": [{"type": "text", "text": "4"}], "weight": 1},
    ]
    row = {"messages": turns, "id": 7, "source": None, "tools": None}
    for kind in ("jsonl", "parquet"):
        said: list[str] = []
        write(f"t.{kind}", WRITERS[kind]([row, {**row, "id": 8}]))
        load(f"t.{kind}", said=said)
        columns = "'id' of 2 rows" if kind == "jsonl" else "'id' of 2 rows, 'source' of 2 rows"
        assert said == [
            f"t.{kind}: unused: {columns}; used only if the chat template reads the keys: "
            "'date' of 2 messages, 'cache_control' of 2 parts"
        ]
    said = []
    write("t.jsonl", lines({"prompt": "a", "x": 1}))
    load("t.jsonl", "grpo", said=said)  # whose reward functions get every column
    assert said == []

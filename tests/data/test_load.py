"""Training data: what is accepted, what comes back, and every message when it is not."""

from __future__ import annotations

import csv
import io
import json
import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isotype.core.errors import DataError
from isotype.data import locate
from isotype.data.load import load_training_data
from isotype.data.locate import looks_like_path
from isotype.data.methods import METHODS

USER = [{"role": "user", "content": "What is 2+2?"}]
ASSISTANT = [{"role": "assistant", "content": "4"}]
OTHER = [{"role": "assistant", "content": "5"}]
CHATML = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
HEADLINE = "The data set '{}' cannot be trained on\n"


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty working directory, and a cache of its own for `datasets`."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / ".cache")
    datasets.disable_progress_bars()
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    datasets.enable_progress_bars()


def arguments(name: str | None, **changes: Any) -> SimpleNamespace:
    plain = {
        "dataset_name": name,
        "dataset_config": None,
        "dataset_train_split": "train",
        "dataset_test_split": "test",
        "dataset_streaming": False,
    }
    return SimpleNamespace(**{**plain, **changes})


def load(
    name: str | None, method: str = "sft", need_test: bool = False, text_field: str = "text", **changes: Any
) -> Any:
    script_args = arguments(name, **changes)
    return load_training_data(script_args, None, method, need_test=need_test, text_field=text_field)


def refusal(name: str | None, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(DataError) as caught:
        load(name, *args, **kwargs)
    return str(caught.value)


def problem(given: str, expected: str, fix: str) -> str:
    return f"  - {given}\n    expected  {expected}\n    fix       {fix}"


def lines(*rows: object) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def write(path: str, content: str | bytes) -> Path:
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    return file


# --- every format of every method ------------------------------------------------------------------------------

FORMATS: Mapping[str, tuple[dict[str, Any], ...]] = {
    "sft": (
        {"text": "a"},
        {"messages": USER + ASSISTANT},
        {"prompt": "a", "completion": "b"},
        {"prompt": USER, "completion": ASSISTANT},
        {"conversations": [{"from": "user", "value": "a"}, {"from": "assistant", "value": "b"}]},
        {"input_ids": [1, 2, 3]},
        {"input_ids": [1, 2, 3], "labels": [-100, 2, 3], "completion_mask": [0, 1, 1]},
        {
            "prompt": USER,
            "completion": ASSISTANT,
            "tools": [{"name": "f"}],
            "chat_template_kwargs": {"t": True},
        },
        {"prompt": USER, "completion": ASSISTANT, "tools": '[{"name": "f"}]'},
        {"prompt": USER, "completion": ASSISTANT, "tools": None},
        {"messages": USER + ASSISTANT, "images": ["a.png"]},
        {
            "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}, *ASSISTANT],
            "image": "a.png",
        },
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
    assert refusal("train.jsonl") == HEADLINE.format("train.jsonl") + problem(
        "train.jsonl: the columns are 'body'",
        "for sft: 'input_ids', or 'prompt' + 'completion', or 'messages', or 'conversations', or 'text'",
        "rename 'body' to 'text': dataset.rename_columns({'body': 'text'})",
    )


# --- kinds of file ---------------------------------------------------------------------------------------------

ROWS = [
    {"prompt": "ein\nzwei, „drei“ \U0001f600", "completion": "7"},
    {"prompt": "NA", "completion": "2020-01-01"},
]


def as_jsonl(rows: list[dict[str, Any]], file: Path) -> None:
    file.write_text(lines(*rows), encoding="utf-8")


def as_json(rows: list[dict[str, Any]], file: Path) -> None:
    file.write_text(json.dumps(rows, indent=1), encoding="utf-8")


def as_csv(rows: list[dict[str, Any]], file: Path, delimiter: str = ",") -> None:
    with file.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, rows[0], delimiter=delimiter, quoting=csv.QUOTE_MINIMAL)
        writer.writeheader()
        writer.writerows(rows)


def as_tsv(rows: list[dict[str, Any]], file: Path) -> None:
    as_csv(rows, file, "\t")


def as_parquet(rows: list[dict[str, Any]], file: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)


WRITERS: dict[str, Callable[[list[dict[str, Any]], Path], None]] = {
    "jsonl": as_jsonl,
    "json": as_json,
    "csv": as_csv,
    "tsv": as_tsv,
    "parquet": as_parquet,
}


@pytest.mark.parametrize("kind", WRITERS)
def test_each_kind_of_file_keeps_text_as_text(kind: str, place: Path) -> None:
    folder = place / "with [brackets]"
    folder.mkdir()
    WRITERS[kind](ROWS, folder / f"train.{kind}")
    assert load(f"with [brackets]/train.{kind}")["train"].to_list() == ROWS
    assert list(load(f"./with [brackets]/train.{kind}", dataset_streaming=True)["train"]) == ROWS


def test_plain_text_is_one_text_per_line_and_blank_lines_separate() -> None:
    write("train.txt", "one\r\n\r\ntwo\n")
    assert load("train.txt")["train"].to_list() == [{"text": "one"}, {"text": "two"}]


def test_byte_order_mark_crlf_and_blank_lines_are_accepted() -> None:
    write("a.jsonl", b'\xef\xbb\xbf{"text": "a\\r\\nb"}\r\n\r\n   \r\n{"text": "c"}')
    assert load("a.jsonl")["train"]["text"][:] == ["a\r\nb", "c"]
    write("b.csv", b'\xef\xbb\xbftext\r\n"a\r\nb"\r\n\r\nc\r\n')
    assert load("b.csv")["train"]["text"][:] == ["a\r\nb", "c"]
    write("c.json", b'\xef\xbb\xbf\r\n[\r\n{"text": "a"}\r\n]\r\n')
    assert load("c.json")["train"]["text"][:] == ["a"]


def test_csv_columns_beside_the_text_are_typed_by_all_their_rows() -> None:
    head = ",prompt,whole,real,truth,words,code,none"
    write("train.csv", f'{head}\n0,"1",1,1,true,1,007,\n1,"2",,2.5,False,x,10,\n')
    loaded = load("train.csv", "grpo")["train"]
    assert loaded.to_list() == [
        {
            "Unnamed: 0": 0,
            "prompt": "1",
            "whole": 1,
            "real": 1.0,
            "truth": True,
            "words": "1",
            "code": "007",
            "none": None,
        },
        {
            "Unnamed: 0": 1,
            "prompt": "2",
            "whole": None,
            "real": 2.5,
            "truth": False,
            "words": "x",
            "code": "10",
            "none": None,
        },
    ]


def test_long_csv_cells_are_read() -> None:
    write("train.csv", "text\n" + "x" * 200_000 + "\n")
    assert len(load("train.csv")["train"][0]["text"]) == 200_000


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


def round_trip(rows: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"rows.{kind}"
        WRITERS[kind](rows, file)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(datasets.config, "HF_DATASETS_CACHE", Path(folder) / "cache")
            return list(load(str(file), "kto")["train"].to_list())


@pytest.mark.parametrize("kind", WRITERS)
@settings(max_examples=25, deadline=None)
@given(rows=PLAIN_KTO)
def test_any_plain_rows_come_back_equal(kind: str, rows: list[dict[str, Any]]) -> None:
    assert round_trip(rows, kind) == rows


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet"])
@settings(max_examples=25, deadline=None)
@given(rows=SPOKEN_KTO)
def test_any_conversations_come_back_equal(kind: str, rows: list[dict[str, Any]]) -> None:
    assert round_trip(rows, kind) == rows


SCALARS = st.none() | st.booleans() | st.integers(-(2**40), 2**40) | TEXTS
OBJECTS = st.dictionaries(
    st.text("abcdef_", min_size=1, max_size=6),
    st.recursive(
        SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3)
    ),
    max_size=3,
)


@settings(max_examples=50, deadline=None)
@given(rows=rows_of({"prompt": TEXTS, "answer": OBJECTS, "notes": st.lists(OBJECTS, max_size=2)}))
def test_any_objects_in_further_columns_come_back_equal(rows: list[dict[str, Any]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.jsonl"
        as_jsonl(rows, file)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(datasets.config, "HF_DATASETS_CACHE", Path(folder) / "cache")
            assert load(str(file), "grpo")["train"].to_list() == rows


# --- where data lies -------------------------------------------------------------------------------------------


def test_directory_splits_by_the_words_in_file_names() -> None:
    write("d/train-00000-of-00002.jsonl", lines({"text": "a"}))
    write("d/train-00001-of-00002.jsonl", lines({"text": "b"}))
    write("d/my_eval.jsonl", lines({"text": "c"}))
    write("d/extra.jsonl", "not even JSON, but not asked for")
    write("d/README.md", "# not data")
    write("d/dataset_info.json", "{}")
    loaded = load("d", need_test=True)
    assert {split: loaded[split]["text"][:] for split in loaded} == {"train": ["a", "b"], "test": ["c"]}
    assert set(load("d")) == {"train"}


def test_directory_without_split_words_is_all_for_training() -> None:
    write("d/1.json", '[{"text": "a"}]')
    write("d/2.jsonl", lines({"text": "b"}))
    assert load("d")["train"]["text"][:] == ["a", "b"]


def test_directory_with_its_files_in_folders() -> None:
    write("d/data/train-0.jsonl", lines({"text": "a"}))
    write("d/test/0.jsonl", lines({"text": "b"}))
    write("d/.hidden/train.jsonl", lines({"text": "c"}))
    loaded = load("d", need_test=True)
    assert {split: loaded[split]["text"][:] for split in loaded} == {"train": ["a"], "test": ["b"]}


def test_directory_of_parquet_shards() -> None:
    Path("d").mkdir()
    as_parquet([{"text": "a"}], Path("d/train-0.parquet"))
    as_parquet([{"text": "b"}], Path("d/train-1.parquet"))
    assert load("./d")["train"]["text"][:] == ["a", "b"]


@pytest.mark.parametrize("streaming", [False, True])
def test_directories_of_save_to_disk(streaming: bool) -> None:
    one, two = datasets.Dataset.from_list([{"text": "a"}]), datasets.Dataset.from_list([{"text": "b"}])
    one.save_to_disk("single")
    datasets.DatasetDict({"train": one, "held": two}).save_to_disk("both")
    loaded = load("single", dataset_streaming=streaming)
    assert list(loaded["train"]) == [{"text": "a"}]
    loaded = load("both", need_test=True, dataset_test_split="held", dataset_streaming=streaming)
    assert list(loaded["held"]) == [{"text": "b"}]


def test_a_damaged_save_to_disk_directory() -> None:
    datasets.Dataset.from_list([{"text": "a"}]).save_to_disk("single")
    write("single/state.json", "{")
    assert refusal("single") == HEADLINE.format("single") + problem(
        "split 'train': the directory 'single' cannot be read: Expecting property name enclosed in double quotes: "
        "line 1 column 2 (char 1)",
        "what save_to_disk wrote, whole",
        "save it again with save_to_disk",
    )


def test_the_sibling_of_a_single_file_is_its_test_split() -> None:
    write("train.jsonl", lines({"text": "a"}))
    write("test.csv", "text\nb\n")
    loaded = load("train.jsonl", need_test=True)
    assert {split: loaded[split]["text"][:] for split in loaded} == {"train": ["a"], "test": ["b"]}
    assert set(load("train.jsonl")) == {"train"}


def test_no_test_split() -> None:
    write("train.jsonl", lines({"text": "a"}))
    assert refusal("train.jsonl", need_test=True) == HEADLINE.format("train.jsonl") + problem(
        "'train.jsonl' has no split 'test'; its splits are 'train'",
        "a split to evaluate on, since evaluation is on",
        "--dataset_test_split NAME with one of its splits, or --eval_strategy no",
    )


def test_no_train_split() -> None:
    write("d/training.jsonl", lines({"text": "a"}))
    write("d/dev.jsonl", lines({"text": "a"}))
    assert refusal("d", dataset_train_split="trian") == HEADLINE.format("d") + problem(
        "'d' has no split 'trian'; its splits are 'train', 'validation'",
        "the split to train on",
        "--dataset_train_split train",
    )


def test_embedded_data_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    write("shipped/tiny/train.jsonl", lines({"text": "a"}))
    write("shipped/tiny/test.jsonl", lines({"text": "b"}))
    monkeypatch.setattr(locate, "embedded_root", lambda: Path("shipped"))
    loaded = load("embedded:tiny", need_test=True)
    assert {split: loaded[split]["text"][:] for split in loaded} == {"train": ["a"], "test": ["b"]}
    assert refusal("embedded:tyni") == HEADLINE.format("embedded:tyni") + problem(
        "no embedded data set is called 'tyni'", "one of 'tiny'", "--dataset_name embedded:tiny"
    )


def test_the_data_set_that_ships_in_the_package() -> None:
    loaded = load("embedded:precision_qa", need_test=True)
    files = locate.embedded_root() / "precision_qa"
    for split in ("train", "test"):
        written = (files / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
        assert loaded[split].to_list() == [json.loads(line) for line in written]
        assert loaded[split].num_rows > 50


def test_missing_files() -> None:
    write("data/train.jsonl", lines({"text": "a"}))
    assert refusal("data/trian.jsonl") == HEADLINE.format("data/trian.jsonl") + problem(
        "there is no file or directory 'data/trian.jsonl'",
        "a file or directory that exists",
        "did you mean 'data/train.jsonl'?",
    )
    assert refusal("data/qqq.parquet") == HEADLINE.format("data/qqq.parquet") + problem(
        "there is no file or directory 'data/qqq.parquet'",
        "a file or directory that exists",
        "'data' holds 'train.jsonl'",
    )
    assert refusal("/nowhere/at/all") == HEADLINE.format("/nowhere/at/all") + problem(
        "there is no file or directory '/nowhere/at/all'",
        "a file or directory that exists",
        "'/nowhere/at' does not exist either: see from where the path starts",
    )


@pytest.mark.parametrize(
    "name", ["x.jsonl", "X.CSV", "./x", "../x", "~/x", "/x", "a/b/c", "a/b.xlsx", "a\\b\\c"]
)
def test_names_that_are_paths(name: str) -> None:
    assert looks_like_path(name)


@pytest.mark.parametrize("name", ["imdb", "trl-lib/Capybara", "owner/data-v1.5", "Salesforce/wikitext"])
def test_names_that_are_hub_ids(name: str) -> None:
    assert not looks_like_path(name)


def test_unsupported_and_empty_places() -> None:
    accepted = ".json, .jsonl, .ndjson, .csv, .tsv, .txt, .parquet"
    write("train.xlsx", b"PK")
    write("train.jsonl.gz", b"\x1f\x8b")
    assert refusal("train.xlsx") == HEADLINE.format("train.xlsx") + problem(
        "'train.xlsx' is not a kind of file that is read",
        f"a file ending in {accepted}",
        "convert it to JSON lines or parquet",
    )
    assert refusal("train.jsonl.gz") == HEADLINE.format("train.jsonl.gz") + problem(
        "'train.jsonl.gz' is not a kind of file that is read",
        f"a file ending in {accepted}",
        "unpack it first",
    )
    Path("bare").mkdir()
    write("pictures/a.png", b"\x89PNG")
    expected = f"files ending in {accepted}, or what save_to_disk wrote"
    assert refusal("bare") == HEADLINE.format("bare") + problem(
        "the directory 'bare' holds no data", expected, "the directory is empty"
    )
    assert refusal("pictures") == HEADLINE.format("pictures") + problem(
        "the directory 'pictures' holds no data",
        expected,
        "name a directory with such files; this one holds 'a.png'",
    )


def test_files_of_two_kinds_in_one_split() -> None:
    write("d/train-0.jsonl", lines({"text": "a"}))
    write("d/train-1.csv", "text\nb\n")
    assert refusal("d") == HEADLINE.format("d") + problem(
        "split 'train' of 'd' is made of 'train-0.jsonl', 'train-1.csv'",
        "files of one kind in a split",
        "keep one kind, or name a single file",
    )


def test_nothing_named() -> None:
    assert refusal(None) == "No training data is named\n" + problem(
        "neither --dataset_name nor `datasets` in a configuration file",
        "a local file or directory, a hub id, or embedded:NAME",
        "--dataset_name train.jsonl",
    )


def test_a_configuration_of_a_local_file() -> None:
    write("train.jsonl", lines({"text": "a"}))
    assert refusal("train.jsonl", dataset_config="main") == HEADLINE.format("train.jsonl") + problem(
        "--dataset_config 'main' with the local data set 'train.jsonl'",
        "a configuration only with a hub data set",
        "name the file or the folder itself in --dataset_name",
    )


def test_the_hub_is_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    assert refusal("owner/name") == HEADLINE.format("owner/name") + problem(
        "'owner/name' is no file or directory here, and the hub could not be reached: "
        "Couldn't reach 'owner/name' on the Hub (OfflineModeIsEnabled)",
        "a network connection, or data on this machine",
        "name a local file or directory (--dataset_name ./train.jsonl) or embedded:precision_qa",
    )


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
    assert text == HEADLINE.format("owner/name") + problem(
        "split 'train', rows 1, 2, 3 and 2 more: column 'label' is a number",
        "true or false",
        "write true for a good completion and false for a bad one",
    )
    loaded = load("owner/name", "sft", need_test=True, dataset_streaming=streaming)
    assert isinstance(loaded, kind)
    assert list(loaded["test"]) == rows


def test_a_hub_data_set_that_does_not_load(monkeypatch: pytest.MonkeyPatch) -> None:
    def from_hub(path: str, **kwargs: Any) -> Any:
        raise ValueError("Config name is missing.\nPlease pick one among: ['main']")

    monkeypatch.setattr(datasets, "load_dataset", from_hub)
    assert refusal("owner/name") == HEADLINE.format("owner/name") + problem(
        "'owner/name' is no file or directory here, and the hub data set cannot be loaded: Config name is missing.",
        "a hub data set of plain data files",
        "see the spelling, --dataset_config and your access to it, or name a local file",
    )


# --- what is wrong inside a file -------------------------------------------------------------------------------

REFILL = "fill it in, or remove the example"
FIX_LINE = "fix the line, or write the file with a JSON library"
SFT = "for sft: 'input_ids', or 'prompt' + 'completion', or 'messages', or 'conversations', or 'text'"
TURN = "text, or a list of {role, content} messages"
TURN_FIX = 'write "…", or [{"role": "user", "content": "…"}, …]'
MESSAGES = "a list of {role, content} messages"
MESSAGES_FIX = 'write [{"role": "user", "content": "…"}, …]; a CSV cell cannot hold a list, a JSON line can'

# name of the file, method, content, (given, expected, fix) of each problem
BROKEN: dict[str, tuple[str, str, str | bytes, tuple[tuple[str, str, str], ...]]] = {
    "empty file": (
        "t.jsonl",
        "sft",
        "",
        (("'t.jsonl': there are no examples", "at least one example", "write examples to it"),),
    ),
    "empty array": (
        "t.json",
        "sft",
        " [ ] \n",
        (("'t.json': there are no examples", "at least one example", "write examples to it"),),
    ),
    "header only": (
        "t.csv",
        "sft",
        "text\n",
        (("'t.csv': there are no examples", "at least one example", "write examples to it"),),
    ),
    "not JSON": (
        "t.jsonl",
        "sft",
        lines(*[{"text": "a"}] * 16) + '{"text": "a" "b"}\n',
        (
            (
                't.jsonl, line 17: not JSON at column 14: \'{"text": "a" "b"}\'',
                "one JSON object per line (the parser says: Expecting ',' delimiter)",
                FIX_LINE,
            ),
        ),
    ),
    "a long line is cut": (
        "t.jsonl",
        "sft",
        lines({"text": "a"}) + '{"text": "' + "x" * 100 + '", ' + "y" * 100,
        (
            (
                f"t.jsonl, line 2: not JSON at column 114: '…{'x' * 17}\", {'y' * 20}…'",
                "one JSON object per line (the parser says: Expecting property name enclosed in double quotes)",
                FIX_LINE,
            ),
        ),
    ),
    "NaN is not JSON": (
        "t.jsonl",
        "grpo",
        '{"prompt": "a", "x": NaN}\n',
        (("t.jsonl, line 1: not JSON: NaN is not a JSON value", "one JSON object per line", FIX_LINE),),
    ),
    "nested too deeply": (
        "t.jsonl",
        "grpo",
        '{"prompt": "a", "x": ' + "[" * 100_000 + "\n",
        (
            (
                "t.jsonl, line 1: not JSON: its lists or objects are nested too deeply",
                "one JSON object per line",
                FIX_LINE,
            ),
        ),
    ),
    "an object over several lines": (
        "t.jsonl",
        "sft",
        json.dumps({"text": "a", "more": 1}, indent=2),
        (
            (
                "t.jsonl, line 1: the object goes on over several lines",
                "one JSON object per line",
                "write each object on one line, or all of them in one array: [{…}, {…}]",
            ),
        ),
    ),
    "array without a comma": (
        "t.json",
        "sft",
        '[\n {"text": "a"}\n {"text": "b"}\n]',
        (
            (
                't.json, line 3: not JSON at column 2: \' {"text": "b"}\'',
                "an array of JSON objects (the parser says: Expecting ',' or ']')",
                FIX_LINE,
            ),
        ),
    ),
    "array with something behind it": (
        "t.json",
        "sft",
        '[{"text": "a"}]\nx',
        (
            (
                "t.json, line 2: not JSON at column 1: 'x'",
                "an array of JSON objects (the parser says: Extra data)",
                FIX_LINE,
            ),
        ),
    ),
    "array cut off": (
        "t.json",
        "sft",
        '[{"text": "a"},\n{"text"',
        (
            (
                "t.json, line 2: not JSON at column 8: '{\"text\"'",
                "an array of JSON objects (the parser says: Expecting ':' delimiter)",
                FIX_LINE,
            ),
        ),
    ),
    "rows that are no objects": (
        "t.jsonl",
        "sft",
        lines({"text": "a"}, "b", 3, ["c"], None, "d"),
        (
            (
                "t.jsonl, lines 2 and 6: the row is text",
                "a JSON object",
                'write {"column": value, …}',
            ),
            ("t.jsonl, line 3: the row is a number", "a JSON object", 'write {"column": value, …}'),
            ("t.jsonl, line 4: the row is a list", "a JSON object", 'write {"column": value, …}'),
            ("t.jsonl, line 5: the row is null", "a JSON object", 'write {"column": value, …}'),
        ),
    ),
    "rows of an array that are no objects": (
        "t.json",
        "sft",
        '["a",\n"b"]',
        (("t.json, lines 1 and 2: the row is text", "a JSON object", 'write {"column": value, …}'),),
    ),
    "columns that differ": (
        "t.jsonl",
        "dpo",
        lines(
            {"prompt": "a", "chosen": "b", "rejected": "c"},
            {"prompt": "a", "chosen": "b"},
            {"prompt": "a", "chosen": "b", "reject": "c"},
        ),
        (
            (
                "t.jsonl, line 2: the row lacks 'rejected'",
                "the columns of line 1: 'prompt', 'chosen', 'rejected'",
                "give every row the same columns; write null where an optional one has no value",
            ),
            (
                "t.jsonl, line 3: the row lacks 'rejected' and adds 'reject'",
                "the columns of line 1: 'prompt', 'chosen', 'rejected'",
                "give every row the same columns; write null where an optional one has no value",
            ),
        ),
    ),
    "columns under other names": (
        "t.jsonl",
        "sft",
        lines({"instruction": "a", "output": "b"}),
        (
            (
                "t.jsonl: the columns are 'instruction', 'output'",
                SFT,
                "rename 'instruction' to 'prompt' and 'output' to 'completion': "
                "dataset.rename_columns({'instruction': 'prompt', 'output': 'completion'})",
            ),
        ),
    ),
    "instruction, input and output": (
        "t.jsonl",
        "sft",
        lines({"instruction": "a", "input": "", "output": "b"}),
        (
            (
                "t.jsonl: the columns are 'instruction', 'input', 'output'",
                SFT,
                "rename 'instruction' to 'prompt' and 'output' to 'completion': "
                "dataset.rename_columns({'instruction': 'prompt', 'output': 'completion'}); "
                "join 'instruction' and 'input' first, or 'input' is lost",
            ),
        ),
    ),
    "one column under another name": (
        "t.jsonl",
        "grpo",
        lines({"question": "a", "answer": "b"}),
        (
            (
                "t.jsonl: the columns are 'question', 'answer'",
                "for grpo: 'prompt'",
                "rename 'question' to 'prompt': dataset.rename_columns({'question': 'prompt'})",
            ),
        ),
    ),
    "a typing error in a name": (
        "t.jsonl",
        "kto",
        lines({"Prompt": "a", "completon": "b", "label": True}),
        (
            (
                "t.jsonl: the columns are 'Prompt', 'completon', 'label'",
                "for kto: 'prompt' + 'completion' + 'label', or 'prompt' + 'chosen' + 'rejected', "
                "or 'chosen' + 'rejected'",
                "rename 'Prompt' to 'prompt' and 'completon' to 'completion': "
                "dataset.rename_columns({'Prompt': 'prompt', 'completon': 'completion'})",
            ),
        ),
    ),
    "TRL's former names of token ids": (
        "t.jsonl",
        "reward",
        lines({"chosen_input_ids": [1], "rejected_input_ids": [2]}),
        (
            (
                "t.jsonl: the columns are 'chosen_input_ids', 'rejected_input_ids'",
                "for reward: 'chosen_ids' + 'rejected_ids', or 'prompt' + 'chosen' + 'rejected', "
                "or 'chosen' + 'rejected'",
                "rename 'chosen_input_ids' to 'chosen_ids' and 'rejected_input_ids' to 'rejected_ids': "
                "dataset.rename_columns({'chosen_input_ids': 'chosen_ids', 'rejected_input_ids': 'rejected_ids'})",
            ),
        ),
    ),
    "columns of another method": (
        "t.jsonl",
        "sft",
        lines({"prompt": "a", "chosen": "b", "rejected": "c"}),
        (
            (
                "t.jsonl: the columns are 'prompt', 'chosen', 'rejected'",
                SFT,
                "these columns suit isotype dpo, isotype reward, isotype kto, isotype grpo, isotype rloo",
            ),
        ),
    ),
    "a prompt beside the text": (
        "t.jsonl",
        "sft",
        lines({"prompt": "a", "text": "b"}),
        (
            (
                "t.jsonl: the columns are 'prompt', 'text'",
                SFT,
                "these columns suit isotype grpo, isotype rloo",
            ),
        ),
    ),
    "columns that say nothing": (
        "t.jsonl",
        "sft",
        lines({"x": "a", "y": "b"}),
        (
            (
                "t.jsonl: the columns are 'x', 'y'",
                SFT,
                "rename the columns, or name the one that holds the text: --dataset_text_field NAME",
            ),
        ),
    ),
    "columns that say nothing to dpo": (
        "t.jsonl",
        "dpo",
        lines({"x": "a", "y": "b"}),
        (
            (
                "t.jsonl: the columns are 'x', 'y'",
                "for dpo: 'prompt' + 'chosen' + 'rejected', or 'chosen' + 'rejected'",
                "rename the columns, or choose the method that fits them",
            ),
        ),
    ),
    "no columns": (
        "t.jsonl",
        "grpo",
        "{}\n",
        (
            (
                "t.jsonl: the columns are none",
                "for grpo: 'prompt'",
                "rename the columns, or choose the method that fits them",
            ),
        ),
    ),
    "wrong types": (
        "t.jsonl",
        "kto",
        lines(
            {"prompt": 3, "completion": "b", "label": True},
            {"prompt": {"a": 1}, "completion": "b", "label": 1},
            {"prompt": True, "completion": "b", "label": "yes"},
        ),
        (
            ("t.jsonl, line 1: column 'prompt' is a number", TURN, TURN_FIX),
            ("t.jsonl, line 2: column 'prompt' is an object", TURN, TURN_FIX),
            (
                "t.jsonl, line 2: column 'label' is a number",
                "true or false",
                "write true for a good completion and false for a bad one",
            ),
            ("t.jsonl, line 3: column 'prompt' is true or false", TURN, TURN_FIX),
            (
                "t.jsonl, line 3: column 'label' is text",
                "true or false",
                "write true for a good completion and false for a bad one",
            ),
        ),
    ),
    "null and empty values": (
        "t.jsonl",
        "sft",
        lines(
            {"prompt": "a", "completion": ""},
            {"prompt": None, "completion": "b"},
            {"prompt": [], "completion": ASSISTANT},
            *[{"prompt": "a", "completion": ""}] * 4,
        ),
        (
            ("t.jsonl, lines 1, 4, 5 and 2 more: column 'completion' is empty text", TURN, REFILL),
            ("t.jsonl, line 2: column 'prompt' is null", TURN, REFILL),
            ("t.jsonl, line 3: column 'prompt' is an empty list", TURN, REFILL),
        ),
    ),
    "messages that are none": (
        "t.jsonl",
        "sft",
        lines(
            *[
                {"messages": value}
                for value in (
                    "hello",
                    ["hello"],
                    [{"content": "a"}],
                    [{"role": "user"}],
                    [{"role": "user", "content": None}],
                    [{"role": "user", "content": 3}],
                    [{"role": 1, "content": "a"}],
                    [{"role": "user", "content": ["a"]}],
                    [{"from": "human", "value": "a"}],
                )
            ]
        ),
        (
            ("t.jsonl, line 1: column 'messages' is text", MESSAGES, MESSAGES_FIX),
            ("t.jsonl, line 2: column 'messages' holds text where a message belongs", MESSAGES, MESSAGES_FIX),
            ("t.jsonl, line 3: column 'messages' holds a message without 'role'", MESSAGES, MESSAGES_FIX),
            (
                "t.jsonl, lines 4 and 5: column 'messages' holds a message without 'content'",
                MESSAGES,
                MESSAGES_FIX,
            ),
            (
                "t.jsonl, line 6: column 'messages' holds a message whose 'content' is a number",
                MESSAGES,
                MESSAGES_FIX,
            ),
            (
                "t.jsonl, line 7: column 'messages' holds a message whose 'role' is a number",
                MESSAGES,
                MESSAGES_FIX,
            ),
            (
                "t.jsonl, line 8: column 'messages' holds a message whose 'content' has a part without 'type'",
                MESSAGES,
                MESSAGES_FIX,
            ),
            (
                "t.jsonl, line 9: column 'messages' holds no message of the assistant",
                "at least one, which is what is learned",
                "add the answer, or remove the example",
            ),
        ),
    ),
    "conversations that are none": (
        "t.jsonl",
        "sft",
        lines({"conversations": "a"}, {"conversations": ["a"]}, {"conversations": [{"value": "a"}]}),
        tuple(
            (
                f"t.jsonl, line {line}: column 'conversations' {fault}",
                "a list of {from, value} messages",
                "write [{…}, …] with 'from' and 'value', or with 'role' and 'content'",
            )
            for line, fault in (
                (1, "is text"),
                (2, "holds text where a message belongs"),
                (3, "holds a message without 'from'"),
            )
        ),
    ),
    "token ids that are none": (
        "t.jsonl",
        "sft",
        lines({"input_ids": "1 2"}, {"input_ids": [1, 2.5]}, {"input_ids": [True]}, {"input_ids": [[1]]}),
        tuple(
            (
                f"t.jsonl, line {line}: column 'input_ids' {fault}",
                "a list of token ids",
                "write whole numbers, as a tokenizer returns them",
            )
            for line, fault in (
                (1, "is text"),
                (2, "holds a number where a token id belongs"),
                (3, "holds true or false where a token id belongs"),
                (4, "holds a list where a token id belongs"),
            )
        ),
    ),
    "optional columns that are wrong": (
        "t.jsonl",
        "reward",
        lines(
            {"chosen": "a", "rejected": "b", "margin": "x", "tools": 1, "chat_template_kwargs": None},
            {"chosen": "a", "rejected": "b", "margin": True, "tools": "{", "chat_template_kwargs": {}},
        ),
        (
            (
                "t.jsonl, line 1: column 'tools' is a number",
                "null, or a list of tool schemas",
                "write JSON schemas, or JSON text of them",
            ),
            ("t.jsonl, line 1: column 'chat_template_kwargs' is null", "an object", REFILL),
            ("t.jsonl, line 1: column 'margin' is text", "a number", "write a number without quotes"),
            (
                "t.jsonl, line 2: column 'tools' is text that is not JSON",
                "null, or a list of tool schemas",
                "write JSON schemas, or JSON text of them",
            ),
            (
                "t.jsonl, line 2: column 'margin' is true or false",
                "a number",
                "write a number without quotes",
            ),
        ),
    ),
    "two kinds in a row": (
        "t.jsonl",
        "dpo",
        lines({"prompt": "a", "chosen": ASSISTANT, "rejected": OTHER}),
        (
            (
                "t.jsonl, line 1: 'prompt' is text but 'chosen' is a list of messages",
                "one kind of value in 'prompt', 'chosen', 'rejected'",
                "write all of them as text, or all as messages",
            ),
        ),
    ),
    "two kinds in two rows": (
        "t.jsonl",
        "grpo",
        lines({"prompt": "a"}, {"prompt": USER}),
        (
            (
                "t.jsonl, line 2: 'prompt' hold messages",
                "text, as on line 1",
                "write all rows as text, or all as messages",
            ),
        ),
    ),
    "two kinds in a further column": (
        "t.jsonl",
        "grpo",
        lines({"prompt": "a", "answer": 1}, {"prompt": "a", "answer": "x"}, {"prompt": "a", "answer": "y"}),
        (
            (
                "t.jsonl, line 2: column 'answer' changes its kind of value",
                "one kind of value in a column",
                "write all of them as text, or as numbers",
            ),
        ),
    ),
    "a number that is too large": (
        "t.jsonl",
        "grpo",
        lines({"prompt": "a", "answer": [1, 2**63]}),
        (
            (
                "t.jsonl, line 1: column 'answer' holds a whole number beyond 64 bits",
                "whole numbers of at most 64 bits",
                "write it as text",
            ),
        ),
    ),
    "half a character": (
        "t.jsonl",
        "sft",
        lines({"text": "a"}) + '{"text": "\\ud83d\\ude00"}\n{"text": "\\ud83d"}\n',
        (
            (
                "t.jsonl, line 3: \\ud83d is half of a character",
                "whole characters",
                "remove it, or write both halves",
            ),
        ),
    ),
    "not UTF-8": (
        "t.jsonl",
        "sft",
        b'{"text": "a"}\n{"text": "caf\xe9"}\n',
        (
            (
                "t.jsonl: byte 0xe9 at offset 27 is not UTF-8",
                "a text file in UTF-8",
                "convert it, for example: iconv -f CP1252 -t UTF-8 OLD > NEW",
            ),
        ),
    ),
    "UTF-16": (
        "t.csv",
        "sft",
        "text\na\n".encode("utf-16"),
        (
            (
                "t.csv: byte 0xff at offset 0 is not UTF-8",
                "a text file in UTF-8",
                "convert it, for example: iconv -f UTF-16 -t UTF-8 OLD > NEW",
            ),
        ),
    ),
    "CSV without a header": (
        "t.csv",
        "sft",
        "What is 2+2?,It is 4.\nWhat is 3+3?,It is 6.\n",
        (
            (
                "t.csv: the columns are 'What is 2+2?', 'It is 4.'",
                SFT,
                "the first line must name the columns: add one, such as prompt,completion",
            ),
        ),
    ),
    "CSV under other names": (
        "t.csv",
        "sft",
        "question,answer\na,b\n",
        (
            (
                "t.csv: the columns are 'question', 'answer'",
                SFT,
                "rename 'question' to 'prompt' and 'answer' to 'completion': "
                "dataset.rename_columns({'question': 'prompt', 'answer': 'completion'})",
            ),
        ),
    ),
    "CSV rows of another length": (
        "t.csv",
        "sft",
        'prompt,completion\na,b\n"c\nd",e,f\ng\n',
        (
            (
                "t.csv, line 3: 3 cells",
                "2, one for each column of the header",
                'put cells that contain the separator or quotes in quotes: "a, ""b"""',
            ),
            (
                "t.csv, line 5: 1 cell",
                "2, one for each column of the header",
                'put cells that contain the separator or quotes in quotes: "a, ""b"""',
            ),
        ),
    ),
    "CSV with an open quote": (
        "t.csv",
        "sft",
        'text\na\n"b\nc\n',
        (
            (
                "t.csv, line 3: not CSV: unexpected end of data",
                "comma-separated values (RFC 4180)",
                'quote cells as "…" and double the quotes inside them: ""',
            ),
        ),
    ),
    "CSV that names a column twice": (
        "t.csv",
        "sft",
        "text,text\na,b\n",
        (
            (
                "t.csv, line 1: the header names 'text' more than once",
                "one name a column",
                "rename or remove the repeated columns",
            ),
        ),
    ),
    "CSV with messages and labels": (
        "t.csv",
        "kto",
        'prompt,completion,label\na,b,1\n"[{""role"": ""user""}]",,maybe\n',
        (
            (
                "t.csv, line 2: column 'label' is a number",
                "true or false",
                "write true for a good completion and false for a bad one",
            ),
            ("t.csv, line 3: column 'completion' is empty text", TURN, REFILL),
            (
                "t.csv, line 3: column 'label' is text",
                "true or false",
                "write true for a good completion and false for a bad one",
            ),
        ),
    ),
    "parquet that is not": (
        "t.parquet",
        "sft",
        b'{"text": "a"}\n',
        (
            (
                't.parquet: not parquet: it begins with b\'{"text": "a"}\\n\'',
                "a parquet file",
                "write it again with a parquet library, or give the file its true suffix",
            ),
        ),
    ),
    "parquet cut off": (
        "t.parquet",
        "sft",
        b"PAR1 and no more",
        (
            (
                "t.parquet: not parquet: Parquet magic bytes not found in footer. "
                "Either the file is corrupted or this is not a parquet file.",
                "a parquet file",
                "write it again with a parquet library, or give the file its true suffix",
            ),
        ),
    ),
    "empty parquet": (
        "t.parquet",
        "sft",
        b"",
        (("t.parquet: there are no examples", "at least one example", "write examples to it"),),
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_wrong_is_said_with_its_place(case: str) -> None:
    name, method, content, problems = BROKEN[case]
    write(name, content)
    assert refusal(name, method) == HEADLINE.format(name) + "\n".join(problem(*item) for item in problems)


@pytest.mark.parametrize("name", ["t.jsonl", "t.parquet"])
def test_a_file_that_may_not_be_read(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write(name, "{}")

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise PermissionError(13, "Permission denied", name)

    monkeypatch.setattr(Path, "open", refuse)
    assert refusal(name) == HEADLINE.format(name) + problem(
        f"{name}: cannot be read: Permission denied", "a file that you may read", "see its permissions"
    )


def parquet_of(rows: list[dict[str, Any]] | pyarrow.Table) -> bytes:
    stream = io.BytesIO()
    pyarrow.parquet.write_table(
        rows if isinstance(rows, pyarrow.Table) else pyarrow.Table.from_pylist(rows), stream
    )
    return stream.getvalue()


def test_values_in_parquet() -> None:
    write("t.parquet", parquet_of([{"prompt": 1, "completion": "a"}, {"prompt": 2, "completion": None}]))
    assert refusal("t.parquet") == HEADLINE.format("t.parquet") + "\n".join(
        (
            problem("t.parquet, rows 1 and 2: column 'prompt' is a number", TURN, TURN_FIX),
            problem("t.parquet, row 2: column 'completion' is null", TURN, REFILL),
        )
    )


def test_columns_of_parquet() -> None:
    write("t.parquet", parquet_of([{"question": "a"}]))
    assert refusal("t.parquet", "rloo") == HEADLINE.format("t.parquet") + problem(
        "t.parquet: the columns are 'question'",
        "for rloo: 'prompt'",
        "rename 'question' to 'prompt': dataset.rename_columns({'question': 'prompt'})",
    )


def test_parquet_without_rows() -> None:
    write("t.parquet", parquet_of(pyarrow.table({"text": pyarrow.array([], pyarrow.string())})))
    assert refusal("t.parquet") == HEADLINE.format("t.parquet") + problem(
        "t.parquet: there are no examples", "at least one example", "write examples to it"
    )


def test_parquet_shards_that_do_not_fit_together() -> None:
    write("d/train-0.parquet", parquet_of([{"text": "a"}]))
    write("d/train-1.parquet", parquet_of([{"txt": "a"}]))
    assert refusal("d") == HEADLINE.format("d") + problem(
        "train-1.parquet: the columns are 'txt'",
        "those of train-0.parquet: 'text'",
        "write the files with the same columns and types, or name a single file",
    )


def test_parquet_cut_in_the_middle() -> None:
    whole = parquet_of([{"text": str(i) * 100} for i in range(1000)])
    write("t.parquet", whole[:500] + bytes(500) + whole[1000:])
    text = refusal("t.parquet")
    assert text.startswith(HEADLINE.format("t.parquet") + "  - t.parquet: ")
    assert text.endswith(
        "    expected  parquet files that can be read as one table\n"
        "    fix       write the files with the same columns and types, or name a single file"
    )


def test_every_problem_of_every_split_at_once_and_at_most_ten() -> None:
    write("d/train.jsonl", lines({"text": "a"}, *[{"text": "a", f"x{i}": 1} for i in range(8)]))
    write("d/test.jsonl", lines({"text": "a"}, *[{"text": "a", f"y{i}": 1} for i in range(5)]))
    text = refusal("d", need_test=True)
    assert text.count("  - ") == 10
    assert "  - test.jsonl, line 3: the row adds 'y1'\n" in text
    assert "y2" not in text
    assert text.endswith("\n  = 3 more problems not shown")


# --- mixtures --------------------------------------------------------------------------------------------------


def mixture(*entries: dict[str, Any], **changes: Any) -> Any:
    from trl import DatasetMixtureConfig

    return DatasetMixtureConfig(datasets=list(entries), **changes)


def mix(config: Any, method: str = "sft", need_test: bool = False, name: str | None = None) -> Any:
    return load_training_data(arguments(name), config, method, need_test=need_test)


def test_a_mixture_of_local_files_goes_through_trl() -> None:
    write("a.jsonl", lines(*[{"text": f"a{i}", "prompt": "unused"} for i in range(4)]))
    write("b.csv", "text\n2020-01-01\n7\n")
    write("d/train.jsonl", lines({"text": "t"}))
    write("d/test.jsonl", lines({"text": "u"}))
    as_parquet([{"text": "p"}], Path("p.parquet"))
    config = mixture(
        {"path": "a.jsonl", "columns": ["text"], "split": "train[:2]"},
        {"path": "b.csv"},
        {"path": "d", "split": "train+test"},
        {"path": "p.parquet"},
    )
    loaded = mix(config)
    assert loaded["train"]["text"][:] == ["a0", "a1", "2020-01-01", "7", "t", "u", "p"]
    assert config.datasets[0].path == "a.jsonl"
    split = mix(mixture({"path": "a.jsonl", "columns": ["text"]}, test_split_size=0.25), need_test=True)
    assert (split["train"].num_rows, split["test"].num_rows) == (3, 1)


def test_a_mixture_says_what_is_wrong_with_all_its_files() -> None:
    write("a.jsonl", lines({"text": ""}))
    write("b.jsonl", lines({"text": "a"}))
    with pytest.raises(DataError) as caught:
        mix(mixture({"path": "a.jsonl"}, {"path": "b.jsonl", "split": "test"}))
    assert str(caught.value) == HEADLINE.format("datasets") + "\n".join(
        (
            problem("a.jsonl, line 1: column 'text' is empty text", "text", REFILL),
            problem(
                "'b.jsonl' has no split 'test'; its splits are 'train'",
                "the split to train on",
                "--dataset_train_split train",
            ),
        )
    )


def test_a_mixture_without_a_test_split() -> None:
    write("a.jsonl", lines({"text": "a"}))
    with pytest.raises(DataError) as caught:
        mix(mixture({"path": "a.jsonl"}), need_test=True)
    assert str(caught.value) == HEADLINE.format("datasets") + problem(
        "evaluation is on and the mixture has no test split",
        "a share of the mixture to evaluate on",
        "--test_split_size 0.1, or --eval_strategy no",
    )


def test_a_streamed_mixture_cannot_be_split() -> None:
    write("a.jsonl", lines({"text": "a"}))
    with pytest.raises(DataError) as caught:
        mix(mixture({"path": "a.jsonl"}, streaming=True, test_split_size=0.5))
    assert str(caught.value) == HEADLINE.format("datasets") + problem(
        "--test_split_size 0.5 with a streamed mixture",
        "a mixture whose size is known, to be split",
        "leave --streaming or --test_split_size away",
    )


def test_a_mixture_that_trl_refuses() -> None:
    write("a.jsonl", lines({"text": "a"}))
    with pytest.raises(DataError) as caught:
        mix(mixture({"path": "a.jsonl", "fraction": 0.5}, {"path": "a.jsonl"}))
    assert str(caught.value) == HEADLINE.format("datasets") + problem(
        "the mixture of 'a.jsonl', 'a.jsonl' cannot be built: "
        "`fraction` must be set for either all datasets in the mixture or none of them.",
        "entries that load and fit together",
        "see each entry's path, split, columns and fraction; an unreachable hub needs local files",
    )


def test_a_mixture_wins_over_a_name_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    write("a.jsonl", lines({"text": "a"}))
    with caplog.at_level(logging.WARNING, "isotype.data.load"):
        loaded = mix(mixture({"path": "a.jsonl"}), name="b.jsonl")
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

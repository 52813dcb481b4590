"""Every form of a row with images, as a training takes it: `images` in the order of their places."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, Features, Json, List, Value
from datasets import Image as Pictures

from isotype.data.load import fingerprint_of_rows
from isotype.data.pictures import size_of
from isotype.data.placed import QUESTION
from tests.data.loading import Row, lines, load, mixture, refusal, write

Image = pytest.importorskip("PIL.Image")
PLACE = {"type": "image"}
COLOURS = {"red": (255, 0, 0), "green": (0, 128, 0), "blue": (0, 0, 255)}


def png(colour: str, size: tuple[int, int] = (4, 3)) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", size, colour).save(stream, "png")
    return stream.getvalue()


RED, GREEN = png("red"), png("green")
RED64 = base64.b64encode(RED).decode()


@pytest.fixture(autouse=True)
def _a_folder_with_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write("d/red.png", RED)
    write("d/pictures/green.png", GREEN)
    write("here.png", png("blue"))


def text(value: str) -> Row:
    return {"type": "text", "text": value}


def asked(content: Any) -> list[Row]:
    return [{"role": "user", "content": content}, {"role": "assistant", "content": "b"}]


def colours(row: Row) -> list[str]:
    """The images of a row by their colours."""
    pixels = [image.getpixel((0, 0)) for image in row["images"]]
    return [name for pixel in pixels for name, rgb in COLOURS.items() if pixel == rgb]


def contents(row: Row) -> list[Any]:
    return [turn["content"] for turn in row.get("messages") or row["prompt"]]


@pytest.mark.parametrize(
    "value",
    [
        "red.png",
        RED64,
        f"data:image/png;base64,{RED64}",
        {"path": "red.png"},
        {"bytes": RED64, "path": None},
        {"url": "red.png"},
    ],
    ids=["path", "base64", "data URL", "{path}", "{bytes}", "{url}"],
)
def test_a_picture_is_a_path_from_its_file_or_text_of_its_bytes(value):
    write("d/t.jsonl", lines({"messages": asked([PLACE, text("a")]), "images": [value]}))
    (row,) = load("d/t.jsonl")["train"]
    assert colours(row) == ["red"]
    assert row["images"][0].size == (4, 3)
    assert contents(row) == [[PLACE, text("a")], "b"]


def test_a_path_that_is_not_beside_the_file_is_taken_from_here():
    write("d/t.jsonl", lines({"image": "here.png", "prompt": "a", "completion": "b"}))
    assert colours(load("d/t.jsonl")["train"][0]) == ["blue"]


INSIDE = [
    [{"type": "image", "image": "red.png"}, text("a")],
    [{"type": "image", "path": "red.png"}, text("a")],
    [{"type": "image", "url": f"data:image/png;base64,{RED64}"}, text("a")],
    [{"type": "image", "base64": RED64}, text("a")],
    [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{RED64}"}}, text("a")],
    [{"type": "input_image", "image_url": f"data:image/png;base64,{RED64}"}, text("a")],
    [
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": RED64}},
        text("a"),
    ],
]


@pytest.mark.parametrize("content", INSIDE, ids=lambda content: str(sorted(content[0]))[1:-1])
def test_a_picture_inside_of_a_message(content):
    write("d/t.jsonl", lines({"messages": asked(content)}))
    (row,) = load("d/t.jsonl")["train"]
    assert (colours(row), contents(row)) == (["red"], [[PLACE, text("a")], "b"])


def test_several_pictures_keep_their_order_and_some_rows_have_none():
    both = [
        {"type": "image", "path": "pictures/green.png"},
        text("or"),
        {"type": "image", "path": "red.png"},
    ]
    write("d/t.jsonl", lines({"messages": asked(both)}, {"messages": asked("a")}))
    rows = load("d/t.jsonl")["train"]
    assert [colours(row) for row in rows] == [["green", "red"], []]
    assert contents(rows[0])[0] == [PLACE, text("or"), PLACE]
    assert contents(rows[1]) == ["a", "b"]


@pytest.mark.parametrize("key", ["messages", "conversations"])
def test_a_mark_in_the_text_is_a_place(key):
    """As LLaVA, LLaMA-Factory and ms-swift write it."""
    said = "<image>\nFirst, <image> then?"
    turns = asked(said)
    if key == "conversations":
        turns = [{"from": "human", "value": said}, {"from": "gpt", "value": "b"}]
    write("d/t.jsonl", lines({key: turns, "images": ["red.png", "pictures/green.png"]}))
    (row,) = load("d/t.jsonl")["train"]
    assert contents(row)[0] == [PLACE, text("First, "), PLACE, text(" then?")]
    assert colours(row) == ["red", "green"]


def test_a_mark_without_pictures_is_text():
    write("d/t.jsonl", lines({"messages": asked("What is <image>?")}))
    assert contents(load("d/t.jsonl")["train"][0])[0] == "What is <image>?"


def test_prompts_and_answers_of_text_become_messages_in_all_rows():
    """A row without an image is asked as those with one are."""
    rows = [
        {"prompt": "a", "completion": "b"},
        {"prompt": "<image>c", "completion": "d", "image": "red.png"},
        {"prompt": "e", "completion": "f", "image": None},
    ]
    write("d/t.jsonl", lines(*({"image": None, **row} for row in rows)))
    for name in ("d/t.jsonl", "d/u.jsonl"):
        train = load(name)["train"]
        assert [colours(row) for row in train] == [[], ["red"], []]
        assert [contents(row)[0] for row in train] == ["a", [PLACE, text("c")], "e"]
        assert train[0]["completion"] == [{"role": "assistant", "content": "b"}]
        write(
            "d/u.jsonl",
            lines(*({k: v for k, v in row.items() if v} for row in rows)).replace('image":', 'images":'),
        )


def test_a_text_with_the_models_own_tokens_stays_as_it_is():
    write("d/t.jsonl", lines({"prompt": "<start_of_image>a", "completion": "b", "image": "red.png"}))
    (row,) = load("d/t.jsonl")["train"]
    assert (row["prompt"], row["completion"], colours(row)) == ("<start_of_image>a", "b", ["red"])


@pytest.mark.parametrize("prompted", [True, False])
def test_preference_pairs(prompted):
    prompt = [{"role": "user", "content": [{"type": "image", "path": "red.png"}, text("a")]}]
    chosen, rejected = ([{"role": "assistant", "content": each}] for each in ("yes", "no"))
    row: Row = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
    if not prompted:
        row = {"chosen": prompt + chosen, "rejected": prompt + rejected}
    write("d/t.jsonl", lines(row))
    (taken,) = load("d/t.jsonl", "dpo")["train"]
    assert colours(taken) == ["red"]
    assert (contents(taken), taken["chosen"], taken["rejected"]) == ([[PLACE, text("a")]], chosen, rejected)


@pytest.mark.parametrize("metadata", ["jsonl", "csv"])
def test_a_folder_of_pictures_with_metadata(metadata):
    """As `imagefolder` of `datasets` has it."""
    named = [("red.png", "a red one"), ("pictures/green.png", "007")]
    if metadata == "csv":
        write("d/metadata.csv", "file_name,text\n" + "".join(f"{a},{b}\n" for a, b in named))
    else:
        write("d/metadata.jsonl", lines(*({"file_name": a, "text": b} for a, b in named)))
    write("d/README.txt", "what this is")
    said: list[str] = []
    rows = load("d", said=said)["train"]
    assert [colours(row) for row in rows] == [["red"], ["green"]]
    assert [row["completion"][0]["content"] for row in rows] == ["a red one", "007"]
    assert contents(rows[0]) == [[PLACE, text(QUESTION)]]
    assert said == [
        f"metadata.{metadata}: captions are trained as answers to 'Describe the picture.'; columns 'prompt' and 'completion' "
        "allow another question"
    ]


def test_metadata_may_hold_conversations_and_several_pictures():
    row = {"file_names": ["red.png", "pictures/green.png"], "messages": asked("<image> or <image>")}
    write("d/metadata.jsonl", lines(row))
    (taken,) = load("d")["train"]
    assert colours(taken) == ["red", "green"]


def test_captions_beside_their_pictures_by_folders_of_splits():
    for split in ("train", "test"):
        write(f"c/{split}/a test.png", RED)
        write(f"c/{split}/a test.txt", f"red for the {split}\n")
        write(f"c/{split}/left.png", GREEN)
    said: list[str] = []
    data = load("c", evaluate=True, said=said)
    for split in ("train", "test"):
        (row,) = data[split]
        assert (colours(row), row["completion"][0]["content"]) == (["red"], f"red for the {split}")
    assert "omitted 1 image without a caption: left.png" in said


@pytest.mark.parametrize("column", ["image", "images"])
@pytest.mark.parametrize("form", ["parquet", "disk"])
def test_a_data_set_of_datasets(column, form):
    kind = Pictures() if column == "image" else List(Pictures())
    cell = {"bytes": RED, "path": None}
    row = {"messages": asked("<image>a"), column: cell if column == "image" else [cell]}
    empty = {"messages": asked("a"), column: None if column == "image" else []}
    features = Features({"messages": List(Json()), column: kind})
    data = Dataset.from_list([row, empty], features=features)
    data.to_parquet("s.parquet") if form == "parquet" else data.save_to_disk("s")
    rows = load("s.parquet" if form == "parquet" else "s")["train"]
    assert [colours(row) for row in rows] == [["red"], []]
    assert contents(rows[0])[0] == [PLACE, text("a")]


@pytest.mark.parametrize("column", ["image", "images"])
def test_a_stored_data_set_of_paths(column):
    path = str(Path("d/red.png").absolute())
    row = {"messages": asked("a"), column: path if column == "image" else [path]}
    Dataset.from_list([row]).to_parquet("s.parquet")
    assert colours(load("s.parquet")["train"][0]) == ["red"]


def test_a_stored_data_set_that_the_trainer_takes_is_not_written_again():
    """Images are most of a data set's bytes."""
    features = Features(
        {"messages": List({"role": Value("string"), "content": Value("string")}), "images": List(Pictures())}
    )
    data = Dataset.from_list(
        [{"messages": asked("a"), "images": [{"bytes": RED, "path": None}]}], features=features
    )
    data.to_parquet("s.parquet")
    rows = load("s.parquet")["train"]
    assert rows.features.type == features.type
    assert not any("cache-" in file["filename"] for file in rows.cache_files)
    assert contents(rows[0]) == ["a", "b"]


def test_a_mixture_of_pictures_and_texts():
    write("d/t.jsonl", lines({"messages": asked("<image>a"), "image": "red.png"}))
    write("plain.jsonl", lines({"messages": asked("a")}, {"messages": asked("c")}))
    features = Features({"messages": List(Json()), "image": Pictures()})
    row = {"messages": asked("a"), "image": {"bytes": GREEN, "path": None}}
    Dataset.from_list([row], features=features).to_parquet("s.parquet")
    entries = ({"path": name} for name in ("d/t.jsonl", "plain.jsonl", "s.parquet"))
    rows = load(None, config=mixture(*entries))["train"]
    assert [colours(row) for row in rows] == [["red"], [], [], ["green"]]


def test_every_bad_picture_is_named_with_its_file_and_row():
    write("d/cut.png", RED[:50])
    write("d/text.png", "no image")
    bad = ["no.png", "cut.png", "text.png", "http://example.org/a.png", 3, "data:image/png;base64,AAAA"]
    rows = [{"messages": asked("a"), "images": ["red.png", each]} for each in bad]
    write("d/t.jsonl", lines({"messages": asked("a"), "images": ["red.png"]}, *rows))
    folder = Path("d").absolute()
    said = refusal("d/t.jsonl")
    for line, what in (
        (2, f"there is no image '{folder}/no.png'"),
        (3, f"the image '{folder}/cut.png' cannot be read: "),
        (4, f"the image '{folder}/text.png' cannot be read: no format that pillow reads"),
        (5, "the image 'http://example.org/a.png' is on the network"),
        (6, "an image is a number"),
        (7, "the image cannot be read: no format that pillow reads"),
    ):
        assert f"  - t.jsonl, line {line}: {what}" in said
    many = ({"messages": asked("a"), "images": [f"{at}.png"]} for at in range(30))
    write("d/t.jsonl", lines(*many))
    assert "20 more problems not shown" in refusal("d/t.jsonl")


@pytest.mark.parametrize("cell", ["red.png", ["red.png"], ["data:image/png;base64,AAAA"]])
def test_images_in_a_column_with_another_name_get_the_argument_that_names_it(cell):
    write("t.jsonl", lines({"source": "web", "photo": cell, "messages": asked([PLACE, text("a")])}))
    assert "    fix       --columns images=photo\n" in refusal("t.jsonl") + "\n"


@pytest.mark.parametrize(
    ("method", "row", "what"),
    [
        (
            "sft",
            {"messages": asked([PLACE, text("a")]), "images": []},
            "1 place for an image in messages, but 0 images",
        ),
        (
            "sft",
            {"messages": asked("<image>a"), "images": ["red.png"] * 2},
            "1 place for an image in messages, but 2 images",
        ),
        ("sft", {"text": "a<image>b", "image": "red.png"}, "column 'text' contains images"),
        (
            "dpo",
            {
                "prompt": asked("a")[:1],
                "chosen": [{"role": "assistant", "content": [{"type": "image", "path": "red.png"}]}],
                "rejected": asked("a")[1:],
            },
            "column 'chosen' holds an image",
        ),
        (
            "kto",
            {"prompt": "<image>a", "chosen": "b", "rejected": "c", "image": "red.png"},
            "a pair of answers with images",
        ),
        (
            "reward",
            {"chosen": asked([PLACE, text("a")]), "rejected": asked("a")},
            "column 'chosen' holds a part of the type 'image'",
        ),
    ],
)
def test_pictures_that_do_not_fit_their_places(method, row, what):
    write("d/t.jsonl", lines(row))
    assert f"  - t.jsonl, line 1: {what}" in refusal("d/t.jsonl", method)


def test_a_fingerprint_holds_wherever_the_folder_lies():
    prints = []
    for folder in ("d", "e"):
        write(f"{folder}/red.png", RED)
        write(f"{folder}/t.jsonl", lines({"messages": asked("a"), "images": ["red.png"]}))
        prints.append(fingerprint_of_rows(load(f"{folder}/t.jsonl")["train"]))
    assert prints[0] == prints[1]
    write("e/red.png", png("red", (9, 9)))
    assert fingerprint_of_rows(load("e/t.jsonl")["train"]) != prints[0]


def test_a_picture_is_as_large_as_it_is_shown():
    stream = io.BytesIO()
    tags = Image.Exif()
    tags[274] = 6  # turned by a quarter
    Image.new("RGB", (4, 3)).save(stream, "jpeg", exif=tags)
    assert size_of(stream.getvalue()) == (3, 4)


def test_pictures_without_pillow_name_what_to_install(monkeypatch):
    monkeypatch.setattr("isotype.data.pictures.find_spec", lambda name: None)
    write("d/t.jsonl", lines({"messages": asked("a"), "images": ["red.png"]}))
    assert "pip install 'isotype[vision]'" in refusal("d/t.jsonl")


def test_json_of_a_list_in_a_cell():
    cell = json.dumps(["red.png", "pictures/green.png"]).replace('"', '""')
    write("d/t.csv", f'images,prompt,completion\n"{cell}",<image> or <image>,b\n')
    assert colours(load("d/t.csv")["train"][0]) == ["red", "green"]

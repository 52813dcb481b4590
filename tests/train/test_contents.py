"""Checks of contents in parts, images and `max_length` before a model is loaded."""

from __future__ import annotations

import io
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from datasets import Dataset, DatasetDict
from datasets import Image as Pictures
from transformers import AutoTokenizer

from isotype.core.errors import DataError
from isotype.data.methods import METHODS
from isotype.train.rows.data import check_pictures, pictures_named, plain_contents
from isotype.train.rows.lengths import RowTokens
from tests.data.loading import lines, load, refusal, write
from tests.refusals import refused
from tests.train.tiny import save_chat_model
from tests.zoo.processors import tiny_processor

needs_pillow = pytest.mark.lacking("" if find_spec("PIL") else "needs the package pillow")
ANSWER = {"role": "assistant", "content": "w2"}
SEEN = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "w1"}]}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return AutoTokenizer.from_pretrained(save_chat_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def test_text_parts_are_joined_where_the_template_writes_text_alone(tokenizer):
    turns = [
        [{"role": "user", "content": parts("w1", "w3")}, ANSWER],
        [{"role": "user", "content": "w4"}, ANSWER],
    ]
    write("t.jsonl", lines(*({"messages": turn} for turn in turns)))
    said: list[str] = []
    joined = plain_contents(tokenizer, load("t.jsonl"), said.append)["train"].to_list()
    assert [row["messages"][0]["content"] for row in joined] == ["w1\nw3", "w4"]
    assert said == [
        "content in several text parts is joined by line breaks, because the chat template accepts only text"
    ]


def test_a_template_that_writes_parts_gets_them(tokenizer):
    reads = AutoTokenizer.from_pretrained(tokenizer.name_or_path)
    reads.chat_template = (
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{{ p.text }}"
        "{% endfor %}{% endif %}{% endfor %}"
    )
    data = DatasetDict(
        {"train": Dataset.from_list([{"messages": [{"role": "user", "content": parts("w1")}]}])}
    )
    assert plain_contents(reads, data, print) is data


@needs_pillow
def test_pictures_that_are_missing_broken_or_miscounted_are_named_with_their_row():
    from PIL import Image

    Image.new("RGB", (8, 8), "red").save("a.png")
    write("broken.png", Path("a.png").read_bytes()[:50])
    row = {"messages": [SEEN, ANSWER], "images": ["a.png"]}
    write(
        "sound.jsonl",
        lines(row, {"messages": [{"role": "user", "content": "w1"}, ANSWER], "images": ["a.png"]}),
    )
    assert load("sound.jsonl")["train"][0]["images"][0].size == (8, 8)
    for pictures, what in (
        (["no.png"], f"there is no image '{Path('no.png').absolute()}'\n"),
        (["broken.png"], f"the image '{Path('broken.png').absolute()}' cannot be read: "),
        (["data:image/png;base64,AAAA"], "the image cannot be read: no format that pillow reads"),
        (
            ["a.png", "a.png"],
            "1 place for an image in messages, but 2 images\n    expected  as many places as images\n",
        ),
        ([], "1 place for an image in messages, but 0 images\n"),
    ):
        write("t.jsonl", lines(row, {**row, "images": pictures}))
        assert f"  - t.jsonl, line 2: {what}" in refusal("t.jsonl")


SETTINGS: Any = SimpleNamespace(data_name="d", method=METHODS["sft"])


def test_pictures_are_refused_by_a_model_of_text(tokenizer):
    row = {"messages": [SEEN, {**ANSWER, "content": parts("w2")}], "images": ["a.png"]}
    data = DatasetDict({"train": Dataset.from_list([row])})
    assert "train: images in the column 'images', and a model that accepts only text\n" in refused(
        DataError, check_pictures, SETTINGS, tokenizer, data
    )


@pytest.mark.newest  # LLaVA's processor of transformers 5.20 refuses no row
def test_a_row_that_the_processor_refuses_is_named():
    """The row has a text with an image token and no image."""
    row = {"messages": [{"role": "user", "content": "w1 <image>"}, ANSWER], "images": []}
    data = DatasetDict({"train": Dataset.from_list([row])})
    assert "  - train, row 1: Found 1 <image> tokens in the text but no images were passed." in refused(
        DataError, check_pictures, SETTINGS, tiny_processor("llava"), data
    )


@needs_pillow
@pytest.mark.parametrize("size", [20, 400])
def test_a_late_row_with_a_broken_picture_is_named(size):
    """A broken header is found before the training; a truncated image when the trainer decodes it."""
    from PIL import Image

    sound = io.BytesIO()
    Image.effect_noise((64, 64), 50).save(sound, "jpeg")
    turns = [SEEN, {**ANSWER, "content": parts("w2")}]
    rows = [{"messages": turns, "image": {"bytes": sound.getvalue(), "path": None}}] * 300
    rows[299] = {"messages": turns, "image": {"bytes": sound.getvalue()[:size], "path": None}}
    write("t.parquet", b"")
    Dataset.from_list(rows).cast_column("image", Pictures()).to_parquet("t.parquet")
    if size == 20:
        said = refusal("t.parquet")
    else:
        data = load("t.parquet")
        check_pictures(SETTINGS, tiny_processor("llava"), data)
        trainer = SimpleNamespace(train_dataset=data["train"], eval_dataset=None)
        with pytest.raises(DataError) as caught, pictures_named(trainer):
            data["train"][299]
        said = str(caught.value)
    place = "t.parquet" if size == 20 else "train"
    assert f"  - {place}, row 300: the image cannot be read: " in said


def test_other_errors_of_a_trainer_stay_as_they_are():
    rows = Dataset.from_list([{"text": "a"}])
    trainer = SimpleNamespace(train_dataset=rows, eval_dataset=rows)
    for error in (OSError(28, "No space left on device"), OSError("no file named a"), SyntaxError("a")):
        with pytest.raises(type(error)) as caught, pictures_named(trainer):
            raise error
        assert caught.value is error


def test_a_text_that_begins_as_the_tokenizer_begins_it_is_counted(tokenizer):
    from tokenizers.processors import TemplateProcessing

    rows = [{"text": "<s> w1"}, {"text": "w1"}]
    lengths = RowTokens("sft", tokenizer).lengths(rows)
    assert lengths is not None
    assert lengths.begun_twice() is None
    adds = AutoTokenizer.from_pretrained(tokenizer.name_or_path)
    adds.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 2)])
    lengths = RowTokens("sft", adds).lengths(rows)
    assert lengths is not None
    assert lengths.begun_twice() == (
        "1 of 2 rows begin with the beginning-of-text token, but the tokenizer adds this token again; "
        "remove it from the rows"
    )

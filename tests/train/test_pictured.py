"""Rows with pictures: their targets, their number of tokens, and rows that are too long."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, DatasetDict, Features, Json, List
from datasets import Image as Pictures
from transformers import Gemma3Processor

from isotype.cli.main import main
from isotype.core.errors import DataError, UsageError
from isotype.data.methods import METHODS
from isotype.train import training
from isotype.train.policy import enforce_trainer
from isotype.train.rows.collators import Pictured
from isotype.train.rows.data import fitting
from isotype.train.rows.lengths import RowTokens
from tests.parsed import parse_settings
from tests.refusals import refused
from tests.zoo.processors import FAMILIES, picture, save_vision_model, tiny_processor
from tests.zoo.shrink import IMAGE

pytest.importorskip("PIL", reason="needs the package pillow")
Row = dict[str, Any]
PLACE = {"type": "image"}
CORE = ("gemma3", "llava", "idefics3")
_DRAWN = {
    "<start_of_image>",
    "<end_of_image>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<fake_token_around_image>",
    "<global-img>",
}


def _lacking(name: str) -> str:
    if FAMILIES[name].pil:
        return ""
    try:
        import torchvision  # noqa: F401
    except ImportError:
        return "needs the package torchvision"
    return ""


MARKS = {name: [] if name in CORE else [pytest.mark.lacking(_lacking(name))] for name in FAMILIES}
families = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=MARKS[name]) for name in (*CORE, "qwen2_vl", "ovis2")]
)


def said(role: str, content: Any) -> Row:
    return {"role": role, "content": content}


def text(value: str) -> Row:
    return {"type": "text", "text": value}


ASKED = said("user", [PLACE, text("w1"), PLACE])
CHAT = [said("system", "w0"), ASKED, said("assistant", "w2 w3"), said("user", "w4"), said("assistant", "w5")]


def pictures() -> list[Any]:
    return [picture(40, 40), picture(64, 32)]


def learned(processor: Any, row: Row, **options: Any) -> tuple[list[str], list[str]]:
    """Return (words of a row with loss, its other tokens without padding), in a batch with a longer row of text."""
    long = {"messages": [said("user", "w9 " * 200), said("assistant", "w9")], "images": []}
    if "prompt" in row:
        long = {"prompt": long["messages"][:1], "completion": long["messages"][1:], "images": []}
    batch = Pictured(processor, **options)([row, long])
    ids, labels, mask = (batch[name][0].tolist() for name in ("input_ids", "labels", "attention_mask"))
    assert all(label in (-100, token) for token, label in zip(ids, labels, strict=True))
    assert all(label == -100 for label, seen in zip(labels, mask, strict=True) if not seen)
    words = processor.tokenizer.convert_ids_to_tokens
    return (
        words([token for token, label in zip(ids, labels, strict=True) if label != -100]),
        words(
            [token for token, label, seen in zip(ids, labels, mask, strict=True) if label == -100 and seen]
        ),
    )


@families
def test_pictures_and_padding_are_never_learned_and_all_words_are(name):
    processor = tiny_processor(name)
    words, rest = learned(processor, {"messages": CHAT, "images": pictures()})
    turns = ("<s> system : w0 </s>", "<s> user : w1 </s>", "<s> assistant : w2 w3 </s>", "<s> user : w4 </s>")
    assert words == " ".join((*turns, "<s> assistant : w5 </s>")).split()
    assert {*rest} <= {*FAMILIES[name].tokens, "<unk>", "\n"}  # unknown are the line breaks beside an image
    assert {*rest} & {*FAMILIES[name].tokens}


@families
def test_the_assistant_alone(name):
    words, _ = learned(tiny_processor(name), {"messages": CHAT, "images": pictures()}, only=True)
    assert words == ["w2", "w3", "</s>", "w5", "</s>"]


@families
def test_a_completion_alone_and_with_its_prompt(name):
    processor = tiny_processor(name)
    row = {"prompt": [ASKED], "completion": [said("assistant", "w2 w3")], "images": pictures()}
    assert learned(processor, row)[0] == ["w2", "w3", "</s>"]
    assert learned(processor, row, whole=True)[0] == [
        "<s>",
        "user",
        ":",
        "w1",
        "</s>",
        "<s>",
        "assistant",
        ":",
        "w2",
        "w3",
        "</s>",
    ]


def test_turns_that_are_marked_are_not_learned():
    chat = [*CHAT[:2], {**CHAT[2], "weight": 0}, *CHAT[3:]]
    words, _ = learned(tiny_processor("llava"), {"messages": chat, "images": pictures()}, only=True)
    assert words == ["w5", "</s>"]


def test_a_text_for_one_model_is_learned_behind_its_prompt():
    row = {"prompt": "<image> w1", "completion": " w2", "images": [picture(40, 40)]}
    long = {"prompt": "w9 " * 90, "completion": "w9", "images": []}
    processor = tiny_processor("llava")
    batch = Pictured(processor)([row, long])
    labels = [label for label in batch["labels"][0].tolist() if label != -100]
    assert processor.tokenizer.convert_ids_to_tokens(labels) == ["w2"]


@families
def test_tokens_are_counted_by_headers_alone(name, tmp_path):
    """The count equals the number of tokens that the processor makes from the decoded image."""
    processor = tiny_processor(name)
    for number, each in enumerate(pictures()):
        each.save(tmp_path / f"{number}.png")
    paths = [str(tmp_path / f"{number}.png") for number in range(2)]
    features = Features({"messages": List(Json()), "images": List(Pictures())})
    rows = Dataset.from_list(
        [{"messages": CHAT, "images": paths}, {"messages": CHAT[3:], "images": []}], features=features
    )
    lengths = RowTokens("sft", processor).lengths(rows)
    assert lengths is not None
    real = [Pictured(processor)([rows[at]])["input_ids"].shape[1] for at in range(2)]
    assert lengths.tokens == tuple(real)
    (tmp_path / "0.png").write_bytes((tmp_path / "0.png").read_bytes()[:60])  # its header, and no more
    assert RowTokens("sft", processor).lengths(rows) == lengths


@pytest.mark.parametrize("name", ["idefics3", pytest.param("internvl", marks=MARKS["internvl"])])
def test_a_batch_may_begin_with_a_row_without_pictures(name):
    collator = Pictured(tiny_processor(name))
    plain = {"messages": CHAT[3:], "images": []}
    shown = {"messages": CHAT, "images": pictures()}
    assert collator([plain, plain])["labels"].shape[0] == 2
    first, last = collator([shown, plain]), collator([plain, shown])
    for part in ("input_ids", "labels"):
        assert torch.equal(last[part], first[part].flip(0))


def test_a_size_goes_through_the_processor_once(monkeypatch):
    processor = tiny_processor("llava")
    rows = data(*range(1, 20))["train"]
    calls: list[int] = []
    real = type(processor).__call__

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return real(*args, **kwargs)

    monkeypatch.setattr(type(processor), "__call__", counted)
    lengths = RowTokens("sft", processor).lengths(rows)
    assert lengths is not None
    assert len(lengths.tokens) == 19
    assert len(calls) == 1


def test_an_example_shows_the_place_and_size_of_each_picture():
    row = {"messages": CHAT[1:3], "images": pictures()}
    parts = Pictured(tiny_processor("llava"), only=True).stretches(row)
    assert parts == [
        (False, "<s> user :[image 40 × 40, 16 tokens]w1[image 64 × 32, 16 tokens]</s> <s> assistant :"),
        (True, "w2 w3 </s>"),
    ]


def data(*counts: int) -> DatasetDict:
    """Return a row with an image for each count, whose answer has this number of words."""
    rows = [{"messages": [said("user", [PLACE]), said("assistant", "w1 " * count)]} for count in counts]
    features = Features({"messages": List(Json()), "images": List(Pictures())})
    held = Dataset.from_list([{**row, "images": [picture(40, 40)]} for row in rows], features=features)
    return DatasetDict({"train": held})


def arguments(*more: str) -> Any:
    return parse_settings(
        METHODS["sft"], ["--model_name_or_path", "m", "--dataset_name", "d", "--output_dir", "o", *more]
    )


def test_a_row_with_a_picture_is_not_cut_by_default():
    rows, lines = data(5, 2000), []
    settings, kept = fitting(arguments(), tiny_processor("llava"), rows, lines.append)
    assert settings.max_length is None
    assert kept["train"].num_rows == 2
    assert not lines


@pytest.mark.parametrize("name", ["packing", "padding_free"])
def test_rows_with_pictures_are_not_joined(name):
    message = refused(
        UsageError, fitting, arguments(f"--{name}", "True"), tiny_processor("llava"), data(5), print
    )
    assert message == (
        "rows with images are not joined\n"
        f"  - --{name} True, and images in the column 'images'\n"
        "    expected  a separate row of the batch for each example\n"
        f"    fix       omit --{name}"
    )


def test_rows_with_pictures_have_no_lengths_to_group_by():
    strategy = arguments("--train_sampling_strategy", "group_by_length")
    message = refused(UsageError, fitting, strategy, tiny_processor("llava"), data(5), print)
    assert "group_by_length, and images in the column 'images'" in message


def test_a_row_that_is_too_long_is_refused_or_left_out():
    processor, rows = tiny_processor("llava"), data(5, 9, 30)
    assert refused(DataError, fitting, arguments("--max_length", "40"), processor, rows, print) == (
        "The data set 'd' cannot be trained on\n"
        "  - train, row 3: 54 tokens\n"
        "    expected  at most max_length 40 tokens, because images are not cut\n"
        "    fix       --max_length 54, --max_length none, or --excess_length_strategy drop"
    )
    lines: list[str] = []
    options = ("--max_length", "40", "--excess_length_strategy", "drop")
    settings, kept = fitting(arguments(*options), processor, rows, lines.append)
    assert kept["train"].num_rows == 2
    assert settings.max_length is None
    assert lines == [
        "1 of 3 rows in 'train' are longer than max_length 40 and dropped, because images are not cut"
    ]


@pytest.mark.parametrize("method", ["sft", "dpo"])
def test_a_training_on_a_file_of_every_kind_of_row(method, tmp_path, monkeypatch, capsys, request):
    """A batch has rows with images and rows without."""
    if method == "dpo":
        request.getfixturevalue("unchecked")
    monkeypatch.chdir(tmp_path)
    save_vision_model("llava", tmp_path / "model")
    picture(40, 30).save("a.png")
    inside = said("user", [{"type": "image", "path": "a.png"}, text("w1")])
    chats: list[Row] = [
        {"messages": [inside, said("assistant", "w2")]},
        {"messages": [said("user", "<image>w3"), said("assistant", "w4")], "images": ["a.png"]},
        {"messages": [said("user", "w5"), said("assistant", "w6")]},
    ]
    if method == "dpo":
        chats = [
            {
                "chosen": row["messages"],
                "rejected": [row["messages"][0], said("assistant", "w7")],
                **({"images": row["images"]} if "images" in row else {}),
            }
            for row in chats
        ]
    Path("t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chats * 2))
    more = "--max_steps 2 --per_device_train_batch_size 3 --save_strategy no --lora_r 2 --lora_target_modules q_proj --device cpu --gradient_checkpointing False"
    data = ("--model_name_or_path", "model", "--dataset_name", "t.jsonl", "--output_dir", "out")
    status = main(
        [
            method,
            *data,
            *more.split(),
            *(["--assistant_only_loss", "--eval_split", "2"] if method == "sft" else []),
        ]
    )
    output, errors = capsys.readouterr()
    assert status == 0, output + errors
    report = json.loads(Path("out/run_report.json").read_text())
    assert len(report["steps"]) == 2
    assert "try it, with the path of an image for FILE:\n    isotype chat out --image FILE\n" in output
    if method == "sft":
        assert "first example" in output
        asked = [sample for sample in report["samples"] if sample["pictures"]]
        assert asked
        assert all(url.startswith("data:image/png;base64,") for sample in asked for url in sample["pictures"])
        assert all(None not in (sample["before"], sample["after"]) for sample in asked)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("method", ["grpo", "rloo"])
def test_prompts_of_several_lengths_have_their_types_at_their_images(method, tmp_path, monkeypatch, capsys):
    """The tokenizer of the checkpoint pads on the right, and TRL pads prompts on the left."""
    monkeypatch.chdir(tmp_path)
    save_vision_model("gemma3", tmp_path / "model")
    picture(40, 30).save("a.png")
    asked = ({"prompt": f"<image>{'w1 ' * words}", "images": ["a.png"]} for words in (1, 9, 4, 6))
    Path("t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked))
    seen: list[bool] = []

    def record(model: Any, args: Any, inputs: dict[str, Any]) -> None:
        types = inputs.get("token_type_ids")
        if types is not None:
            seen.append(torch.equal(types == 1, inputs["input_ids"] == IMAGE))

    def watched(trainer: Any, *args: Any) -> Any:
        trainer.model.register_forward_pre_hook(record, with_kwargs=True)
        return enforce_trainer(trainer, *args)

    monkeypatch.setattr(training, "enforce_trainer", watched)
    flags = """--model_name_or_path model --dataset_name t.jsonl --output_dir out --max_steps 1 --per_device_train_batch_size 4
        --num_generations 2 --max_completion_length 2 --beta 0.1 --save_strategy no --lora_r 2 --device cpu
        --gradient_checkpointing False --reward_funcs tests.train.tiny.reward_by_words"""
    assert main([method, *flags.split()]) == 0, capsys.readouterr()
    assert seen
    assert all(seen)


@pytest.mark.parametrize(
    ("output", "words"),
    [
        ({"rows": torch.ones(1)}, "rows"),
        ({"pixel_values": torch.ones(1, dtype=torch.bfloat16)}, "pixel_values in bfloat16"),
    ],
)
def test_a_processor_with_outputs_that_the_trainer_lacks_is_refused(
    output, words, tmp_path, monkeypatch, capsys
):
    """TRL's GRPO passes all outputs of the processor to a method that lacks `rows`, and raises TypeError in the first step.

    Llama 4's processor returns bfloat16 images, which TRL converts by NumPy.
    """
    monkeypatch.chdir(tmp_path)
    save_vision_model("gemma3", tmp_path / "model")
    picture(40, 30).save("a.png")
    Path("t.jsonl").write_text(json.dumps({"prompt": "<image>w1", "images": ["a.png"]}) + "\n")
    real = Gemma3Processor.__call__
    monkeypatch.setattr(Gemma3Processor, "__call__", lambda *args, **named: real(*args, **named) | output)
    flags = "--model_name_or_path model --dataset_name t.jsonl --output_dir out --device cpu --reward_funcs tests.train.tiny.reward_by_words"
    refusals = []
    for command in (["grpo"], ["check", "grpo"]):
        assert main([*command, *flags.split()]) == 2
        refusals.append(capsys.readouterr().err.partition("error: ")[2])
    assert refusals[0] == refusals[1]
    assert refusals[0].splitlines()[1:4] == [
        f"  - train, row 1: Gemma3Processor returns {words} for images",
        "    expected  outputs that GRPOTrainer of TRL passes to the model",
        "    fix       train this model by sft, or on rows without images",
    ]


def test_a_batch_without_pictures_gets_one_where_every_process_must_run_the_tower():
    processor = tiny_processor("llava")
    text_alone = {"messages": [said("user", "w1"), said("assistant", "w2")], "images": []}
    shown = {"messages": CHAT, "images": pictures()}
    plain = Pictured(processor)([text_alone])
    always = Pictured(processor, always=True)
    batch = always([text_alone])
    assert "pixel_values" not in plain
    assert batch["pixel_values"].shape[0] == 1
    assert batch["labels"].shape[0] == 2
    assert set(batch["labels"][1].tolist()) == {-100}
    tokens = plain["input_ids"].shape[1]
    assert torch.equal(batch["labels"][0, :tokens], plain["labels"][0])
    assert len(always([shown, text_alone])["labels"]) == 2


def test_rows_of_unlike_tiles_are_traced_and_more_rows_than_are_counted_are_sampled(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("isotype.train.rows.lengths.COUNTED_ROWS", 2)
    save_vision_model("idefics3", tmp_path / "model")
    rows = []
    for number, sizes in enumerate([[(40, 40)], [(64, 32), (30, 60)], [(32, 16)]]):
        names = [f"{number}-{place}.png" for place in range(len(sizes))]
        for name, size in zip(names, sizes, strict=True):
            picture(*size).save(name)
        turns = [said("user", [*[PLACE] * len(sizes), text("w1")]), said("assistant", "w2")]
        rows.append(json.dumps({"messages": turns, "images": names}))
    Path("t.jsonl").write_text("\n".join(rows) + "\n")
    words = "sft --model_name_or_path model --dataset_name t.jsonl --output_dir out --device cpu --max_steps 1 --lora_target_modules q_proj"
    status = main([*words.split(), "--per_device_train_batch_size", "3", "--save_strategy", "no"])
    output, errors = capsys.readouterr()
    assert status == 0, output + errors
    assert "IST199" not in output + errors
    assert "within half of the" in output
    assert "nothing says how long rows can be" not in output


@pytest.mark.usefixtures("unchecked")
def test_a_run_on_pictures_that_ends_with_nan_names_a_command_with_one(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    save_vision_model("llava", tmp_path / "model")
    picture(40, 30).save("a.png")
    row = {"messages": [said("user", "<image>w3"), said("assistant", "w4")], "images": ["a.png"]}
    Path("t.jsonl").write_text(f"{json.dumps(row)}\n" * 4)
    trainer = METHODS["sft"].trainer_class()
    sound = trainer.compute_loss

    def broken(self: Any, *args: Any, **kwargs: Any) -> Any:
        loss = sound(self, *args, **kwargs)
        scale = float("nan") if self.state.global_step == 1 else 1.0
        return (loss[0] * scale, *loss[1:]) if isinstance(loss, tuple) else loss * scale

    monkeypatch.setattr(trainer, "compute_loss", broken)
    more = "--max_steps 2 --per_device_train_batch_size 2 --save_steps 1 --lora_r 2 --device cpu"
    data = ("--model_name_or_path", "model", "--dataset_name", "t.jsonl", "--output_dir", "out")
    assert main(["sft", *data, *more.split()]) == 1
    error = " ".join(capsys.readouterr().err.split())
    assert "is a complete checkpoint; to use it: isotype chat out/checkpoint-1 --image FILE" in error

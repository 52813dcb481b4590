"""Processors that need pillow or torchvision: without the package, the message says how to install it."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from isotype.checkpoint import tokenizer as files
from isotype.checkpoint.tokenizer import tokenizer_of
from isotype.core.errors import CheckpointError
from tests.refusals import refused
from tests.zoo.processors import FAMILIES, TURNS, tiny_processor, tiny_tokenizer


@pytest.mark.lacking("needs a machine without torchvision" if find_spec("torchvision") else "")
def test_torchvision_is_named_where_a_processor_has_no_class_for_pillow(tmp_path):
    """The video processor of Qwen2-VL."""
    family = FAMILIES["qwen2_vl"]
    tiny_tokenizer(family).save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(TURNS.format(image=family.place))
    parts = {
        "processor_class": family.processor,
        "image_processor": {"image_processor_type": family.pictures, **family.image},
        "video_processor": {"video_processor_type": family.videos},
    }
    (tmp_path / "processor_config.json").write_text(json.dumps(parts))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2_vl"}))
    assert refused(CheckpointError, tokenizer_of, tmp_path) == (
        "the tokenizer cannot be read\n"
        f"  - {tmp_path}: Qwen2VLVideoProcessor needs torchvision, because transformers has no version of it that needs only pillow\n"
        "    expected  the package torchvision\n"
        "    fix       pip install torchvision; with a CPU build of torch, add --index-url https://download.pytorch.org/whl/cpu"
    )


def test_a_missing_processor_is_named(tmp_path: Path):
    tiny_processor("llava").save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llava"}))
    (tmp_path / "processor_config.json").unlink()
    assert refused(CheckpointError, tokenizer_of, tmp_path) == (
        "no processor in the checkpoint\n"
        f"  - {tmp_path}: neither processor_config.json nor preprocessor_config.json in it\n"
        "    expected  the processor of a model that takes images\n"
        "    fix       copy these files from the original model of these weights"
    )


def test_pillow_is_named(tmp_path: Path, monkeypatch):
    tiny_processor("llava").save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llava"}))
    assert tokenizer_of(tmp_path).image_token == "<image>"

    def lacking(*_: object, **__: object) -> object:
        raise ValueError(f"Could not load any image processor class for {tmp_path}.")

    monkeypatch.setattr(files, "find_spec", lambda name: None)
    monkeypatch.setattr(files, "pretrained", lacking)
    said = refused(CheckpointError, tokenizer_of, tmp_path)
    assert f"  - {tmp_path}: its image processor needs pillow\n" in said
    assert "    fix       pip install 'isotype[vision]'" in said

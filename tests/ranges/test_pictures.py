"""What images are to a model: by its processor, and by its config where there is none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from isotype.ranges.pictures import by_config, picture_place, pictures_of
from tests.pairwise import pairwise
from tests.train.test_picture_families import needs_torchvision
from tests.zoo.processors import FAMILIES, tiny_processor, tiny_vision_model

pytest.importorskip("PIL", reason="needs the package pillow")
SIZES = [[(1024, 768)], [(100, 300)], [(640, 480), (2000, 500)], [(1, 1)]]


def of_their_authors(name: str) -> tuple[Any, Any]:
    """The config of a family and its processor with images of the sizes that transformers has for it."""
    processor = tiny_processor(name)
    processor.image_processor = type(processor.image_processor)()
    config = {
        "gemma3": lambda: transformers.Gemma3Config(vision_config={"image_size": 224}, mm_tokens_per_image=4),
        "llava": transformers.LlavaConfig,
        "llava_next": transformers.LlavaNextConfig,
        "idefics3": lambda: transformers.Idefics3Config(vision_config={"image_size": 364, "patch_size": 14}),
        "mistral3": lambda: transformers.Mistral3Config(vision_config={"image_size": 1024, "patch_size": 16}),
        "qwen2_vl": transformers.Qwen2VLConfig,
    }[name]()
    for each in (processor, processor.image_processor):
        if name in ("llava", "llava_next", "mistral3") and hasattr(each, "patch_size"):
            each.patch_size = config.vision_config.patch_size if each is processor else each.patch_size
    if name in ("llava", "llava_next"):
        side = config.vision_config.image_size
        processor.image_processor.size = {"shortest_edge": side}
        processor.image_processor.crop_size = {"height": side, "width": side}
    if name == "idefics3":
        processor.image_seq_len = (364 // 14) ** 2 // config.scale_factor**2
    return config, processor


@pairwise(
    "name, sizes",
    [
        "gemma3",
        "llava",
        "llava_next",
        "idefics3",
        pytest.param("mistral3", marks=needs_torchvision),
        pytest.param("qwen2_vl", marks=needs_torchvision),
    ],
    SIZES,
    strength=1,
)
def test_the_config_says_what_the_processor_makes(name: str, sizes: list[tuple[int, int]]) -> None:
    config, processor = of_their_authors(name)
    by_processor, counted = pictures_of(config, processor, sizes), by_config(config, sizes)
    assert by_processor is not None
    assert counted is not None
    around = 4 * len(sizes) if name == "gemma3" else 0  # its processor writes line breaks, too
    assert counted.tokens == by_processor.tokens - around
    shapes = [{name: each.shape for name, each in some.inputs.items()} for some in (counted, by_processor)]
    assert shapes[0] == shapes[1]
    for own in ("image_grid_thw", "image_sizes"):
        assert own not in counted.inputs or torch.equal(counted.inputs[own], by_processor.inputs[own])


@pytest.mark.parametrize("name", ["gemma3", "llava_next", "idefics3"])
def test_a_model_takes_what_is_made_up(name: str) -> None:
    model, processor = tiny_vision_model(name), tiny_processor(name)
    for pictures in (
        pictures_of(model.config, processor, [(40, 40), (64, 20)]),
        by_config(model.config, [(30, 30)]),
    ):
        assert pictures is not None
        ids = torch.full((2, pictures.tokens + 3), 5)
        ids[:, 1 : 1 + pictures.tokens] = pictures.ids
        out = model(input_ids=ids, **pictures.batch(2), **pictures.marks(ids, 1, model))
        assert out.logits.isfinite().all()


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.pil])
def test_the_place_of_a_picture_is_cut_out_of_the_template(name: str) -> None:
    assert picture_place(tiny_processor(name)) == FAMILIES[name].place + " "
    processor = tiny_processor(name)
    processor.chat_template = (
        "{% for m in messages %}<s> user {% for part in m['content'] %}x"
        + FAMILIES[name].place
        + "y\n{% endfor %}</s>{% endfor %}"
    )
    assert picture_place(processor) in (f"x{FAMILIES[name].place}y\n", f"{FAMILIES[name].place}y\nx")


def test_nothing_is_made_up_where_nobody_says_it() -> None:
    assert by_config(transformers.LlamaConfig()) is None
    assert by_config(transformers.Qwen2VLConfig()) is None
    assert pictures_of(transformers.LlamaConfig(), None, [(64, 64)]) is None

"""Tiny vision-language models on disk, each with the processor of its family: real classes, a tokenizer of 128 words, no hub."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.models import quiet
from tests.zoo.shrink import IMAGE, VOCABULARY, tiny_config
from tests.zoo.vision import MODELS, PATCH, SIDE

TURNS = (
    "{{% for m in messages %}}{{{{ '<s> ' + m['role'] + ' : ' }}}}{{% if m['content'] is string %}}{{{{ m['content'] }}}}"
    "{{% else %}}{{% for part in m['content'] %}}{{% if part['type'] == 'image' %}}{{{{ '{image} ' }}}}"
    "{{% else %}}{{{{ part['text'] + ' ' }}}}{{% endif %}}{{% endfor %}}{{% endif %}}{{{{ ' </s> ' }}}}{{% endfor %}}"
    "{{% if add_generation_prompt %}}{{{{ '<s> assistant : ' }}}}{{% endif %}}"
)
WORDS = ("<pad>", "<unk>", "<s>", "</s>", "user", "assistant", "system", ":", "\n")


@dataclass(frozen=True)
class Family:
    """How a family reads its images.

    Attributes:
        processor: the processor's class.
        pictures: the class of its image processor; one that has a PIL backend is taken by that where torchvision does not load.
        image: its arguments.
        tokens: the special tokens from `IMAGE` on.
        place: what the chat template writes for an image.
        named: attribute of the tokenizer -> special token.
        arguments: of the processor.
        settings: of the configuration, over those of `tests.zoo.vision`.
        videos: the class of its video processor.
        pil: whether the processor works without torchvision.
    """

    processor: str
    pictures: str
    image: Mapping[str, Any]
    tokens: tuple[str, ...]
    place: str
    named: Mapping[str, str] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    videos: str = ""
    pil: bool = False


_SQUARE = {"size": {"height": SIDE, "width": SIDE}}
_LLAVA = {"patch_size": PATCH, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
_PINPOINTS = [[SIDE, SIDE], [SIDE, 2 * SIDE], [2 * SIDE, SIDE], [2 * SIDE, 2 * SIDE]]
_QWEN_TOKENS = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
_QWEN_NAMED = dict(
    zip(("image_token", "video_token", "vision_bos_token", "vision_eos_token"), _QWEN_TOKENS, strict=True)
)
_IDEFICS = (
    "<image>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>",
    *(f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)),
)  # fmt: skip
_INTERN = ("<IMG_CONTEXT>", "<video>", "<img>", "</img>")
_LLAMA4 = (
    "<|patch|>",
    "<|image|>",
    "<|image_start|>",
    "<|image_end|>",
    "<|tile_x_separator|>",
    "<|tile_y_separator|>",
)


def _qwen(processor: str, videos: str) -> Family:
    return Family(
        processor,
        "Qwen2VLImageProcessor",
        {"patch_size": PATCH, "merge_size": 2, "size": {"shortest_edge": 16 * 16, "longest_edge": 96 * 96}},
        _QWEN_TOKENS,
        "<|vision_start|><|image_pad|><|vision_end|>",
        _QWEN_NAMED,
        videos=videos,
    )


FAMILIES: dict[str, Family] = {
    "qwen2_vl": _qwen("Qwen2VLProcessor", "Qwen2VLVideoProcessor"),
    "qwen2_5_vl": _qwen("Qwen2_5_VLProcessor", "Qwen2VLVideoProcessor"),
    "qwen3_vl": _qwen("Qwen3VLProcessor", "Qwen3VLVideoProcessor"),
    "gemma3": Family(
        "Gemma3Processor",
        "Gemma3ImageProcessor",
        _SQUARE,
        ("<image_soft_token>", "_1", "_2", "_3", "<start_of_image>", "<end_of_image>"),
        "<start_of_image>",
        {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"},
        {"image_seq_length": 4},
        pil=True,
    ),
    "llava": Family(
        "LlavaProcessor",
        "CLIPImageProcessor",
        {"size": {"shortest_edge": SIDE}, "crop_size": {"height": SIDE, "width": SIDE}},
        ("<image>",),
        "<image>",
        arguments=_LLAVA,
        pil=True,
    ),
    "llava_next": Family(
        "LlavaNextProcessor",
        "LlavaNextImageProcessor",
        {"size": {"shortest_edge": SIDE}, "crop_size": {"height": SIDE, "width": SIDE}, "image_grid_pinpoints": _PINPOINTS},
        ("<image>",),
        "<image>",
        arguments=_LLAVA,
        settings={"image_grid_pinpoints": _PINPOINTS},
        pil=True,
    ),
    "idefics3": Family(
        "Idefics3Processor",
        "Idefics3ImageProcessor",
        {"size": {"longest_edge": 2 * SIDE}, "max_image_size": {"longest_edge": SIDE}},
        _IDEFICS,
        "<image>",
        arguments={"image_seq_len": 4},
        pil=True,
    ),
    "internvl": Family(
        "InternVLProcessor",
        "GotOcr2ImageProcessor",
        {**_SQUARE, "crop_to_patches": True, "min_patches": 1, "max_patches": 4},
        _INTERN,
        "<IMG_CONTEXT>",
        {
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
            "start_image_token": "<img>",
            "end_image_token": "</img>",
        },
        {"image_seq_length": 4},
        videos="InternVLVideoProcessor",
    ),
    "mistral3": Family(
        "PixtralProcessor",
        "PixtralImageProcessor",
        {"patch_size": 2 * PATCH, "size": {"longest_edge": 2 * SIDE}},
        ("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
        "[IMG]",
        arguments={"patch_size": PATCH, "spatial_merge_size": 2},
        settings={"vision_config": {"head_dim": 16, "image_size": 2 * SIDE}},
    ),
    "llama4": Family(
        "Llama4Processor",
        "Llama4ImageProcessor",
        {**_SQUARE, "max_patches": 4},
        _LLAMA4,
        "<|image|>",
        {"image_token": "<|image|>"},
        {"patch_size": PATCH, "pixel_shuffle_ratio": 0.5},
    ),
    "ovis2": Family(
        "Ovis2Processor",
        "Ovis2ImageProcessor",
        {**_SQUARE, "crop_to_patches": False},
        ("<IMG_ATOM>", "<image>", "<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>"),
        "<image>",
        {"image_token": "<image>"},
        {"image_seq_length": 16},
        pil=True,
    ),
}  # fmt: skip


def tiny_tokenizer(family: Family) -> Any:
    """A tokenizer of `VOCABULARY` ids whose last are the special tokens of the family."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    words = [*WORDS, *(f"w{number}" for number in range(IMAGE - len(WORDS)))]
    special = [*family.tokens, *(f"_{IMAGE + at}" for at in range(len(family.tokens), VOCABULARY - IMAGE))]
    tokenizer = Tokenizer(
        models.WordLevel({w: i for i, w in enumerate([*words, *special])}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    tokenizer.add_special_tokens([AddedToken(each, special=True, normalized=False) for each in family.tokens])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        padding_side="right",
        extra_special_tokens=dict(family.named),
    )


def tiny_processor(name: str) -> Any:
    """The processor of a family, with a chat template that writes images where they stand."""
    family = FAMILIES[name]
    pictures = getattr(transformers, family.pictures + ("Pil" if family.pil else ""))(**family.image)
    parts = {"image_processor": pictures, "tokenizer": tiny_tokenizer(family)}
    if family.videos:
        parts["video_processor"] = getattr(transformers, family.videos)()
    template = TURNS.format(image=family.place)
    return getattr(transformers, family.processor)(**parts, chat_template=template, **family.arguments)


def tiny_vision_model(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """The model of a family with random weights: noise on what is drawn as ones and zeros, so that there are digits to lose."""
    config = tiny_config(name, {**MODELS[name].settings, **FAMILIES[name].settings})
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1 or not parameter.any():
                parameter.add_(0.1 * torch.randn_like(parameter))
    for parameter in model.parameters():  # not the buffers: Llama 4's are complex
        parameter.data = parameter.data.to(dtype)
    return model


def save_vision_model(name: str, directory: Path, dtype: torch.dtype = torch.float32) -> Path:
    """The model of a family and its processor in `directory`."""
    with quiet():
        tiny_vision_model(name, dtype).save_pretrained(directory)
        tiny_processor(name).save_pretrained(directory)
    return directory


def picture(width: int, height: int, seed: int = 0) -> Any:
    """An image of noise, as pillow has it."""
    from PIL import Image

    draw = random.Random(seed)
    return Image.frombytes("RGB", (width, height), draw.randbytes(3 * width * height))


def picture_rows(count: int = 6) -> list[dict[str, Any]]:
    """Rows of a question about one to two images of several shapes with an answer, each image with its bytes."""
    draw, rows = random.Random(1), []
    for number in range(count):
        sizes = [(40, 40), (64, 32), (30, 60)][: 1 + number % 2]
        text = " ".join(f"w{draw.randrange(80)}" for _ in range(draw.randrange(2, 6)))
        asked = [*[{"type": "image"}] * len(sizes), {"type": "text", "text": text}]
        answer = " ".join(f"w{draw.randrange(80)}" for _ in range(draw.randrange(3, 6)))
        turns = [
            {"role": "user", "content": asked},
            {"role": "assistant", "content": [{"type": "text", "text": answer}]},
        ]
        rows.append({"messages": turns, "images": [picture(*size, seed=number) for size in sizes]})
    return rows


def save_picture_rows(path: Path, count: int = 6) -> Path:
    """`picture_rows` as JSONL with an `images` column of files in the same folder, or as parquet that holds them."""
    rows = picture_rows(count)
    if path.suffix == ".parquet":
        from datasets import Dataset

        Dataset.from_list(rows).to_parquet(path)
        return path
    for number, row in enumerate(rows):
        names = [f"{number}-{place}.png" for place in range(len(row["images"]))]
        for name, each in zip(names, row["images"], strict=True):
            each.save(path.parent / name)
        row["images"] = names
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path

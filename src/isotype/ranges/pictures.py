"""Image inputs of a row: token ids in the text, and tensors such as `pixel_values`.

The model's processor creates these inputs from blank images. If there is no processor, isotype computes them from the
config, provided that the config has the necessary values.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from isotype.compat.templates import render_chat

Size = tuple[int, int]
"""(width, height) in pixels."""

FILL = 5
"""Id of a text token. In most vocabularies, special tokens have smaller ids."""


@dataclass(frozen=True)
class Pictures:
    """The images of one row.

    Attributes:
        ids: int64 `[tokens]`, the images' tokens in the text, including the tokens around each image.
        kinds: bool `[tokens]`, True for tokens that represent a part of an image.
        inputs: argument name -> tensor of one row's images.
        source: a clause that names the processor or the config.
    """

    sizes: tuple[Size, ...]
    ids: torch.Tensor
    kinds: torch.Tensor
    inputs: Mapping[str, torch.Tensor] = field(default_factory=dict)
    source: str = ""

    @property
    def tokens(self) -> int:
        """Number of tokens in the text, including the tokens around each image."""
        return len(self.ids)

    @property
    def values(self) -> int:
        """Number of elements of the image inputs."""
        return sum(value.numel() for value in self.inputs.values())

    def words(self) -> str:
        """Describe the pictures, as in `2 images of 1024x768 in each row: 1,540 tokens, by the processor`."""
        if not self.sizes:
            return "no row has an image"
        shown = sorted({f"{width}x{height}" for width, height in self.sizes})
        noun = "image" if len(self.sizes) == 1 else "images"
        of = shown[0] if len(shown) == 1 else f"{len(shown)} sizes"
        return f"{len(self.sizes)} {noun} of {of} in each row: {self.tokens:,} tokens, {self.source}"

    def batch(self, rows: int) -> dict[str, torch.Tensor]:
        """Return the image inputs of a batch of `rows` equal rows."""
        return {name: torch.cat([value] * rows) for name, value in self.inputs.items()}

    def marks(self, ids: torch.Tensor, start: int, model: Any) -> dict[str, torch.Tensor]:
        """Return the model's `token_type_ids` for ids `[rows, length]` with images from column `start` on."""
        takes = inspect.signature(model.forward).parameters
        kinds = torch.zeros_like(ids)
        kinds[:, start : start + self.tokens] = self.kinds.long()
        return {name: kinds for name in ("token_type_ids", "mm_token_type_ids") if name in takes}


NONE = Pictures((), torch.tensor([], dtype=torch.long), torch.tensor([], dtype=torch.bool))


def pictures_of(config: Any, processor: Any | None, sizes: Sequence[Size]) -> Pictures | None:
    """Return a row's images by the model's processor, or else by its config; None if neither can create images."""
    if processor is not None and hasattr(processor, "image_processor"):
        return _by_processor(processor, sizes)
    return by_config(config, sizes)


def _by_processor(processor: Any, sizes: Sequence[Size]) -> Pictures:
    from PIL import Image

    place = picture_place(processor)
    images = [Image.new("RGB", size) for size in sizes]
    outputs = processor(
        images=[images], text=[place * len(images)], return_tensors="pt", add_special_tokens=False,
        return_mm_token_type_ids=True,
    )  # fmt: skip
    ids = outputs.pop("input_ids")[0]
    outputs.pop("attention_mask", None)
    type_ids = [outputs.pop(name, None) for name in ("token_type_ids", "mm_token_type_ids")]
    by_image_token = ids == getattr(processor, "image_token_id", -1)
    kinds = next((rows[0].bool() for rows in type_ids if rows is not None), by_image_token)
    inputs = {name: value for name, value in outputs.items() if isinstance(value, torch.Tensor)}
    return Pictures(tuple(sizes), ids, kinds, inputs, "by the model's processor")


def picture_place(processor: Any) -> str:
    """Return the text that the chat template writes for an image. It is the text that a second image adds to a chat with one image."""
    chats = ([{"role": "user", "content": [{"type": "image"}] * count}] for count in (1, 2))
    single, double = (str(render_chat(processor, chat, tokenize=False)) for chat in chats)
    longer = len(double) - len(single)
    same = next((at for at, (a, b) in enumerate(zip(single, double, strict=False)) if a != b), len(single))
    # The text around an image may begin or end like the image's text ("<image><|im_end|>"). Of the possible cuts, take
    # one that splits no special token.
    cuts = [
        double[at : at + longer]
        for at in range(max(0, same - 2 * longer), same + 1)
        if single[:at] + double[at : at + longer] + single[at:] == double
    ]
    special = [token.content for token in processor.tokenizer.added_tokens_decoder.values() if token.special]
    return max(reversed(cuts), key=lambda cut: sum(map(cut.count, special)))


def by_config(config: Any, sizes: Sequence[Size] | None = None) -> Pictures | None:
    """Return a row's images; None if the config lacks values. Without `sizes`, a row has one image in the only size of the tower."""
    vision = getattr(config, "vision_config", None)
    token = getattr(config, "image_token_id", None) or getattr(config, "image_token_index", None)
    rule = _RULES.get(str(getattr(config, "model_type", "")), _fixed)
    if vision is None or not isinstance(token, int) or (sizes is None and rule not in _ONE_SIZE):
        return None
    side = getattr(vision, "image_size", None)
    if sizes is None:
        if not isinstance(side, int):
            return None
        sizes = [(side, side)]
    try:
        counted = rule(config, vision, sizes)
    except (AttributeError, TypeError):
        return None  # a field that the rule reads is missing
    if counted is None:
        return None
    tokens, inputs = counted
    ids = torch.tensor([token if mark else FILL for mark in tokens])
    return Pictures(tuple(sizes), ids, ids == token, inputs, "by the config")


Counted = tuple[Sequence[bool], dict[str, torch.Tensor]]
"""(True for each token that represents an image, else False; the model's inputs)."""


def _fixed(config: Any, vision: Any, sizes: Sequence[Size]) -> Counted | None:
    """Return the images of a model such as Gemma 3 and PaliGemma, which resizes each image to a square of the tower's size."""
    tokens = getattr(config, "mm_tokens_per_image", None) or getattr(config, "image_seq_length", None)
    side = vision.image_size
    if not isinstance(tokens, int) or not isinstance(side, int):
        return None
    return [True] * tokens * len(sizes), {"pixel_values": torch.ones(len(sizes), 3, side, side)}


def _llava(config: Any, vision: Any, sizes: Sequence[Size]) -> Counted:
    side = vision.image_size
    tokens = (side // vision.patch_size) ** 2 + (config.vision_feature_select_strategy == "full")
    return [True] * tokens * len(sizes), {"pixel_values": torch.ones(len(sizes), 3, side, side)}


def _llava_next(config: Any, vision: Any, sizes: Sequence[Size]) -> Counted:
    """Return LLaVA-NeXT's images, with tokens for the whole image and for tiles without padding. A token follows each row of patches."""
    side, marks, tiles = vision.image_size, [], []
    patches = side // vision.patch_size
    for width, height in sizes:
        best = min(config.image_grid_pinpoints, key=lambda size: _wasted((width, height), (size[1], size[0])))
        rows, columns = best[0] // side * patches, best[1] // side * patches
        if width / height > columns / rows:
            rows -= (rows - int(round(height * (columns / width), 7))) // 2 * 2
        else:
            columns -= (columns - int(round(width * (rows / height), 7))) // 2 * 2
        marks += [True] * (patches**2 + rows * columns + rows)
        tiles.append(1 + (best[0] // side) * (best[1] // side))
    return marks, {
        "pixel_values": torch.ones(len(sizes), max(tiles), 3, side, side),
        "image_sizes": torch.tensor([[height, width] for width, height in sizes]),
    }


def _wasted(size: Size, into: Size) -> tuple[float, float]:
    """Scale an image to fit into a rectangle. Return a sort key: (-pixels of the image, pixels of padding)."""
    scale = min(into[0] / size[0], into[1] / size[1])
    pixels = min(int(size[0] * scale) * int(size[1] * scale), size[0] * size[1])
    return -pixels, into[0] * into[1] - pixels


def _patches(config: Any, vision: Any, sizes: Sequence[Size]) -> Counted:
    """Return the images of Qwen-VL, which resizes images within the processor's limits of pixels. Both sides are multiples of `factor`."""
    patch, merge = vision.patch_size, vision.spatial_merge_size
    least, most = _PIXELS.get(config.model_type, _PIXELS["qwen3_vl"])
    factor, grids = patch * merge, []
    for width, height in sizes:
        high, wide = (max(factor, round(side / factor) * factor) for side in (height, width))
        if high * wide > most:
            scale = math.sqrt(height * width / most)
            high, wide = (max(factor, math.floor(side / scale / factor) * factor) for side in (height, width))
        elif high * wide < least:
            scale = math.sqrt(least / (height * width))
            high, wide = (math.ceil(side * scale / factor) * factor for side in (height, width))
        grids.append([1, high // patch, wide // patch])
    count = sum(high * wide for _, high, wide in grids)
    channels = getattr(vision, "in_channels", None) or vision.in_chans
    marks = [mark for _, high, wide in grids for mark in (False, *[True] * (high * wide // merge**2), False)]
    return marks, {
        "pixel_values": torch.ones(count, channels * vision.temporal_patch_size * patch**2),
        "image_grid_thw": torch.tensor(grids),
    }


def _tiles(config: Any, vision: Any, sizes: Sequence[Size]) -> Counted:
    """Return Idefics 3's and SmolVLM's images: four tiles along the longer side, and the whole image as another tile."""
    side = vision.image_size
    per_tile = (side // vision.patch_size) ** 2 // config.scale_factor**2
    marks: list[bool] = []
    counts = []
    for width, height in sizes:
        scale = 4 * side / max(width, height)
        columns, rows = (math.ceil(int(length * scale) / side) for length in (width, height))
        tile = [False, False, *[True] * per_tile]
        for _ in range(rows):
            marks += [*tile * columns, False]
        marks += [*tile, False]
        counts.append(rows * columns + 1)
    tiles = sum(counts)
    return marks, {
        "pixel_values": torch.ones(1, tiles, 3, side, side),
        "pixel_attention_mask": torch.ones(1, tiles, side, side, dtype=torch.bool),
    }


def _lines(config: Any, vision: Any, sizes: Sequence[Size]) -> Counted:
    """Return Pixtral's and Mistral 3's images: larger ones shrink to the tower's size. A token follows each row of merged patches."""
    patch = vision.patch_size * config.spatial_merge_size
    marks: list[bool] = []
    shapes = []
    for width, height in sizes:
        shrink = max(1.0, width / vision.image_size, height / vision.image_size)
        columns, rows = ((math.floor(length / shrink) - 1) // patch + 1 for length in (width, height))
        marks += [*[True] * columns, False] * rows
        shapes.append((rows * patch, columns * patch))
    largest = [max(sides) for sides in zip(*shapes, strict=True)]
    return marks, {"pixel_values": torch.ones(len(sizes), 3, *largest), "image_sizes": torch.tensor(shapes)}


_RULES: Mapping[str, Callable[[Any, Any, Sequence[Size]], Counted | None]] = {
    **dict.fromkeys(("llava", "vipllava"), _llava),
    "llava_next": _llava_next,
    **dict.fromkeys(
        ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), _patches
    ),
    **dict.fromkeys(("idefics3", "smolvlm"), _tiles),
    "mistral3": _lines,
}
"""Model type -> rule. Other model types use `_fixed` if their config says how many tokens an image has."""
_ONE_SIZE = (_fixed, _llava)
"""Rules for vision towers that take images of only one size."""
_OLDER = (56 * 56, 28 * 28 * 1280)
_PIXELS = {"qwen2_vl": _OLDER, "qwen2_5_vl": _OLDER, "qwen3_vl": (256 * 256, 4096 * 4096)}
"""Maps a model type to (minimum, maximum) pixels of an image, from transformers' processor and Qwen3-VL's checkpoints."""

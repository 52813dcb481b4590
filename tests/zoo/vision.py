"""Vision-language models: tiny configurations and the layout of their images."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.zoo.shrink import IMAGE

SIDE = 32  # pixels
PATCH = 8
GRID = SIDE // PATCH  # patches a side

Inputs = dict[str, torch.Tensor]
Normal = Callable[..., torch.Tensor]


def _square(rows: int, normal: Normal) -> Inputs:
    return {"pixel_values": normal(rows, 3, SIDE, SIDE)}


def _sized(rows: int, normal: Normal) -> Inputs:
    return {**_square(rows, normal), "image_sizes": torch.tensor([[SIDE, SIDE]] * rows)}


def _one_of_many(rows: int, normal: Normal) -> Inputs:
    return {"pixel_values": normal(rows, 1, 3, SIDE, SIDE)}


def _tiles(rows: int, normal: Normal) -> Inputs:
    """An image that fits one tile: the whole of it and the tile."""
    return {
        "pixel_values": normal(rows, 2, 3, SIDE, SIDE),
        "image_sizes": torch.tensor([[SIDE, SIDE]] * rows),
    }


def _patches(rows: int, normal: Normal) -> Inputs:
    """Flattened patches of all images, two frames deep."""
    return {
        "pixel_values": normal(rows * GRID * GRID, 3 * 2 * PATCH * PATCH),
        "image_grid_thw": torch.tensor([[1, GRID, GRID]] * rows),
    }


def _padded_patches(rows: int, normal: Normal) -> Inputs:
    return {
        "pixel_values": normal(rows, GRID * GRID, 3 * PATCH * PATCH),
        "spatial_shapes": torch.tensor([[GRID, GRID]] * rows),
        "pixel_attention_mask": torch.ones(rows, GRID * GRID, dtype=torch.long),
    }


def _placed_patches(rows: int, normal: Normal) -> Inputs:
    y, x = torch.meshgrid(torch.arange(GRID), torch.arange(GRID), indexing="ij")
    places = torch.stack([x.flatten(), y.flatten()], dim=-1)
    return {
        "pixel_values": normal(rows, GRID * GRID, 3 * PATCH * PATCH),
        "image_position_ids": places.expand(rows, -1, -1).clone(),
    }


def _flattened(rows: int, normal: Normal) -> Inputs:
    """Patches that carry their row and column, as Pix2Struct takes them."""
    places = torch.cartesian_prod(torch.arange(1, GRID + 1), torch.arange(1, GRID + 1))
    patches = normal(rows, GRID * GRID, 3 * PATCH * PATCH)
    return {
        "flattened_patches": torch.cat([places.expand(rows, -1, -1).to(patches.dtype), patches], dim=-1),
    }


def _crossed(rows: int, normal: Normal) -> Inputs:
    """One image of one tile out of four, seen by every token."""
    return {
        "pixel_values": normal(rows, 1, 4, 3, SIDE, SIDE),
        "aspect_ratio_ids": torch.ones(rows, 1, dtype=torch.long),
        "aspect_ratio_mask": torch.tensor([[[1, 0, 0, 0]]] * rows),
        "cross_attention_mask": torch.tensor([1, 0, 0, 0]).expand(rows, 16, 1, 4).clone(),
    }


def _asked(rows: int, normal: Normal) -> Inputs:
    """An image with the question that the Q-Former reads."""
    return {**_square(rows, normal), "qformer_input_ids": torch.full((rows, 4), 5)}


@dataclass(frozen=True)
class VisionModel:
    """How one model takes its images.

    Attributes:
        images: from the number of rows and a source of normal floats to the image inputs.
        tokens: image tokens in each row of text.
        settings: of the configuration, beyond the usual sizes.
        rename: `pixel_values` under another name.
        types: whether the batch says which tokens are image tokens: the argument's name.
    """

    images: Callable[[int, Normal], Inputs]
    tokens: int
    settings: dict[str, Any] = field(default_factory=dict)
    rename: str = "pixel_values"
    types: str = ""


_GEMMA4 = {"hidden_size_per_layer_input": 16, "num_hidden_layers": 4}
_MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}
_GLM_ROPE = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.5,
        "mrope_section": [1, 1, 2],
    }
}
_QFORMER = {
    "num_query_tokens": 4,
    "qformer_config": {"encoder_hidden_size": 32},
    "text_config": {"word_embed_proj_dim": 64},
    "image_token_index": IMAGE,
}
_DEEP = {"vision_config": {"deepstack_visual_indexes": [0]}}
_PINPOINTS = {"image_grid_pinpoints": [[SIDE, SIDE]]}
_CODES = {"<image>": IMAGE, **{f"IMGIMG{letter}Z": 4 + place for place, letter in enumerate("ABCDEFGH")}}

MODELS: dict[str, VisionModel] = {
    "aya_vision": VisionModel(_square, 4),
    "blip": VisionModel(_square, 0, {"text_config": {"encoder_hidden_size": 32, "projection_dim": 32}}),
    "blip-2": VisionModel(_square, 4, _QFORMER),
    "chameleon": VisionModel(
        _square,
        4,
        {
            "vocabulary_map": _CODES,
            "vq_config": {
                "base_channels": 32,
                "num_embeddings": 8,
                "embed_dim": 16,
                "latent_channels": 16,
                "resolution": SIDE,
            },
        },
    ),
    "cohere2_vision": VisionModel(_square, 4, {"alignment_intermediate_size": 64}),
    "deepseek_vl": VisionModel(_square, 16),
    "gemma3": VisionModel(
        _square,
        4,
        # Gemma 3 has no pooling head, which transformers 5.20 makes by default.
        {"mm_tokens_per_image": 4, "vision_config": {"vision_use_head": False}},
        types="token_type_ids",
    ),
    "gemma4": VisionModel(
        _placed_patches,
        4,
        {
            "vision_config": {"pooling_kernel_size": 2, "position_embedding_size": 16, "head_dim": 16},
            "audio_config": None,
            "text_config": _GEMMA4,
        },
        types="mm_token_type_ids",
    ),
    "git": VisionModel(_square, 0),
    "glm4v": VisionModel(_patches, 4, {"text_config": _GLM_ROPE}, types="mm_token_type_ids"),
    "glm4v_moe": VisionModel(_patches, 4, {"text_config": _GLM_ROPE}, types="mm_token_type_ids"),
    "got_ocr2": VisionModel(
        _square, 1, {"vision_config": {"output_channels": 32, "window_size": 2, "global_attn_indexes": [1]}}
    ),
    "idefics2": VisionModel(
        _one_of_many,
        4,
        {
            "perceiver_config": {
                "resampler_n_latents": 4,
                "resampler_depth": 1,
                "resampler_n_heads": 2,
                "resampler_head_dim": 16,
            }
        },
    ),
    "idefics3": VisionModel(_one_of_many, 4),
    "instructblip": VisionModel(_asked, 4, _QFORMER),
    "internvl": VisionModel(_square, 4),
    "lfm2_vl": VisionModel(_padded_patches, 4, {"vision_config": {"num_patches": 16}}),
    "llama4": VisionModel(_square, 4, {"vision_config": {"intermediate_size": 128}}),
    "llava": VisionModel(_square, 16),
    "llava_next": VisionModel(_tiles, 36, _PINPOINTS),
    "llava_onevision": VisionModel(_tiles, 36, _PINPOINTS),
    "mistral3": VisionModel(_sized, 4, {"vision_config": {"head_dim": 16}}),
    "mllama": VisionModel(
        _crossed,
        0,
        {
            "text_config": {"cross_attention_layers": [1]},
            "vision_config": {
                "num_global_layers": 1,
                "intermediate_layers_indices": [0],
                "vision_output_dim": 64,
            },
        },
    ),
    "ovis2": VisionModel(_square, 16),
    "paligemma": VisionModel(_square, 16, {"projection_dim": 64}, types="token_type_ids"),
    "pix2struct": VisionModel(
        _flattened,
        0,
        {
            "vision_config": {
                "patch_embed_hidden_size": 192,
                "hidden_size": 64,
                "num_attention_heads": 4,
                "seq_len": 16,
            }
        },
    ),
    "qwen2_5_vl": VisionModel(
        _patches,
        4,
        {"text_config": _MROPE, "vision_config": {"window_size": 32, "fullatt_block_indexes": [1]}},
        types="mm_token_type_ids",
    ),
    "qwen2_vl": VisionModel(
        _patches, 4, {"text_config": _MROPE, "vision_config": {"hidden_size": 64}}, types="mm_token_type_ids"
    ),
    "qwen3_5": VisionModel(
        _patches,
        4,
        {"text_config": {"layer_types": ["linear_attention", "full_attention"]}},
        types="mm_token_type_ids",
    ),
    "qwen3_vl": VisionModel(_patches, 4, _DEEP, types="mm_token_type_ids"),
    "qwen3_vl_moe": VisionModel(_patches, 4, _DEEP, types="mm_token_type_ids"),
    "smolvlm": VisionModel(_one_of_many, 4),
    "video_llava": VisionModel(_square, 16, rename="pixel_values_images"),
    "vipllava": VisionModel(_square, 16, {"vision_feature_layer": [-1, -2, 0]}),
}


def batch(model: VisionModel, rows: int = 2, dtype: torch.dtype = torch.float32) -> Inputs:
    """`rows` images, each with text of 16 tokens or as many as the image needs; pixels in `dtype`."""
    generator = torch.Generator().manual_seed(2)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    ids = torch.randint(4, IMAGE, (rows, max(16, model.tokens + 8)), generator=generator)
    ids[:, 2 : 2 + model.tokens] = IMAGE
    labels = ids.masked_fill(ids == IMAGE, -100)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
    if model.types:
        inputs[model.types] = (ids == IMAGE).long()
    images = model.images(rows, normal)
    if model.rename != "pixel_values":
        images[model.rename] = images.pop("pixel_values")
    if "flattened_patches" in images:
        return {**images, "labels": labels}
    return {**inputs, **images}

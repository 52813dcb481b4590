"""A tiny configuration of any transformers architecture: usual size fields by name, exceptions as data."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

from isotype.model.shrunk import TEXT, TOWER, TOWERS

VOCABULARY = 128
LAYERS = 2
POSITIONS = 64
IMAGE = 120  # the image token; the tokens above it are special ones, the ones below text

Settings = Mapping[str, Any]

# Field name -> tiny value. A configuration takes the fields it has; the same name means the same thing everywhere.
TEXT_SIZES: dict[str, Any] = {
    **TEXT,
    **dict.fromkeys(("vocab_size", "unpadded_vocab_size", "vocab_size_per_layer_input"), VOCABULARY),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), LAYERS),
    **dict.fromkeys(("encoder_layers", "num_decoder_layers", "num_encoder_layers"), LAYERS),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), POSITIONS),
    "original_max_position_embeddings": POSITIONS,
    "sliding_window": 8,
    "sliding_window_size": 8,
    "sliding_window_pattern": 2,
    "local_attention": 8,
    "window_size": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    **dict.fromkeys(("image_token_id", "image_token_index"), IMAGE),
    **dict.fromkeys(("video_token_id", "video_token_index"), IMAGE + 1),
    **dict.fromkeys(("vision_start_token_id", "image_start_token_id"), IMAGE + 2),
    **dict.fromkeys(("vision_end_token_id", "image_end_token_id"), IMAGE + 3),
    **dict.fromkeys(("boi_token_id", "boi_token_index"), IMAGE + 4),
    **dict.fromkeys(("eoi_token_id", "eoi_token_index"), IMAGE + 5),
    "audio_token_id": IMAGE + 6,
}

# Vision towers are smaller still; where a text field has another meaning there, this one wins.
VISION_SIZES: dict[str, Any] = {
    **TEXT_SIZES,
    **TOWER,
    **dict.fromkeys(("num_hidden_layers", "depth", "layers", "num_layers"), LAYERS),
    "image_size": 32,
    "patch_size": 8,
    "vision_use_head": False,
    "num_position_embeddings": 16,
}


def tiny_config(model_type: str, settings: Settings = {}) -> PreTrainedConfig:  # noqa: B006 - never written to
    """The configuration of `model_type` with every known size field tiny; `settings` win, nested ones as dicts."""
    return _shrink(CONFIG_MAPPING[model_type], TEXT_SIZES, {}, settings)


def _shrink(
    cls: type[PreTrainedConfig], sizes: Settings, defaults: Settings, settings: Settings
) -> PreTrainedConfig:
    fields = {field.name for field in dataclasses.fields(cls)}
    values = {**defaults, **{name: value for name, value in sizes.items() if name in fields}}
    nested = cls.sub_configs_defaults or {}
    for name, spec in nested.items():
        given = settings.get(name)
        if given is None and name in settings:
            continue
        given = dict(given or {})
        kind = given.pop("model_type", spec.model_type)
        sub = spec.config_class if issubclass(spec.config_class, PreTrainedConfig) else CONFIG_MAPPING[kind]
        same = {key: value for key, value in spec.init_kwargs.items() if kind == spec.model_type}
        same.pop("model_type", None)
        tower = any(word in name for word in TOWERS)
        values[name] = _shrink(sub, VISION_SIZES if tower else TEXT_SIZES, same, given)
    values.update(
        {name: value for name, value in settings.items() if name not in values or name not in nested}
    )
    return cls(**values)

"""A tiny configuration of any transformers architecture: usual size fields by name, exceptions as data."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

VOCABULARY = 128
HIDDEN = 64
LAYERS = 2
HEADS = 4
HEAD_DIM = 16
EXPERTS = 4
EXPERT_SIZE = 32
POSITIONS = 64
IMAGE = 120  # the image token; the tokens above it are special ones, the ones below text

Settings = Mapping[str, Any]

# Field name -> tiny value. A configuration takes the fields it has; the same name means the same thing everywhere.
TEXT_SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "unpadded_vocab_size", "vocab_size_per_layer_input"), VOCABULARY),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embedding_size"), HIDDEN),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), LAYERS),
    **dict.fromkeys(("encoder_layers", "num_decoder_layers", "num_encoder_layers"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), HEADS),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads", "swa_num_attention_heads"), HEADS),
    **dict.fromkeys(("num_key_value_heads", "swa_num_key_value_heads"), 2),
    **dict.fromkeys(
        ("head_dim", "swa_head_dim", "kv_channels", "d_kv", "v_head_dim", "rotary_dim"), HEAD_DIM
    ),
    **dict.fromkeys(("query_pre_attn_scalar", "dim_head", "index_head_dim", "linear_head_dim"), HEAD_DIM),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "dff", "dim_ff", "ffn_hidden_size"), 96),
    **dict.fromkeys(("decoder_ffn_dim", "encoder_ffn_dim", "intermediate_size_mlp"), 96),
    **dict.fromkeys(("dense_intermediate_size", "prefix_dense_intermediate_size"), 96),
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
    # mixtures of experts
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), EXPERTS),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts", "experts_per_token"), 2),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size", "expert_ffn_dim"), EXPERT_SIZE),
    **dict.fromkeys(("shared_expert_intermediate_size", "shared_intermediate_size"), EXPERT_SIZE),
    "shared_experts_intermediate_size": EXPERT_SIZE,
    "moe_shared_expert_intermediate_size": EXPERT_SIZE,
    "zero_expert_num": 2,
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"), 1),
    **dict.fromkeys(("n_group", "topk_group"), 1),
    # latent attention
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "o_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    **dict.fromkeys(("index_n_heads", "index_topk"), 4),
    # state spaces and linear attention
    **dict.fromkeys(("state_size", "mamba_d_state", "ssm_state_size"), 8),
    **dict.fromkeys(
        ("mamba_n_heads", "mamba_num_heads", "linear_num_value_heads", "linear_num_heads"), HEADS
    ),
    "linear_num_key_heads": 2,
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "mamba_head_dim"), HEAD_DIM),
    **dict.fromkeys(("chunk_size", "mamba_chunk_size"), 8),
    "time_step_rank": 4,
    # a layer left out by chance would make a step depend on the random numbers
    **dict.fromkeys(("layerdrop", "encoder_layerdrop", "decoder_layerdrop"), 0.0),
}

# Vision towers are smaller still; where a text field has another meaning there, this one wins.
VISION_SIZES: dict[str, Any] = {
    **TEXT_SIZES,
    **dict.fromkeys(("hidden_size", "d_model", "embed_dim", "width"), 32),
    **dict.fromkeys(("num_attention_heads", "attention_heads", "num_heads", "num_key_value_heads"), 2),
    **dict.fromkeys(("intermediate_size", "mlp_dim"), 48),
    **dict.fromkeys(("num_hidden_layers", "depth", "layers", "num_layers"), LAYERS),
    "image_size": 32,
    "patch_size": 8,
    "vision_use_head": False,
    **dict.fromkeys(("out_hidden_size", "vision_output_dim", "output_proj_dims"), HIDDEN),
    **dict.fromkeys(("projector_input_dim", "projector_output_dim", "projector_hidden_size"), HIDDEN),
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
        tower = any(word in name for word in ("vision", "vq", "audio", "qformer", "perceiver"))
        values[name] = _shrink(sub, VISION_SIZES if tower else TEXT_SIZES, same, given)
    values.update(
        {name: value for name, value in settings.items() if name not in values or name not in nested}
    )
    return cls(**values)

"""The sizes of a small model, by the names of the fields in transformers configs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

HIDDEN = 64
HEADS = 4
HEAD_DIM = 16
EXPERTS = 4
EXPERT_SIZE = 32

TEXT: Mapping[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embedding_size"), HIDDEN),
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
    # layers that are dropped at random would make a step depend on random numbers
    **dict.fromkeys(("layerdrop", "encoder_layerdrop", "decoder_layerdrop"), 0.0),
}
"""Sizes of language models."""

TOWER: Mapping[str, Any] = {
    **TEXT,
    **dict.fromkeys(("hidden_size", "d_model", "embed_dim", "width"), 32),
    **dict.fromkeys(("num_attention_heads", "attention_heads", "num_heads", "num_key_value_heads"), 2),
    **dict.fromkeys(("intermediate_size", "mlp_dim"), 48),
    **dict.fromkeys(("out_hidden_size", "vision_output_dim", "output_proj_dims"), HIDDEN),
    **dict.fromkeys(("projector_input_dim", "projector_output_dim", "projector_hidden_size"), HIDDEN),
}
"""Sizes of vision and audio towers: `TEXT` with smaller values for some fields, and with fields of towers."""

LAYERS = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "decoder_layers",
    "encoder_layers",
    "num_decoder_layers",
    "num_encoder_layers",
    "depth",
)
"""Config fields that contain the number of layers."""

TOWERS = ("vision", "vq", "audio", "qformer", "perceiver")
"""Words in the names of the nested configs of towers."""

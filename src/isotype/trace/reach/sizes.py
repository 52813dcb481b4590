"""The sizes of a small model, by the names of the fields in transformers configs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

HIDDEN = 64
HEADS = 4


def _fields(sizes: Mapping[str, float]) -> Mapping[str, Any]:
    """Split the keys, lists of field names, at spaces: every field gets the size of its list."""
    return {name: size for names, size in sizes.items() for name in names.split()}


TEXT = _fields(
    {
        "hidden_size d_model n_embd embedding_size": HIDDEN,
        "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads": HEADS,
        "swa_num_attention_heads": HEADS,
        "num_key_value_heads swa_num_key_value_heads": 2,
        "head_dim swa_head_dim kv_channels d_kv v_head_dim rotary_dim query_pre_attn_scalar dim_head": 16,
        "index_head_dim linear_head_dim": 16,
        "intermediate_size ffn_dim d_ff dff dim_ff ffn_hidden_size decoder_ffn_dim encoder_ffn_dim": 96,
        "intermediate_size_mlp dense_intermediate_size prefix_dense_intermediate_size": 96,
        # mixtures of experts
        "num_experts num_local_experts n_routed_experts moe_num_experts": 4,
        "num_experts_per_tok moe_k moe_topk top_k_experts experts_per_token": 2,
        "moe_intermediate_size expert_ffn_hidden_size expert_ffn_dim shared_expert_intermediate_size": 32,
        "shared_intermediate_size shared_experts_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 32,
        "zero_expert_num": 2,
        "first_k_dense_replace num_dense_layers moe_layer_start_index n_group topk_group": 1,
        # latent attention
        "q_lora_rank kv_lora_rank o_lora_rank": 16,
        "qk_rope_head_dim qk_nope_head_dim": 8,
        "index_n_heads index_topk": 4,
        # state spaces and linear attention
        "state_size mamba_d_state ssm_state_size chunk_size mamba_chunk_size": 8,
        "mamba_n_heads mamba_num_heads linear_num_value_heads linear_num_heads": HEADS,
        "linear_num_key_heads": 2,
        "linear_key_head_dim linear_value_head_dim mamba_head_dim": 16,
        "time_step_rank": 4,
        # layers that are dropped at random would make a step depend on random numbers
        "layerdrop encoder_layerdrop decoder_layerdrop": 0.0,
    }
)
"""Sizes of language models."""

TOWER = {
    **TEXT,
    **_fields(
        {
            "hidden_size d_model embed_dim width": 32,
            "num_attention_heads attention_heads num_heads num_key_value_heads": 2,
            "intermediate_size mlp_dim": 48,
            "out_hidden_size vision_output_dim output_proj_dims": HIDDEN,
            "projector_input_dim projector_output_dim projector_hidden_size": HIDDEN,
        }
    ),
}
"""Sizes of vision and audio towers: `TEXT` with smaller values for some fields, and with fields that only towers have."""

LAYERS = (
    "num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers",
    "num_decoder_layers", "num_encoder_layers", "depth",
)  # fmt: skip
"""Config fields that contain the number of layers."""

TOWERS = ("vision", "vq", "audio", "qformer", "perceiver")
"""A nested config belongs to a tower if its name contains one of these words."""

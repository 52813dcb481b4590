"""Causal language models: what their tiny configurations need beyond the usual sizes."""

from __future__ import annotations

from typing import Any

import torch

from tests.zoo.shrink import IMAGE

LENGTH = 16
END = 2

_HYBRID = ["linear_attention", "full_attention"]
_MAMBA_HEADS = {"mamba_n_heads": 8, "mamba_d_head": 16}  # heads times head dim is twice the hidden size
_FULL_HEADS = {"num_key_value_heads": 4}  # latent attention has a key for each query head
_LATENT = ("axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3", "youtu")
_SHARED_BLOCKS = {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2}
_GEMMA4 = {"hidden_size_per_layer_input": 16, "num_hidden_layers": 4}
_SHARED_CACHE = {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}

SETTINGS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(_LATENT, _FULL_HEADS),
    "axk2": _FULL_HEADS,
    "bailing_hybrid": {"layer_types": _HYBRID, **_FULL_HEADS},
    "bamba": {"attn_layer_indices": [1], **_MAMBA_HEADS},
    "blt": {
        "vocab_size": 260,
        "encoder_hash_byte_group_vocab": 128,
        "use_cache": False,
        **{
            f"{part}_config": {"vocab_size": 260, "hidden_size_global": 64}
            for part in ("encoder", "decoder", "global", "patcher")
        },
    },
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8},
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 64},
    },
    "deepseek_v32": _FULL_HEADS,
    "dots1": {"n_shared_experts": 1},
    "dots3_note_text": _FULL_HEADS,
    "gemma3n_text": {
        **_SHARED_CACHE,
        "activation_sparsity_pattern": [0.0] * 4,
        "intermediate_size": 96,
        "hidden_size_per_layer_input": 16,
        "laurel_rank": 16,
    },
    "glm_moe_dsa": _FULL_HEADS,
    "emu3": {"model_type": "emu3_text_model"},
    "gemma4": {"audio_config": None, "text_config": _GEMMA4},
    "gemma4_unified": {
        "vision_config": {"mm_embed_dim": 32, "mm_posemb_size": 16},
        "audio_config": {"audio_embed_dim": 32},
    },
    "gemma4_text": _GEMMA4,
    "got_ocr2": {"vision_config": {"output_channels": 32, "window_size": 2, "global_attn_indexes": [1]}},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"layer_types": _HYBRID, **_MAMBA_HEADS},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {"layer_types": _HYBRID, **_FULL_HEADS},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "lfm3": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {**_FULL_HEADS, "head_dim": 8},
    "mamba2": {"head_dim": 32, "n_groups": 2},
    "moss_transcribe_diarize": {"audio_config": {"num_mel_bins": 8, "max_source_positions": 16}},
    "nemotron_h": {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"], "n_groups": 2},
    "phi4_multimodal": {
        "audio_config": {
            "num_blocks": 1,
            "ext_pw_out_channel": 32,
            "depthwise_separable_out_channel": 32,
            "nemo_conv_channels": 32,
        },
    },
    "qwen3_5_text": {"layer_types": _HYBRID},
    "qwen3_5_moe_text": {"layer_types": _HYBRID},
    "qwen3_next": {"layer_types": _HYBRID},
    "qwen4_exp_text": {
        "layer_types": _HYBRID,
        "hc_lowrank": 16,
        "ple_layer_ids": [1],
        "heads_per_ngram": 2,
        "ngram_vocab_size_base": 64,
        "make_ngram_vocab_size_divisible_by": 8,
        "split_ngram_parts": 2,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "reformer": {
        "is_decoder": True,
        "attn_layers": ["local", "lsh"],
        "axial_pos_shape": [4, 4],
        "axial_pos_embds_dim": [32, 32],
        "local_attn_chunk_length": 8,
        "lsh_attn_chunk_length": 8,
        "attention_head_size": 16,
        "feed_forward_size": 96,
    },
    "roc_bert": {"pronunciation_vocab_size": 128, "shape_vocab_size": 128},
    "xlm": {"emb_dim": 64, "n_words": 128},
    "xlnet": {"d_inner": 96},
    "xmod": {"default_language": "en_XX"},
    "zamba": _SHARED_BLOCKS,
    "zamba2": _SHARED_BLOCKS,
    "zaya": {"num_experts_per_tok": 1},
}

_TEXT_ONLY = "its class takes the configuration of its text model, which is an entry of its own"
_DRAFTS = "drafts from another model's key-value states, which a batch of token ids does not hold"

LEFT_OUT: dict[str, str] = {
    **dict.fromkeys(("dots3_note", "llama4", "qwen3_5", "qwen3_5_moe", "qwen4_exp"), _TEXT_ONLY),
    **dict.fromkeys(("gemma4_assistant", "gemma4_unified_assistant"), _DRAFTS),
    "gemma3n": "its vision tower is timm's, which isotype does not install; its text model is an entry of its own",
    "git": "its loss skips as many tokens as an image has: it is an entry of the family vision-language",
    **dict.fromkeys(
        ("musicgen", "musicgen_melody"), "its decoder takes codes of all codebooks at once, not token ids"
    ),
    "xlstm": "its native kernels have no backward: one loses the batch dimension, the other writes into saved tensors",
}


def batch(rows: int = 2, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """`[rows, 16]` token ids with labels."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(4, IMAGE, (rows, LENGTH), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}

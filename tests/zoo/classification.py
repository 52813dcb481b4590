"""Sequence classifiers: encoders, and decoders with a classification head."""

from __future__ import annotations

from typing import Any

import torch

from tests.zoo import causal

SETTINGS: dict[str, dict[str, Any]] = {
    "albert": {},
    "bart": {},
    "bert": {},
    "big_bird": {},
    "bloom": {},
    "camembert": {},
    "convbert": {},
    "deberta": {},
    "deberta-v2": {},
    "deepseek_v3": causal.SETTINGS["deepseek_v3"],
    "distilbert": {"dim": 64, "hidden_dim": 96},
    "electra": {},
    "ernie": {},
    "esm": {"mask_token_id": 3},
    "eurobert": {},
    "fnet": {},
    "funnel": {"block_sizes": [1, 1], "d_head": 16, "d_inner": 96},
    "gemma2": {},
    "gemma3_text": {},
    "gpt2": {},
    "gpt_neox": {},
    "gpt_oss": {},
    "ibert": {},
    "jamba": causal.SETTINGS["jamba"],
    "llama": {},
    "longformer": {"attention_window": 8},
    "mistral": {},
    "mixtral": {},
    "mobilebert": {"intra_bottleneck_size": 32, "true_hidden_size": 32},
    "modernbert": {},
    "mpnet": {},
    "mpt": {},
    "nomic_bert": {},
    "nystromformer": {"num_landmarks": 4, "segment_means_seq_len": 16},
    "opt": {},
    "perceiver": {
        "d_latents": 32,
        "num_latents": 8,
        "num_self_attends_per_block": 1,
        "num_self_attention_heads": 2,
        "num_cross_attention_heads": 2,
    },
    "phi3": {},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": {},
    "qwen3_next": causal.SETTINGS["qwen3_next"],
    "rembert": {"input_embedding_size": 32, "output_embedding_size": 32},
    "roberta": {},
    "roformer": {},
    "smollm3": {},
    "squeezebert": {},
    "t5": {"decoder_start_token_id": 0},
    "xlm-roberta": {},
    "xlnet": causal.SETTINGS["xlnet"],
}


def batch(rows: int = 2, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """`[rows, 16]` token ids and one class per row."""
    text = causal.batch(rows, dtype)
    ids = text["input_ids"].clone()
    ids[:, -1] = causal.END  # where encoder-decoders and decoders look for the end of the sentence
    return {"input_ids": ids, "attention_mask": text["attention_mask"], "labels": torch.arange(rows) % 2}

"""Encoder-decoders: text to text, and speech to text."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers.models.auto import modeling_auto

from tests.zoo import causal
from tests.zoo.shrink import VOCABULARY


def _text(rows: int = 2, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return causal.batch(rows, dtype)


def _speech(
    frames: int, channels: int, rows: int = 2, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    features = torch.randn(rows, channels, frames, generator=generator).to(dtype)
    return {"input_features": features, "labels": causal.batch(rows)["labels"]}


_START = {"decoder_start_token_id": 0}
_T5 = {**_START, "feed_forward_proj": "gated-gelu"}

MODELS: dict[str, tuple[dict[str, Any], Callable[..., dict[str, torch.Tensor]]]] = {
    "bart": ({}, _text),
    "bigbird_pegasus": ({}, _text),
    "blenderbot": ({}, _text),
    "blenderbot-small": ({}, _text),
    "fsmt": ({"src_vocab_size": VOCABULARY, "tgt_vocab_size": VOCABULARY, "langs": ["en", "de"]}, _text),
    "led": (
        {"attention_window": 8, "max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 64},
        _text,
    ),
    "longt5": ({**_T5, "local_radius": 4}, _text),
    "m2m_100": ({}, _text),
    "marian": ({**_START, "decoder_vocab_size": VOCABULARY}, _text),
    "mbart": ({}, _text),
    "mt5": (_T5, _text),
    "mvp": ({}, _text),
    "nllb-moe": ({"encoder_sparse_step": 1, "decoder_sparse_step": 1}, _text),
    "pegasus": (_START, _text),
    "pegasus_x": ({**_START, "num_global_tokens": 4, "block_size": 8}, _text),
    "plbart": ({}, _text),
    "prophetnet": ({**_START, "num_encoder_attention_heads": 4, "num_decoder_attention_heads": 4}, _text),
    "speech_to_text": (
        {
            "input_feat_per_channel": 8,
            "conv_channels": 16,
            "num_conv_layers": 1,
            "conv_kernel_sizes": [3],
            "max_source_positions": 64,
            "max_target_positions": 64,
            **_START,
        },
        partial(_speech, 8, 32),
    ),
    "switch_transformers": ({**_T5, "expert_capacity": 16}, _text),
    "t5": (_T5, _text),
    "t5gemma": ({}, _text),
    "umt5": (_T5, _text),
    "whisper": (
        {"num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 64, **_START},
        partial(_speech, 32, 8),
    ),
}


def class_name(model_type: str) -> str:
    """The class of `model_type` with its loss."""
    text = modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
    found: str = text.get(model_type) or modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES[model_type]
    return found

"""Tiny models whose values pass float16's range in the place where their architecture does so."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import transformers

from tests.zoo import causal, encoder_decoder, vision
from tests.zoo.shrink import tiny_config

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class WeakSpot:
    """One architecture and what is multiplied in it.

    Attributes:
        model_type: of the configuration.
        model_class: name of the class in transformers.
        factors: pattern of parameter names -> the power of two that they are multiplied by. Most factors cancel: the
            norm at the end of a residual stream takes away its scale, `down_proj` that of the gated product.
        settings: of the configuration, beyond the tiny sizes.
        batch: makes the batch.
        rate: learning rate; where the inputs of adapters are huge, so is what a step does.
    """

    model_type: str
    model_class: str
    factors: Mapping[str, int]
    settings: Mapping[str, Any] = field(default_factory=dict)
    batch: Callable[..., Batch] = causal.batch
    rate: float = 1e-5


def _stream(*names: str, power: int = 17) -> dict[str, int]:
    return dict.fromkeys(names, power)


_TWO_LAYERS = {"layer_types": ["sliding_attention", "full_attention"]}
_OWN_HEAD = {"tie_word_embeddings": False}
_ROTARY = _stream("o_proj.weight", "down_proj", "embed_tokens.weight")

SPOTS: dict[str, WeakSpot] = {
    "llama-stream": WeakSpot("llama", "LlamaForCausalLM", _ROTARY),
    "mistral-gated": WeakSpot(
        "mistral", "MistralForCausalLM", {"up_proj.weight": 16, "down_proj.weight": -11}, rate=1e-6
    ),
    "qwen2-value": WeakSpot("qwen2", "Qwen2ForCausalLM", {"v_proj": 15, "o_proj.weight": -15}),
    "qwen3-query": WeakSpot("qwen3", "Qwen3ForCausalLM", {"q_norm.weight": 15, "k_norm.weight": -12}),
    "granite-logits": WeakSpot(
        "granite", "GraniteForCausalLM", {"lm_head.weight": 15}, {"logits_scaling": 2.0**15, **_OWN_HEAD}
    ),
    "gemma2-norms": WeakSpot(
        "gemma2",
        "Gemma2ForCausalLM",
        {"embed_tokens.weight": 3, "post_(attention|feedforward)_layernorm.weight": 17},
        _TWO_LAYERS,
    ),
    "gemma3-embedding": WeakSpot(
        "gemma3_text",
        "Gemma3ForCausalLM",
        {"embed_tokens.weight": 16, "post_(attention|feedforward)_layernorm.weight": 17},
        {**_TWO_LAYERS, **_OWN_HEAD},
    ),
    "gemma3-tower": WeakSpot(
        "gemma3",
        "Gemma3ForConditionalGeneration",
        _stream("vision_tower.*(patch_embedding|out_proj|fc2|position_embedding)", power=14),
        vision.MODELS["gemma3"].settings,
        partial(vision.batch, vision.MODELS["gemma3"]),
    ),
    "llava-projector": WeakSpot(
        "llava",
        "LlavaForConditionalGeneration",
        {"projector.linear_1": 15, "projector.linear_2.weight": -15},
        vision.MODELS["llava"].settings,
        partial(vision.batch, vision.MODELS["llava"]),
    ),
    "t5-wo": WeakSpot(
        "t5",
        "T5ForConditionalGeneration",
        {"wi_1.weight": 12, "wo.weight": -8, r"Attention\.[qk]\.weight": -3},
        *encoder_decoder.MODELS["t5"],
        rate=1e-6,
    ),
    "pegasus-stream": WeakSpot(
        "pegasus",
        "PegasusForConditionalGeneration",
        _stream("out_proj", "fc2", "shared", "embed_positions"),
        {**encoder_decoder.MODELS["pegasus"][0], **_OWN_HEAD},
        encoder_decoder.MODELS["pegasus"][1],
    ),
    "gpt-oss-experts": WeakSpot("gpt_oss", "GptOssForCausalLM", {"experts.down_proj": 18}, _TWO_LAYERS),
    "qwen3-moe-experts": WeakSpot(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        {"experts.gate_up_proj": 10, "experts.down_proj": -14},
        rate=1e-6,
    ),
    "mixtral-stream": WeakSpot("mixtral", "MixtralForCausalLM", _ROTARY),
    "phi-stream": WeakSpot("phi", "PhiForCausalLM", _stream("dense", "fc2", "embed_tokens")),
    "gpt2-stream": WeakSpot("gpt2", "GPT2LMHeadModel", _stream("c_proj", "wte", "wpe"), _OWN_HEAD),
    "gpt-neox-stream": WeakSpot(
        "gpt_neox", "GPTNeoXForCausalLM", _stream("attention.dense", "4h_to_h", "embed_in")
    ),
    "opt-stream": WeakSpot(
        "opt", "OPTForCausalLM", _stream("out_proj", "fc2", "embed_tokens", "embed_positions"), _OWN_HEAD
    ),
    "falcon-stream": WeakSpot(
        "falcon",
        "FalconForCausalLM",
        _stream("attention.dense", "4h_to_h", "word_embeddings"),
        _OWN_HEAD,
    ),
}


def weak_model(name: str) -> Any:
    """The model in float32: every plain float16 copy of it overflows."""
    spot = SPOTS[name]
    config = tiny_config(spot.model_type, dict(spot.settings))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = getattr(transformers, spot.model_class)._from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                if parameter.ndim > 1:
                    parameter.mul_(5)  # weights as trained ones are: std 0.1
                else:
                    parameter.add_(0.1 * torch.randn_like(parameter))
                # As checkpoints lie: the same values under every policy, and in every quantization.
                parameter.copy_(parameter.bfloat16())
                for pattern, power in spot.factors.items():
                    if re.search(pattern, parameter_name):
                        parameter.mul_(2.0**power)
    return model.requires_grad_(False).train()

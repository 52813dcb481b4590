"""Tiny randomly initialised models of many architectures, and batches for them."""

from __future__ import annotations

import copy
import functools
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers

VOCABULARY = 128
HIDDEN = 64
LENGTH = 16
IMAGE_TOKEN = 120
IMAGE_TOKENS = 4

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_HEADS = {"head_dim": 16}
_LAYERS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}


def tiny_config(name: str, **settings: Any) -> Any:
    """A config of transformers by its class name, of two layers of four heads."""
    return getattr(transformers, name)(**{**_SIZES, **settings})


def _gemma3_vision() -> transformers.PreTrainedConfig:
    text = tiny_config("Gemma3TextConfig", **_HEADS, **_LAYERS)
    vision = transformers.SiglipVisionConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=32,
        patch_size=8,
        vision_use_head=False,
    )
    return transformers.Gemma3Config(
        text_config=text,
        vision_config=vision,
        mm_tokens_per_image=IMAGE_TOKENS,
        image_token_index=IMAGE_TOKEN,
        image_token_id=IMAGE_TOKEN,
        boi_token_index=IMAGE_TOKEN + 1,
        eoi_token_index=IMAGE_TOKEN + 2,
    )


def _t5() -> transformers.PreTrainedConfig:
    return transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=HIDDEN,
        d_kv=16,
        d_ff=96,
        num_layers=2,
        num_heads=4,
        feed_forward_proj="gated-gelu",
        decoder_start_token_id=0,
    )


CONFIGS: dict[str, Callable[[], transformers.PreTrainedConfig]] = {
    "llama": lambda: tiny_config("LlamaConfig"),
    "llama-tied-bias": lambda: tiny_config("LlamaConfig", tie_word_embeddings=True, attention_bias=True),
    "qwen3": lambda: tiny_config("Qwen3Config", **_HEADS),
    "gemma2": lambda: tiny_config("Gemma2Config", **_HEADS, **_LAYERS),
    "gemma3": lambda: tiny_config("Gemma3TextConfig", **_HEADS, **_LAYERS),
    "gemma3-vision": _gemma3_vision,
    "mistral": lambda: tiny_config("MistralConfig", sliding_window=8),
    "phi": lambda: tiny_config("PhiConfig"),
    "phi3": lambda: tiny_config("Phi3Config"),
    "gpt-oss": lambda: tiny_config(
        "GptOssConfig", **_HEADS, **_LAYERS, num_local_experts=4, num_experts_per_tok=2
    ),
    "qwen3-moe": lambda: tiny_config("Qwen3MoeConfig", **_HEADS, **_EXPERTS),
    "deepseek-v3": lambda: tiny_config(
        "DeepseekV3Config",
        num_key_value_heads=4,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        moe_intermediate_size=32,
        first_k_dense_replace=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=16,
    ),
    "ernie4_5-moe": lambda: tiny_config(
        "Ernie4_5_MoeConfig", moe_num_experts=4, moe_k=2, moe_intermediate_size=32, moe_layer_start_index=1
    ),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=64,
        n_embd=HIDDEN,
        n_layer=2,
        n_head=4,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "t5": _t5,
}
_CLASSES = {"gemma3-vision": "Gemma3ForConditionalGeneration", "t5": "T5ForConditionalGeneration"}


def tiny_model(name: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    """The architecture `name` with random weights drawn in float32, then rounded to `dtype`."""
    model, drawn = _drawn(CONFIGS[name], name, seed)
    torch.set_rng_state(drawn)
    return copy.deepcopy(model).to(dtype)


@functools.cache
def _drawn(config_of: Callable[[], Any], name: str, seed: int) -> tuple[Any, torch.Tensor]:
    """A model, and the state of the generator when it is made."""
    torch.manual_seed(seed)
    config = config_of()
    cls = getattr(transformers, _CLASSES.get(name, "AutoModelForCausalLM"))
    model = cls._from_config(config) if name in _CLASSES else cls.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1 or not parameter.any():
                # Norms start at exactly one and biases at zero, which every dtype holds: digits to lose are needed.
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model, torch.get_rng_state()


def one_layer(model: Any) -> Any:
    """`model` with the first layer of each of its stacks only: for what further layers would only repeat."""
    for name, stack in list(model.named_modules()):
        parent, _, child = name.rpartition(".")
        if child == "layers":
            setattr(model.get_submodule(parent), child, stack[:1])
    return model


def small_model(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """`tiny_model(name)` with one layer."""
    return one_layer(tiny_model(name, dtype))


def save_tiny(name: str, directory: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Path:
    """Save `tiny_model(name)` into `directory`; options go to `save_pretrained`."""
    if options:
        with quiet():
            tiny_model(name, dtype).save_pretrained(directory, **options)
        return directory
    directory.mkdir(parents=True, exist_ok=True)
    for file, content in _files(CONFIGS[name], name, dtype).items():
        (directory / file).write_bytes(content)
    return directory


@functools.cache
def _files(config_of: Callable[[], Any], name: str, dtype: torch.dtype) -> dict[str, bytes]:
    """What `save_pretrained` writes for a model; `config_of` is the one of `CONFIGS` now."""
    with tempfile.TemporaryDirectory() as folder:
        save_tiny(name, Path(folder), dtype, is_main_process=True)
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def tiny_batch(name: str, rows: int = 2) -> dict[str, torch.Tensor]:
    """A fixed batch for the architecture `name`: `[rows, LENGTH]` ids with labels, images where it takes them."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, IMAGE_TOKEN, (rows, LENGTH), generator=generator)
    if name != "gemma3-vision":
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}
    ids[:, 2 : 2 + IMAGE_TOKENS] = IMAGE_TOKEN
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "token_type_ids": (ids == IMAGE_TOKEN).long(),
        "pixel_values": torch.randn(rows, 3, 32, 32, generator=generator),
        "labels": ids.masked_fill(ids == IMAGE_TOKEN, -100),
    }


@contextmanager
def quiet() -> Iterator[None]:
    """No progress bars."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.enable_progress_bar()

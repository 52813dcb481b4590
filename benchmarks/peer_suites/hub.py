"""A cache of the hub that is made here: tiny random models and tokenizers under the names that other people's tests ask for."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tests.zoo.shrink import tiny_config

VOCABULARY = 1024
_REVISION = "0" * 40
_BYTES = 256
_SPECIAL = ("<pad>", "<s>", "</s>", "<unk>", "<mask>")
_T5 = {"decoder_start_token_id": 0, "feed_forward_proj": "gated-gelu"}
_CHAT = (
    "{% for message in messages %}<s>{{ message['role'] }}\n"
    "{% generation %}{{ message['content'] }}</s>{% endgeneration %}{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)

# name on the hub -> (class, model type, what its configuration has beside the usual tiny sizes)
_Entry = tuple[str, str, Mapping[str, Any]]
MODELS: dict[str, _Entry] = {
    **dict.fromkeys(
        ("peft-internal-testing/tiny-random-OPTForCausalLM", "peft-internal-testing/opt-125m"),
        ("OPTForCausalLM", "opt", {"word_embed_proj_dim": 64, "num_hidden_layers": 5}),
    ),
    **dict.fromkeys(
        (
            "peft-internal-testing/tiny-random-GPT2LMHeadModel",
            "peft-internal-testing/tiny-random-gpt2",
            "hf-internal-testing/tiny-random-gpt2",
        ),
        ("GPT2LMHeadModel", "gpt2", {"n_layer": 5}),
    ),
    "peft-internal-testing/tiny-random-GPTJForCausalLM": ("GPTJForCausalLM", "gptj", {}),
    **dict.fromkeys(
        (
            "trl-internal-testing/tiny-random-LlamaForCausalLM",
            "hf-internal-testing/tiny-random-LlamaForCausalLM",
            "peft-internal-testing/tiny-random-LlamaForCausalLM",
            "trl-internal-testing/tiny-LlamaForCausalLM-3.2",
        ),
        ("LlamaForCausalLM", "llama", {}),
    ),
    "trl-internal-testing/tiny-LlamaForSequenceClassification-3.2": (
        "LlamaForSequenceClassification",
        "llama",
        {},
    ),
    **dict.fromkeys(
        (
            "peft-internal-testing/tiny-dummy-qwen2",
            "trl-internal-testing/tiny-Qwen2ForCausalLM-2.5",
        ),
        ("Qwen2ForCausalLM", "qwen2", {}),
    ),
    "trl-internal-testing/tiny-Qwen2ForSequenceClassification-2.5": (
        "Qwen2ForSequenceClassification",
        "qwen2",
        {"num_labels": 1},
    ),
    "trl-internal-testing/tiny-Qwen3ForCausalLM": ("Qwen3ForCausalLM", "qwen3", {}),
    "trl-internal-testing/tiny-Qwen3MoeForCausalLM": ("Qwen3MoeForCausalLM", "qwen3_moe", {}),
    "hf-internal-testing/tiny-qwen3-moe": ("Qwen3MoeForCausalLM", "qwen3_moe", {}),
    "hf-internal-testing/Mixtral-tiny": ("MixtralForCausalLM", "mixtral", {}),
    "hf-internal-testing/tiny-random-Gemma3ForCausalLM": ("Gemma3ForCausalLM", "gemma3_text", {}),
    "hf-internal-testing/tiny-random-MistralForCausalLM": ("MistralForCausalLM", "mistral", {}),
    "trl-internal-testing/tiny-GptOssForCausalLM": ("GptOssForCausalLM", "gpt_oss", {}),
    "trl-internal-testing/tiny-Llama4ForCausalLM": ("Llama4ForCausalLM", "llama4_text", {}),
    "peft-internal-testing/tiny-random-BloomForCausalLM": ("BloomForCausalLM", "bloom", {}),
    "peft-internal-testing/tiny-random-GPTNeoXForCausalLM": ("GPTNeoXForCausalLM", "gpt_neox", {}),
    "peft-internal-testing/tiny-random-BartForConditionalGeneration": (
        "BartForConditionalGeneration",
        "bart",
        {},
    ),
    **dict.fromkeys(
        (
            "peft-internal-testing/tiny-random-T5ForConditionalGeneration-calibrated",
            "peft-internal-testing/tiny-random-T5ForConditionalGeneration",
            "peft-internal-testing/tiny-random-t5",
            "google/flan-t5-small",
        ),
        ("T5ForConditionalGeneration", "t5", _T5),
    ),
    "peft-internal-testing/tiny-random-RobertaModel": ("RobertaModel", "roberta", {}),
    "peft-internal-testing/tiny-random-RobertaForSequenceClassification": (
        "RobertaForSequenceClassification",
        "roberta",
        {},
    ),
    "peft-internal-testing/tiny-random-BertModel": ("BertModel", "bert", {}),
    "peft-internal-testing/tiny-random-BertForSequenceClassification": (
        "BertForSequenceClassification",
        "bert",
        {},
    ),
    "peft-internal-testing/tiny-random-DebertaModel": ("DebertaModel", "deberta", {}),
    "peft-internal-testing/tiny-random-DebertaV2Model": ("DebertaV2Model", "deberta-v2", {}),
    "peft-internal-testing/tiny-clip-text-2": ("CLIPTextModel", "clip_text_model", {}),
    "tiiuae/falcon-mamba-tiny-dev": ("FalconMambaForCausalLM", "falcon_mamba", {}),
}


def make_hub(cache: Path) -> dict[str, str]:
    """Make what is missing of `MODELS` under `cache`; returns the environment in which libraries find it, and nothing else."""
    hub = cache / "hub"
    for name, entry in MODELS.items():
        folder = hub / f"models--{name.replace('/', '--')}"
        if not (folder / "refs" / "main").exists():
            print("making", name, file=sys.stderr, flush=True)
            _save(folder / "snapshots" / _REVISION, *entry)
            (folder / "refs").mkdir(parents=True, exist_ok=True)
            (folder / "refs" / "main").write_text(_REVISION)
    names = ("HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE")
    places = (cache, hub, cache / "datasets")
    offline = dict.fromkeys(("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE"), "1")
    return {**os.environ, **dict(zip(names, map(str, places), strict=True)), **offline}


def _save(folder: Path, class_name: str, model_type: str, settings: Mapping[str, Any]) -> None:
    import transformers

    sizes = {"vocab_size": VOCABULARY, "max_position_embeddings": 512, "n_positions": 512, "n_ctx": 512}
    own = {**settings, "vocab_size": VOCABULARY}
    config = tiny_config(model_type, own)
    for name, size in sizes.items():
        if hasattr(config, name):
            setattr(config, name, size)
    torch.manual_seed(0)
    model = getattr(transformers, class_name)(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:  # outputs that differ visibly from adapter to adapter
                parameter.mul_(5)
    model.save_pretrained(folder)
    tokenizer(model_type).save_pretrained(folder)


def tokenizer(model_type: str = "llama") -> Any:
    """A tokenizer of bytes with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    assert len(letters) == _BYTES
    vocabulary = {token: at for at, token in enumerate((*_SPECIAL, *letters))}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    names = ("pad_token", "bos_token", "eos_token", "unk_token", "mask_token")
    special = dict(zip(names, _SPECIAL, strict=True))
    made = PreTrainedTokenizerFast(tokenizer_object=core, model_max_length=256, **special)
    made.chat_template = _CHAT
    return made

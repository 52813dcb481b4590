"""A tiny chat model with its tokenizer on disk, and data for each training method."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

WORDS = 56
TEMPLATE = (
    "{% for m in messages %}{{ '<s> ' + m['role'] + ' ' + m['content'] + ' </s> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s> assistant ' }}{% endif %}"
)


def save_chat_model(
    directory: Path, dtype: str = "float32", layers: int = 1, experts: int = 0, intermediate_size: int = 96
) -> Path:
    """Save a random Llama of `layers` layers (most tests of runs need one), or a Qwen3-MoE, with a tokenizer of 64 words and a chat template."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast, Qwen3MoeConfig
    from transformers.utils import logging

    words = ["<pad>", "<unk>", "<s>", "</s>", "user", "assistant", "system", ":"]
    words += [f"w{i}" for i in range(WORDS)]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=TEMPLATE,
        pad_token="<pad>",
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
    ).save_pretrained(directory)
    torch.manual_seed(0)
    more = {"num_experts": experts, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
    config = (Qwen3MoeConfig if experts else LlamaConfig)(
        vocab_size=len(words),
        hidden_size=64,
        intermediate_size=intermediate_size,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        pad_token_id=0,
        bos_token_id=2,
        eos_token_id=3,
        **(more if experts else {}),
    )
    logging.disable_progress_bar()
    AutoModelForCausalLM.from_config(config).to(getattr(torch, dtype)).save_pretrained(directory)
    logging.enable_progress_bar()
    return directory


def _words(generator: random.Random) -> str:
    return " ".join(f"w{generator.randrange(WORDS)}" for _ in range(generator.randrange(3, 8)))


def rows(method: str, count: int = 20) -> list[dict[str, Any]]:
    """Return conversational rows for `method`."""
    draw = random.Random(0)

    def message(role: str) -> list[dict[str, str]]:
        return [{"role": role, "content": _words(draw)}]

    makers: dict[str, Any] = {
        "sft": lambda i: {"prompt": message("user"), "completion": message("assistant")},
        "dpo": lambda i: {
            "prompt": message("user"),
            "chosen": message("assistant"),
            "rejected": message("assistant"),
        },
        "kto": lambda i: {
            "prompt": message("user"),
            "completion": message("assistant"),
            "label": i % 2 == 0,
        },
        "grpo": lambda i: {"prompt": message("user")},
    }
    make = makers[{"reward": "dpo", "rloo": "grpo"}.get(method, method)]
    return [make(i) for i in range(count)]


def save_rows(path: Path, data: Iterable[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in data), encoding="utf-8")
    return path


def reward_by_words(completions: list[Any], **columns: Any) -> list[float]:
    """Reward function for grpo and rloo that rarely gives two answers the same reward."""
    return [
        sum(1.0 / (2 + number) for number in map(_number, messages[0]["content"].split()))
        for messages in completions
    ]


def _number(word: str) -> int:
    return int(word[1:]) if word[1:].isdigit() else WORDS


def arguments(root: Path, name: str, steps: int, *more: str) -> list[str]:
    """Return the arguments of `isotype sft` with the model and rows in `root`, into the folder `name` in it."""
    return (
        f"""sft --model_name_or_path {root / "model"} --dataset_name {root / "train.jsonl"}
        --output_dir {root / name} --max_steps {steps} --logging_steps 1 --learning_rate 1e-2 --lora_dropout 0.2
        --per_device_train_batch_size 2 --gradient_checkpointing False --quantization nf4 --lora_target_modules q_proj
        --report_to none""".split()
        + list(more)
    )

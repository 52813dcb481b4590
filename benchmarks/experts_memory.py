"""Memory that `isotype check` foresees for mixtures of experts as published, from their configs alone.

One row of 1,024 tokens on an H100, nf4 (and mxfp4 where experts are published in it), r 16, float32 masters, AdamW, gradient checkpointing; adapters on attention alone, and on experts too. Beside it the sum of what a pencil
finds in the config: weights, adapters (the masters), their gradients, Adam's two states, and the layers' inputs that checkpointing keeps.

Run: python benchmarks/experts_memory.py [--record]
Prints a table.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import transformers

import results

_GIB = 1 << 30
_STEP = "--dtype bfloat16 --device h100 --batch 1 --length 1024 --gradient_checkpointing True --optim adamw_torch --lora_r 16"
_DENSE = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
_ATTENTION = "--lora_target_modules q_proj k_proj v_proj o_proj"
TARGETS = {"attention": _ATTENTION, "experts": ""}


def configs() -> dict[str, Any]:
    """As on the hub, what memory depends on."""
    qwen = transformers.Qwen3MoeConfig(
        vocab_size=151936,
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        max_position_embeddings=40960,
        tie_word_embeddings=False,
        dtype="bfloat16",
    )
    oss = transformers.GptOssConfig(num_hidden_layers=24, num_local_experts=32, dtype="bfloat16")
    oss.quantization_config = {"quant_method": "mxfp4", "modules_to_not_convert": _DENSE}
    qwen.architectures, oss.architectures = ["Qwen3MoeForCausalLM"], ["GptOssForCausalLM"]
    return {"Qwen3-30B-A3B": qwen, "gpt-oss-20b": oss}


def storages(config: Any) -> tuple[str, ...]:
    """What a base is stored in; experts that are published in mxfp4 stay in it beside nf4."""
    return ("nf4", "mxfp4") if getattr(config, "quantization_config", None) else ("nf4",)


def by_hand(config: Any, storage: str, adapts_experts: bool) -> dict[str, float]:
    """GiB of each part, from the sizes in the config."""
    hidden, layers, heads = config.hidden_size, config.num_hidden_layers, config.num_attention_heads
    published = bool(getattr(config, "quantization_config", None))
    experts = config.num_local_experts if published else config.num_experts
    inner = config.intermediate_size if published else config.moe_intermediate_size
    query, key = heads * config.head_dim, config.num_key_value_heads * config.head_dim
    attention = layers * 2 * hidden * (query + key)
    bits = {"experts": 4.25 if published else 4.5, "attention": 4.5 if storage == "nf4" else 16}
    stored = (
        layers * experts * 3 * hidden * inner * bits["experts"] / 8
        + attention * bits["attention"] / 8
        + 2 * config.vocab_size * hidden * 2
        + layers * experts * hidden * 4
    )
    values = layers * 16 * 2 * ((hidden + query) + (hidden + key))
    if adapts_experts:
        values += layers * experts * 16 * ((hidden + 2 * inner) + (inner + hidden))
    parts = {
        "weights": stored,
        "adapters": 4 * values,
        "gradients": 4 * values,
        "optimizer": 8 * values,
        "inputs": layers * 1024 * hidden * 2,
    }
    return {name: size / _GIB for name, size in parts.items()}


def foreseen(folder: Path, flags: str) -> dict[str, Any]:
    """Peak bytes, and those of each kind in its phase."""
    command = [sys.executable, "-m", "isotype", "check", "sft", "--model_name_or_path", str(folder), "--json"]
    done = subprocess.run(
        [*command, *_STEP.split(), *flags.split()], capture_output=True, text=True, check=False
    )
    memory: dict[str, Any] = json.loads(done.stdout)["memory"]
    return memory


def main() -> None:
    arguments = results.parsed(argparse.ArgumentParser(description=__doc__))
    for name, config in configs().items():
        with tempfile.TemporaryDirectory() as folder:
            config.save_pretrained(folder)
            for storage, (targets, flags) in itertools.product(storages(config), TARGETS.items()):
                memory = foreseen(Path(folder), f"--quantization {storage} {flags}")
                kinds = {
                    kind: size
                    for kind, size in memory["phases"][memory["peak_phase"]].items()
                    if size > _GIB // 10
                }
                words = ", ".join(f"{kind} {size / _GIB:.2f}" for kind, size in kinds.items())
                print(
                    f"{name:<14} {storage:<6} {targets:<10} {memory['peak_bytes'] / _GIB:5.1f} GiB   {words}"
                )
                hand = by_hand(config, storage, targets == "experts")
                hand["sum"] = sum(hand.values())
                hand["share"] = memory["peak_bytes"] / _GIB / hand["sum"]
                print("  by hand", ", ".join(f"{part} {size:.2f}" for part, size in hand.items()))
                if arguments.record:
                    measures = {"peak": results.Measure(memory["peak_bytes"] / _GIB, "GiB")}
                    for part, size in hand.items():
                        measures[part] = results.Measure(size, "×" if part == "share" else "GiB")
                    results.append(f"experts-memory/{name} {storage}", measures, targets)


if __name__ == "__main__":
    main()

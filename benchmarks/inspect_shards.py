"""How long `isotype inspect` takes for a large sharded checkpoint, process and all: seconds, median of RUNS.

Builds a folder in the shape of a mixture of experts of 671 billion weights in bfloat16: SHARDS safetensors files
with an index. Their data is a hole in the file and takes no disk.

Run: python benchmarks/inspect_shards.py [RUNS] [--plan]. With --plan, `isotype inspect --plan` (a DeepSeek-V3 config).
"""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

SHARDS = 1000
LAYERS, DENSE, EXPERTS, HIDDEN, FFN, EXPERT, VOCABULARY = 61, 3, 256, 7168, 18432, 2048, 129280
CONFIG = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "dtype": "bfloat16",
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "moe_intermediate_size": EXPERT,
    "n_routed_experts": EXPERTS,
    "num_hidden_layers": LAYERS,
    "first_k_dense_replace": DENSE,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "vocab_size": VOCABULARY,
}


def tensors() -> Iterator[tuple[str, list[int]]]:
    """Names and shapes of DeepSeek-V3's weights, without its layers that predict several tokens."""
    yield "model.embed_tokens.weight", [VOCABULARY, HIDDEN]
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        yield from _attention(f"{prefix}.self_attn")
        yield f"{prefix}.input_layernorm.weight", [HIDDEN]
        yield f"{prefix}.post_attention_layernorm.weight", [HIDDEN]
        if layer < DENSE:
            yield from _mlp(f"{prefix}.mlp", FFN)
            continue
        yield f"{prefix}.mlp.gate.weight", [EXPERTS, HIDDEN]
        yield f"{prefix}.mlp.gate.e_score_correction_bias", [EXPERTS]
        for expert in range(EXPERTS):
            yield from _mlp(f"{prefix}.mlp.experts.{expert}", EXPERT)
        yield from _mlp(f"{prefix}.mlp.shared_experts", EXPERT)
    yield "model.norm.weight", [HIDDEN]
    yield "lm_head.weight", [VOCABULARY, HIDDEN]


def _attention(prefix: str) -> Iterator[tuple[str, list[int]]]:
    yield f"{prefix}.q_a_proj.weight", [1536, HIDDEN]
    yield f"{prefix}.q_a_layernorm.weight", [1536]
    yield f"{prefix}.q_b_proj.weight", [24576, 1536]
    yield f"{prefix}.kv_a_proj_with_mqa.weight", [576, HIDDEN]
    yield f"{prefix}.kv_a_layernorm.weight", [512]
    yield f"{prefix}.kv_b_proj.weight", [32768, 512]
    yield f"{prefix}.o_proj.weight", [HIDDEN, 16384]


def _mlp(prefix: str, width: int) -> Iterator[tuple[str, list[int]]]:
    yield f"{prefix}.gate_proj.weight", [width, HIDDEN]
    yield f"{prefix}.up_proj.weight", [width, HIDDEN]
    yield f"{prefix}.down_proj.weight", [HIDDEN, width]


def build(folder: Path) -> int:
    """Write the checkpoint; returns the number of its values."""
    every = list(tensors())
    weight_map: dict[str, str] = {}
    for number in range(SHARDS):
        shard = f"model-{number + 1:05d}-of-{SHARDS:05d}.safetensors"
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, shape in every[number * len(every) // SHARDS : (number + 1) * len(every) // SHARDS]:
            begin, end = end, end + 2 * math.prod(shape)
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
            weight_map[name] = shard
        text = json.dumps(header).encode()
        with (folder / shard).open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + end)
    index = {
        "metadata": {"total_size": 2 * sum(math.prod(shape) for _, shape in every)},
        "weight_map": weight_map,
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return sum(math.prod(shape) for _, shape in every)


def main(runs: int = 5, plan: bool = False) -> None:
    """Build, inspect, print."""
    with tempfile.TemporaryDirectory() as folder:
        values = build(Path(folder))
        shards = len(list(Path(folder).glob("*.safetensors")))
        command = [sys.executable, "-m", "isotype", "inspect", folder, *(["--plan"] if plan else [])]
        seconds = []
        for _ in range(runs):
            start = time.perf_counter()
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            seconds.append(time.perf_counter() - start)
    median = statistics.median(seconds)
    print(
        f"{values / 1e9:.0f}B values in {shards} shards: {median:.2f} s ({min(seconds):.2f} to {max(seconds):.2f}, {runs} runs)"
    )
    print(json.dumps({"values": values, "shards": shards, "seconds": seconds, "plan": plan}))


if __name__ == "__main__":
    numbers = [int(argument) for argument in sys.argv[1:] if argument.isdigit()]
    main(numbers[0] if numbers else 5, "--plan" in sys.argv)

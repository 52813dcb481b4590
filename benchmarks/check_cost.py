"""What `isotype check` costs: seconds and peak resident memory of the whole process, from the config alone.

Run: python benchmarks/check_cost.py [NAME …] [--runs 3] [--record]. Prints medians, and one line of JSON. Each run is a fresh
interpreter; nothing is downloaded. The configs are those of the public model cards, written out below, with the
dtype and quantization of a LoRA run at 2 rows of 2048 tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import results as kept

_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "vocab_size": 128256,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}

CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "llama-3.1-8b": _LLAMA
    | {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "llama-3.1-70b": _LLAMA
    | {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
    },
    "llama-3.1-405b": _LLAMA
    | {
        "hidden_size": 16384,
        "intermediate_size": 53248,
        "num_hidden_layers": 126,
        "num_attention_heads": 128,
    },
    "gpt-oss-120b": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "dtype": "bfloat16",
        "vocab_size": 201088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 36,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 18,
        "max_position_embeddings": 131072,
        "attention_bias": True,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 4096,
            "truncate": False,
        },
        "quantization_config": {
            "quant_method": "mxfp4",
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
        },
    },
    # DeepSeek-V3 in bfloat16: the published config is quantized to float8, which has no backward.
    "deepseek-v3-671b": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "dtype": "bfloat16",
        "vocab_size": 129280,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 3,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "max_position_embeddings": 163840,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 40.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
        },
    },
}
# gpt-oss is saved in mxfp4, which is dequantized at load and cannot be quantized again.
_FLAGS: Mapping[str, tuple[str, ...]] = {"gpt-oss-120b": ()}
_COMMON = ("--device", "h200", "--batch", "2", "--length", "2048", "--json")


def once(directory: Path, flags: tuple[str, ...]) -> dict[str, Any]:
    """One whole process: seconds of wall clock and of CPU, peak MiB, and what the report says."""
    command = [sys.executable, "-m", "isotype", "check", str(directory), *flags, *_COMMON]
    output = directory / "report.json"
    started = time.perf_counter()
    with output.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(command, stdout=file)
        _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - started
    if os.waitstatus_to_exitcode(status) not in (0, 1):
        raise SystemExit(f"{' '.join(command)} failed")
    report = json.loads(output.read_text(encoding="utf-8"))
    # Linux counts ru_maxrss in KiB, macOS in bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    return {
        "seconds": seconds,
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
        "peak_mib": usage.ru_maxrss * unit / 2**20,
        "check_seconds": report["seconds"],
        "operators": report["operators"],
        "complete": report["complete"],
        "status": report["status"],
        "peak_gib_predicted": report["memory"]["peak_bytes"] / 2**30,
    }


def measure(names: Sequence[str], runs: int) -> dict[str, list[dict[str, Any]]]:
    """The processes of each config; they take turns, so that whatever else the machine does hits all alike."""
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as root:
        for name in names:
            (Path(root) / name).mkdir()
            (Path(root) / name / "config.json").write_text(json.dumps(CONFIGS[name]), encoding="utf-8")
        for _ in range(runs):
            for name in names:
                flags = _FLAGS.get(name, ("--quantization", "nf4"))
                results[name].append(once(Path(root) / name, flags))
    return results


def main() -> None:
    """Measure every config, or those named."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("names", nargs="*", choices=[[], *CONFIGS], metavar="NAME")
    parser.add_argument("--runs", type=int, default=3)
    asked = kept.parsed(parser)
    results = {}
    print(
        f"{'model':<18} {'wall s':>7} {'min-max':>13} {'CPU s':>7} {'peak MiB':>9} {'check s':>8} {'operators':>10}  verdict"
    )
    for name, rows in measure(asked.names or tuple(CONFIGS), asked.runs).items():
        middle = {key: statistics.median(row[key] for row in rows) for key in _MEASURED}
        found = results[name] = {**rows[-1], **middle, "all_seconds": [row["seconds"] for row in rows]}
        spread = f"{min(found['all_seconds']):.2f}-{max(found['all_seconds']):.2f}"
        print(
            f"{name:<18} {found['seconds']:>7.2f} {spread:>13} {found['cpu_seconds']:>7.2f} {found['peak_mib']:>9.0f} "
            f"{found['check_seconds']:>8.2f} {found['operators']:>10,}  {found['status']}"
            + ("" if found["complete"] else " (not traced to the end)"),
            flush=True,
        )
        if asked.record:
            units = {
                "cpu_seconds": "s",
                "peak_mib": "MiB",
                "check_seconds": "s",
                "operators": "",
                "status": "",
            }
            ends = (min(found["all_seconds"]), max(found["all_seconds"]))
            seconds = {"seconds": kept.Measure(found["seconds"], "s", ends)}
            kept.append(f"check/{name}", seconds | kept.measured(found, **units))
    print(json.dumps(results))


_MEASURED = ("seconds", "cpu_seconds", "peak_mib", "check_seconds")


if __name__ == "__main__":
    main()

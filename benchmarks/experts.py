"""Time of a training step of a mixture of experts with adapters on its experts, beside the same step with adapters on attention alone.

A random Qwen3-MoE model; CPU seconds of forward and backward of `--tokens` tokens on one thread, r 16, float32. Ways: `attention` (isotype.fuse, no
adapters on experts), `isotype` (isotype.fuse, adapters on experts), `PEFT` (its own path, transformers' default experts) and `PEFT eager`.
Every round runs each way once; the ratio is the median over rounds of a way's time to that of `attention` in the same round.

`--count` times nothing: it traces a step of one layer of Qwen3-30B-A3B's shape in bfloat16 on an H100 that is not there, 1,024 tokens, and counts the kernels, the bytes
read and written and the FLOPs of its experts.

Run: python benchmarks/experts.py [--experts 32] [--chosen 4] [--layers 4] [--width 512] [--tokens 512] [--storage none|nf4|int8]
[--rounds 7] [--skip PEFT …] [--count]
Prints a table and one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

import isotype
import results
from isotype.model.experts.quantize import place_quantized
from isotype.model.experts.stack import stacked_weights
from isotype.precision.devices.profile import device_profile
from isotype.records.request import Setup, StepRequest
from isotype.rules.kit.costs import bytes_moved
from isotype.trace.fake.step import trace_step

_ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


def model_of(arguments: argparse.Namespace, way: str, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=1024,
        hidden_size=arguments.width,
        moe_intermediate_size=arguments.inner,
        num_hidden_layers=arguments.layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=arguments.width // 8,
        num_experts=arguments.experts,
        num_experts_per_tok=arguments.chosen,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    if way == "PEFT eager":
        model.set_experts_implementation("eager")
    if arguments.storage != "none":
        for _, module, name in list(stacked_weights(model)):
            weight = getattr(module, name).data
            place_quantized(module, name, [weight], arguments.storage, torch.float32)
    policy = isotype.resolve_precision(model, dtype=dtype, device="cpu")
    targets: Any = _ATTENTION if way == "attention" else "all-linear"
    model = isotype.add_lora(model, policy, r=16, lora_alpha=16, target_modules=targets)
    if not way.startswith("PEFT"):
        isotype.fuse(model)
    return model.train()


def _name(arguments: argparse.Namespace) -> str:
    sizes = f"{arguments.experts} experts, {arguments.chosen} a token, {arguments.inner} wide"
    return f"{sizes}, {arguments.layers} layers, {arguments.tokens} tokens, {arguments.storage}"


def counted(way: str) -> tuple[int, int, int]:
    """Kernels, bytes and FLOPs of the experts of one layer in forward and backward."""
    shape = argparse.Namespace(
        experts=128, chosen=8, layers=1, width=2048, inner=768, tokens=1024, storage="none"
    )
    with torch.device("meta"):
        model = model_of(shape, way, torch.bfloat16)
    ids = torch.zeros(1, shape.tokens, dtype=torch.long)
    setup = Setup(
        device_profile("h100"), None, False, "adamw", torch.bfloat16, phases=("forward", "backward")
    )
    calls = [
        call
        for call in trace_step(StepRequest(model, {"input_ids": ids, "labels": ids}), setup).calls
        if ".mlp.experts" in call.module and bytes_moved(call)
    ]
    return len(calls), sum(map(bytes_moved, calls)), sum(call.flops for call in calls)


def print_counts(record: bool) -> None:
    for way in ("attention", "isotype", "PEFT"):
        kernels, moved, flops = counted(way)
        print(f"{way:<12} {kernels:>6} kernels {moved / 2**30:>7.2f} GiB {flops / 1e9:>8.1f} GFLOP")
        if record:
            measures = {
                "kernels": results.Measure(kernels, "kernels"),
                "bytes": results.Measure(moved / 2**30, "GiB"),
                "flops": results.Measure(flops / 1e9, "GFLOP"),
            }
            results.append("experts-counted/Qwen3-30B-A3B", measures, way)


def seconds(model: Any, ids: torch.Tensor) -> float:
    began = time.process_time()
    model(input_ids=ids, labels=ids).loss.backward()
    taken = time.process_time() - began
    model.zero_grad(set_to_none=True)
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (
        ("experts", 32),
        ("chosen", 4),
        ("layers", 4),
        ("width", 512),
        ("inner", 256),
        ("tokens", 512),
        ("rounds", 7),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--storage", default="none", choices=("none", "nf4", "int8"))
    parser.add_argument("--skip", nargs="*", default=[], choices=["PEFT", "PEFT eager"])
    parser.add_argument("--count", action="store_true")
    arguments = results.parsed(parser, "rounds")
    if arguments.count:
        print_counts(arguments.record)
        return
    torch.set_num_threads(1)
    ways = [each for each in ("attention", "isotype", "PEFT", "PEFT eager") if each not in arguments.skip]
    models = {way: model_of(arguments, way) for way in ways}
    ids = torch.randint(1024, (1, arguments.tokens), generator=torch.Generator().manual_seed(0))
    for model in models.values():
        seconds(model, ids)
    taken: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(arguments.rounds):
        for way, model in models.items():
            taken[way].append(seconds(model, ids))
    print(f"{'way':<12} {'seconds':>8} {'ratio':>6}  range")
    rows = {}
    for way, times in taken.items():
        ratios = sorted(a / b for a, b in zip(times, taken["attention"], strict=True))
        rows[way] = {"seconds": statistics.median(times), "ratio": statistics.median(ratios)}
        if arguments.record:
            measures = {
                "seconds": results.Measure(rows[way]["seconds"], "s"),
                "ratio": results.Measure(rows[way]["ratio"], "×", (ratios[0], ratios[-1])),
            }
            results.append(f"experts/{_name(arguments)}", measures, way, "attention")
        spread = f"{ratios[0]:.2f} to {ratios[-1]:.2f}"
        print(f"{way:<12} {rows[way]['seconds']:>8.3f} {rows[way]['ratio']:>6.2f}  {spread}")
    print(json.dumps({"setup": vars(arguments), "rows": rows}))


if __name__ == "__main__":
    main()

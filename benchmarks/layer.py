"""Where the time of a LoRA layer goes on a CPU: one decoder layer of SmolLM2-135M's shape, fused, forward and backward.

`parts` times the whole layer and its parts, each with nothing else around it, in turns: its MLP, its attention (projections,
rotary embeddings, kernel), the kernel alone, a norm, and the base's own matrix products alone. `products` times those products,
forward and gradient of the input, as torch multiplies (`mm`), by oneDNN's linear operator, which torch keeps to itself
(`torch.ops.mkldnn`), with weights as they lie and packed, and by isotype's compiled loops. Medians and quartiles, milliseconds.

Run: python benchmarks/layer.py [--rows 2] [--tokens 512] [--dtype bfloat16] [--turns 21] [--threads 2] [--record]
Prints both tables and one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import peft
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import isotype
import results
from isotype.core.dtypes import parse_dtype
from isotype.lora.attention.registered import attention_forward
from isotype.lora.loops.products import Sum, compiled_products, write_sums
from turns import in_turns, quartiles

HIDDEN, INNER, HEADS, KEY_HEADS = 576, 1536, 9, 3
SIZES = {"q, o": (HIDDEN, HIDDEN, 2), "k, v": (HIDDEN, HIDDEN * KEY_HEADS // HEADS, 2)}
SIZES |= {"gate, up": (HIDDEN, INNER, 2), "down": (INNER, HIDDEN, 1)}
Call = Callable[[], Any]
Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def fused_layer(dtype: torch.dtype) -> tuple[Any, Any]:
    """(a decoder layer whose linear layers have LoRA of rank 16 and are fused, the model's rotary embedding)"""
    config = LlamaConfig(
        hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=2, num_attention_heads=HEADS,
        num_key_value_heads=KEY_HEADS, vocab_size=64,
    )  # fmt: skip
    lora = peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")
    model: Any = peft.get_peft_model(LlamaForCausalLM(config).to(dtype), lora)
    isotype.fuse(model)
    inner = model.base_model.model.model
    return inner.layers[1].train(), inner.rotary_emb


def parts(rows: int, tokens: int, dtype: torch.dtype, turns: int) -> dict[str, list[float]]:
    """Milliseconds of the layer and of its parts, forward and backward."""
    layer, rotary = fused_layer(dtype)
    x = torch.randn(rows, tokens, HIDDEN).to(dtype).requires_grad_()
    where = rotary(x, torch.arange(tokens)[None])
    heads = HIDDEN // HEADS
    q, k, v = (
        torch.randn(rows, tokens, count, heads).to(dtype).transpose(1, 2).requires_grad_()
        for count in (HEADS, KEY_HEADS, KEY_HEADS)
    )
    outputs: dict[str, tuple[Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]] = {
        "layer": (lambda x: layer(x, position_embeddings=where, attention_mask=None), (x,)),
        "MLP": (layer.mlp, (x,)),
        "attention": (
            lambda x: layer.self_attn(x, position_embeddings=where, attention_mask=None)[0],
            (x,),
        ),
        "its kernel": (lambda q, k, v: attention_forward(layer.self_attn, q, k, v, None)[0], (q, k, v)),
        "norm": (layer.input_layernorm, (x,)),
    }

    matrices = [
        made(rows * tokens, columns, out, dtype)
        for columns, out, count in SIZES.values()
        for _ in range(count)
    ]

    def base() -> None:
        for a, weight, grad in matrices:
            torch.mm(a, weight.t())
            torch.mm(grad, weight)

    both = {name: partial(forward_and_backward, *each) for name, each in outputs.items()}
    return in_turns({**both, "base products": base}, turns, warm_up=2)


def forward_and_backward(call: Callable[..., torch.Tensor], inputs: tuple[torch.Tensor, ...]) -> None:
    """One call with these inputs, and their gradients."""
    out = call(*inputs)
    torch.autograd.grad(out, inputs, torch.ones_like(out))


def made(rows: int, columns: int, out: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """(X, W, gradient of X Wᵀ)"""
    shapes = (rows, columns), (out, columns), (rows, out)
    return tuple(torch.randn(*shape).to(dtype) for shape in shapes)


def products(rows: int, dtype: torch.dtype, turns: int) -> dict[str, dict[str, list[float]]]:
    """Milliseconds of one product X Wᵀ and one of the gradient with W, each way, for every shape."""
    found = {}
    for name, (columns, out, _) in SIZES.items():
        x, weight, grad = made(rows, columns, out, dtype)
        packed, turned = (
            torch.ops.mkldnn._reorder_linear_weight(each.clone(memory_format=torch.contiguous_format), rows)
            for each in (weight, weight.t())
        )
        calls: dict[str, Call] = {
            "mm": partial(pair, lambda a, w: a @ w.t(), x, grad, weight, weight.t()),
            "oneDNN": partial(pair, linear, x, grad, weight, weight.t()),
            "packed": partial(pair, linear, x, grad, packed, turned),
        }
        if compiled_products().has("sums_of_products", dtype):
            calls["loops"] = partial(pair, by_loops, x, grad, weight, weight.t())
        found[name] = in_turns(calls, turns, warm_up=2)
    return found


def pair(
    way: Product, x: torch.Tensor, grad: torch.Tensor, weight: torch.Tensor, turned: torch.Tensor
) -> None:
    """X Wᵀ, and the gradient's product with W."""
    way(x, weight)
    way(grad, turned)


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """X Wᵀ by oneDNN."""
    made: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    return made


def by_loops(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """X Wᵀ by isotype's compiled loops."""
    made = x.new_empty(x.shape[0], weight.shape[0])
    write_sums([Sum(made, [(x, weight.t())])], compiled=True)
    return made


def shown(values: list[float]) -> str:
    low, middle, high = quartiles(values)
    return f"{middle:8.2f} ({low:.2f}..{high:.2f})"


def keep(figure: str, times: dict[str, list[float]], rates: dict[str, dict[str, list[float]]]) -> None:
    """Add the layer to the file of results: its parts, and how many times as fast as `mm` ways of multiplying are, over all shapes."""
    middle = {name: statistics.median(values) for name, values in times.items()}
    measures = {
        name.replace(" ", "_"): results.Measure(middle[name], "ms", quartiles(values)[::2])
        for name, values in times.items()
    }
    measures["over_products"] = results.Measure(middle["layer"] / middle["base products"], "×")
    for way in ("loops", "oneDNN", "packed"):
        pairs = [(ways["mm"], ways[way]) for ways in rates.values() if way in ways]
        ratios = [statistics.median(mm) / statistics.median(own) for mm, own in pairs]
        if ratios:
            measures[f"{way}_over_mm"] = results.Measure(unit="×", spread=(min(ratios), max(ratios)))
    results.append(figure, measures)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--turns", type=int, default=21)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    asked = results.parsed(parser)
    torch.set_num_threads(asked.threads)
    dtype = parse_dtype(asked.dtype)
    times = parts(asked.rows, asked.tokens, dtype, asked.turns)
    whole = statistics.median(times["layer"])
    print(f"{'part':<14} {'ms (quartiles)':<26} of the layer")
    for name, values in times.items():
        print(f"{name:<14} {shown(values):<26} {statistics.median(values) / whole:>6.0%}")
    rates = products(asked.rows * asked.tokens, dtype, asked.turns)
    print(f"\n{'product':<10} {'way':<7} {'ms (quartiles)':<26} mm over it")
    for name, ways in rates.items():
        for way, values in ways.items():
            ratio = statistics.median(ways["mm"]) / statistics.median(values)
            print(f"{name:<10} {way:<7} {shown(values):<26} {ratio:>6.2f}")
    if asked.record:
        keep(f"layer/{asked.dtype}, {asked.rows} x {asked.tokens}", times, rates)
    print(json.dumps({"parts": times, "products": rates, "threads": asked.threads}))


if __name__ == "__main__":
    main()

"""Attention of a training step on a CPU: isotype's strips, torch's scaled_dot_product_attention, and eager.

The kernels take turns, so that they share machine and minute; a ratio is of times in one turn. `eager` is what transformers'
models do without a kernel: it rounds scores to the dtype, and its results are further from float64. Memory is what a forward
and backward add to the largest resident size, in a process of its own (on Linux).

Run: python benchmarks/attention.py [--threads 1] [--length 512 ...] [--dtype bfloat16 ...] [--turns 9] [--kind masked] [--heads 9 3 64] [--batch 2]
"""

from __future__ import annotations

import argparse
import multiprocessing
import re
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch.nn.functional import scaled_dot_product_attention

from isotype.core.dtypes import dtype_name, parse_dtype
from isotype.core.names import format_bytes
from isotype.lora.attention import strips
from isotype.lora.attention.plan import block_rows, plan_of, plan_of_mask
from turns import in_turns

Tensors = tuple[torch.Tensor, ...]
Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, str], torch.Tensor]


def _causal_mask(q: torch.Tensor) -> torch.Tensor:
    return torch.ones(1, 1, q.shape[2], q.shape[2], dtype=torch.bool).tril()


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kind: str) -> torch.Tensor:
    """As transformers calls torch's kernel: with a mask, keys and values are repeated for each query head."""
    if kind != "masked":
        return scaled_dot_product_attention(q, k, v, is_causal=kind == "causal", enable_gqa=True)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    return scaled_dot_product_attention(q, k, v, attn_mask=_causal_mask(q))


def in_strips(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kind: str) -> torch.Tensor:
    rows = block_rows(q.shape[1] // k.shape[1])
    if kind == "masked":
        plan = plan_of_mask(_causal_mask(q), len(q), rows)
    else:
        plan = plan_of((len(q), q.shape[2], k.shape[2]), rows, causal=kind == "causal")
    return strips.attention(q, k, v, plan)


def eager(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kind: str) -> torch.Tensor:
    """As transformers' `eager_attention_forward`: whole matrices, scores in the dtype, softmax in float32."""
    group = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(group, 1).mT * q.shape[-1] ** -0.5
    if kind != "full":
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, torch.finfo(q.dtype).min)
    p = scores.softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32)).to(q.dtype)
    out: torch.Tensor = p @ v.repeat_interleave(group, 1)
    return out


EVERY: dict[str, Kernel] = {"sdpa": sdpa, "strips": in_strips, "eager": eager}


def given(
    batch: int, heads: tuple[int, int, int], length: int, dtype: torch.dtype, size: float = 1.0
) -> Tensors:
    """q, k, v as models give them, and the gradient of the output."""
    torch.manual_seed(0)
    made = [torch.randn(batch, length, count, heads[2]) for count in (heads[0], heads[1], heads[1], heads[0])]
    made[:2] = [x * size for x in made[:2]]
    return tuple(x.to(dtype).transpose(1, 2).requires_grad_(n < 3) for n, x in enumerate(made))


def step(
    kernel: Callable[..., torch.Tensor], tensors: Tensors, *, backward: bool, kind: str = "causal"
) -> Tensors:
    if not backward:
        with torch.no_grad():
            return (kernel(*tensors[:3], kind),)
    out = kernel(*tensors[:3], kind)
    return out.detach(), *torch.autograd.grad(out, tensors[:3], tensors[3])


def times(tensors: Tensors, turns: int, *, backward: bool, kind: str) -> dict[str, list[float]]:
    """Milliseconds of each kernel in each turn."""
    steps = {
        name: partial(step, kernel, tensors, backward=backward, kind=kind) for name, kernel in EVERY.items()
    }
    return in_turns(steps, turns)


def _grown(name: str, arguments: tuple[int, tuple[int, int, int], int, torch.dtype], threads: int) -> int:
    torch.set_num_threads(threads)
    tensors = given(*arguments)
    step(EVERY[name], tuple(x[:, :, :32] for x in tensors), backward=True)
    Path("/proc/self/clear_refs").write_text("5")  # the largest size from here on
    before = _largest()
    step(EVERY[name], tensors, backward=True)
    return _largest() - before


def _largest() -> int:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def memory(*arguments: object) -> int:
    """Bytes that a step adds to the largest resident size."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return int(pool.apply(_grown, arguments))


def errors(
    batch: int, heads: tuple[int, int, int], dtype: torch.dtype, size: float
) -> dict[str, list[float]]:
    """Relative errors of out, dq, dk and dv against float64."""
    tensors = given(batch, heads, 512, dtype, size)
    exact = step(
        eager, tuple(x.detach().double().requires_grad_(n < 3) for n, x in enumerate(tensors)), backward=True
    )
    return {
        name: [
            float((one.double() - right).norm() / right.norm())
            for one, right in zip(step(kernel, tensors, backward=True), exact, strict=True)
        ]
        for name, kernel in EVERY.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--length", type=int, nargs="+", default=[128, 512, 2048])
    parser.add_argument("--dtype", type=parse_dtype, nargs="+", default=[torch.bfloat16, torch.float32])
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument(
        "--heads", type=int, nargs=3, default=[9, 3, 64], metavar=("QUERY", "KEY", "DIMENSION")
    )
    parser.add_argument("--kind", choices=["causal", "full", "masked"], default="causal")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    heads = tuple(arguments.heads)
    for dtype in arguments.dtype:
        for length in arguments.length:
            shape = (arguments.batch, heads, length, dtype)
            tensors = given(*shape)
            print(
                f"{dtype_name(dtype)}, {arguments.batch} x {length} tokens, heads {heads}, {arguments.threads} threads"
            )
            for backward in (False, True):
                taken = times(tensors, arguments.turns, backward=backward, kind=arguments.kind)
                print("  forward and backward" if backward else "  forward")
                for name, each in taken.items():
                    ratios = sorted(torchs / own for torchs, own in zip(taken["sdpa"], each, strict=True))
                    low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
                    print(
                        f"    {name:7} {statistics.median(each):9.2f} ms   {statistics.median(ratios):.2f} times as fast as "
                        f"sdpa (quartiles {low:.2f} to {high:.2f})"
                    )
            grown = ", ".join(
                f"{name} {format_bytes(memory(name, shape, arguments.threads))}" for name in EVERY
            )
            print(f"  added memory: {grown}", flush=True)
        for size in (1.0, 2.5, 5.0):
            print(f"  relative error of out, dq, dk, dv at 512 tokens, q and k of size {size}")
            for name, found in errors(arguments.batch, heads, dtype, size).items():
                print(f"    {name:7} " + "  ".join(f"{each:.1e}" for each in found))


if __name__ == "__main__":
    main()

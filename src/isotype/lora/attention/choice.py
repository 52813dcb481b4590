"""Chooses the fastest attention kernel on this machine, by one measurement for each class of shapes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch.nn.functional import scaled_dot_product_attention

from isotype.core.dtypes import dtype_name
from isotype.lora import measured
from isotype.lora.attention import blocks, strips
from isotype.lora.attention.plan import Spec, block_rows, plan_of, plan_of_mask, spec_of
from isotype.lora.measured import Times
from isotype.precision.devices.simulated import working_dtype

REVISION = 5
"""Version of the kernels; measurements of other versions are ignored."""

MARGIN = 1.05
"""Minimum speed-up over torch's kernel, at the lower quartile of the repetitions."""

_SCORES = 1 << 21
_LONGEST = 1024
_REPETITIONS = 5

Kind = Literal["causal", "full", "masked"]
Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Kind], torch.Tensor]
OwnKernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Spec], torch.Tensor]


def _torch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kind: Kind) -> torch.Tensor:
    if kind != "masked":
        return scaled_dot_product_attention(q, k, v, is_causal=kind == "causal", enable_gqa=True)
    # transformers repeats keys and values if there is a mask.
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    return scaled_dot_product_attention(q, k, v, attn_mask=_causal_mask(q, k))


def _own(kernel: OwnKernel) -> Kernel:
    def called(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kind: Kind) -> torch.Tensor:
        rows = block_rows(q.shape[1] // k.shape[1])
        if kind == "masked":
            plan = plan_of_mask(_causal_mask(q, k), len(q), rows)
        else:
            plan = plan_of((len(q), q.shape[2], k.shape[2]), rows, causal=kind == "causal")
        return kernel(q, k, v, spec_of(q, k, v, plan, work=attention_dtype(q)))

    return called


def _causal_mask(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return torch.ones(1, 1, q.shape[2], k.shape[2], dtype=torch.bool).tril()


OWN: dict[str, OwnKernel] = {"blocks": blocks.attention, "strips": strips.attention}
"""Maps a name to a kernel of isotype. None of these kernels rounds scores to 16 bits, because this would change results."""

KERNELS: dict[str, Kernel] = {"sdpa": _torch, **{name: _own(kernel) for name, kernel in OWN.items()}}


def offered(dtype: torch.dtype) -> tuple[str, ...]:
    """Return the names of the kernels that this machine has for a dtype; the first call compiles kernels."""
    compiled = dtype != torch.float64 and strips.compiled_strips().reason is None
    return tuple(name for name in KERNELS if name != "strips" or compiled)


def attention_dtype(x: torch.Tensor) -> torch.dtype:
    """Return the dtype for attention's products: float32 if `x` is float16 or emulated bfloat16, else the dtype of `x`.

    In float16 the gradients of the scores would overflow, because they are multiplied by the loss scale.
    """
    return torch.float32 if x.dtype == torch.float16 else working_dtype(x.dtype, x)


@dataclass(frozen=True)
class Shape:
    """A class of calls that share one measurement.

    Attributes:
        batch, key_heads: numbers of batch rows and of key heads in the measurement; the call may have more of them.
        length: number of queries or of keys, whichever is larger, rounded up to a power of two.
        kind: causal, full or masked attention; masked attention is measured with a causal mask.
    """

    batch: int
    key_heads: int
    group: int
    head: int
    value_head: int
    length: int
    kind: Kind
    dtype: torch.dtype
    trained: bool

    def __str__(self) -> str:
        passes = "forward and backward" if self.trained else "forward"
        return (
            f"{dtype_name(self.dtype)}, {self.group * self.key_heads} heads of {self.head} on {self.key_heads}, "
            f"{self.batch} x {self.length} tokens, {self.kind}, {passes}"
        )


def shape_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kind: Kind, trained: bool) -> Shape:
    """Return the class of a call with q `[batch, query heads, queries, head]`, k and v `[batch, key heads, keys, …]`."""
    group, length = q.shape[1] // k.shape[1], 1 << (max(q.shape[2], k.shape[2]) - 1).bit_length()
    measured = min(length, _LONGEST)
    rows = max(1, _SCORES // (group * measured * measured))
    key_heads = min(k.shape[1], max(rows, torch.get_num_threads()))
    batch = min(len(q), max(1, rows // key_heads))
    batch = 1 << (batch.bit_length() - 1)
    return Shape(batch, key_heads, group, q.shape[3], v.shape[3], length, kind, q.dtype, trained)


_CHOICES = measured.Kept()


def times_of(shape: Shape) -> tuple[Times, str | None]:
    """Return the times for a class of shapes (measured once per machine), and why they could not be stored, or None."""
    threads = torch.get_num_threads()
    file = measured.file_of("attention", REVISION, threads, *offered(shape.dtype))
    return _CHOICES.of(file, f"{shape}, values of {shape.value_head}", lambda: measure(shape, threads))


def measure(shape: Shape, threads: int) -> Times:
    return Times.of(measured.in_turns(lambda: _calls(shape), _REPETITIONS, threads), share=0.25)


def chosen(times: Times) -> str:
    """Return the name of isotype's fastest kernel if it is clearly faster than `sdpa`, else `"sdpa"`."""
    return times.fastest if times.faster > MARGIN else "sdpa"


def _calls(shape: Shape) -> dict[str, Callable[[], object]]:
    generator = torch.Generator().manual_seed(0)
    length = min(shape.length, _LONGEST)

    def random(heads: int, size: int) -> torch.Tensor:
        drawn = torch.randn(shape.batch, length, heads, size, generator=generator).to(shape.dtype)
        return drawn.transpose(1, 2).requires_grad_(shape.trained)

    heads, key_heads = shape.key_heads * shape.group, shape.key_heads
    sizes = ((heads, shape.head), (key_heads, shape.head), (key_heads, shape.value_head))
    q, k, v = (random(*size) for size in sizes)
    d_out = torch.ones(shape.batch, heads, length, shape.value_head, dtype=shape.dtype)

    def call(kernel: Kernel) -> None:
        out = kernel(q, k, v, shape.kind)
        if shape.trained:
            torch.autograd.grad(out, (q, k, v), d_out)

    return {name: partial(call, KERNELS[name]) for name in offered(shape.dtype)}

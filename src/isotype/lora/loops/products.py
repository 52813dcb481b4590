"""Sums of matrix products on a CPU by compiled loops (products.cpp): summed in float32, rounded once.

A LoRA layer consists of them: X Wᵀ + (X Aᵀ) Bᵀ is one, and so is the gradient of a shared input. Each of
torch's operators, one per product, reads and writes the whole sum.
"""

from __future__ import annotations

import statistics
from array import array
from collections.abc import Callable, Iterable, Sequence
from ctypes import c_void_p
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch

from isotype.compat.torch import PLAIN, dispatch_depth, needs_operators
from isotype.core.dtypes import dtype_name
from isotype.lora import measured
from isotype.lora.kernels import kernel_of
from isotype.lora.loops.loading import loops_of

_FILES = tuple(Path(__file__).with_name(name) for name in ("products.cpp", "products.h", "vectors.h"))
compiled_products = cache(partial(loops_of, *_FILES))
"""Returns the compiled loops; compiling takes some seconds, once per machine."""

FEWEST = 64
"""Minimum rows for the compiled loops: they pack a weight for each product, which does not pay for fewer rows."""


REVISION = 2
"""Version of the loops: measurements of other versions are ignored."""

MARGIN = 0.95
"""Minimum speed of the loops relative to torch's operators: they round less, and times are noisy."""

_ROWS, _WIDTH, _RANK, _TURNS = 512, 768, 16, 9


class Sum(NamedTuple):
    """`out` = factor · Σ left @ right + bias, for matrices of one dtype and any strides.

    Attributes:
        out: `[rows, columns]` of that dtype or float32.
        terms: left `[rows, depth]` and right `[depth, columns]` of each product, at least one. torch's
            operators process them in order, smallest first (see `write_sums`), so an iterator may create them
            on demand if there is no bias.
        bias: `[columns]`.
        factor: of the products.
    """

    out: torch.Tensor
    terms: Iterable[tuple[torch.Tensor, torch.Tensor]]
    bias: torch.Tensor | None = None
    factor: float = 1.0


def is_used(dtype: torch.dtype, x: torch.Tensor) -> bool:
    """Return whether the compiled loops are usable and faster here for products of an input in a dtype."""
    return (
        not needs_operators()
        and x.device.type == "cpu"
        and x.numel() >= FEWEST * x.shape[-1]
        and type(x) in PLAIN
        and compiled_products().has("sums_of_products", dtype)
        and timing(dtype).faster
    )


def write_sums(sums: Iterable[Sum], *, compiled: bool) -> None:
    """Compute sums of products of matrices of one dtype on one device, without derivatives.

    Args:
        sums: none reads what another writes. torch's operators process them in order, so an iterator may
            create them on demand.
        compiled: use the compiled loops (see `is_used`) if they support all sums; else torch's operators,
            which round after each product, except for float32 results on a GPU with such products
            (`isotype.lora.kernels`). These add a product to the existing sum before rounding, so small terms
            come first, and a bias, which may be large, last.

    Raises:
        RuntimeError: torch's error for matrices that do not match.
    """
    # Dispatch modes see torch's operators, as on a machine without a compiler.
    if not compiled or dispatch_depth():
        for each in sums:
            _by_torch(each, each.terms)
        return
    held = [(each, tuple(each.terms)) for each in sums]  # kept alive until they are read
    if not _by_loops(held):
        for each, terms in held:
            _by_torch(each, terms)


_Terms = Iterable[tuple[torch.Tensor, torch.Tensor]]


def _by_torch(asked: Sum, terms_in: _Terms) -> None:
    bias = asked.bias
    held = () if bias is None else tuple(terms_in)
    terms = iter(held or terms_in)
    left, right = next(terms)
    plain = asked.out.dtype == left.dtype
    kernel = None if plain else kernel_of("float32_product", left, right)
    if kernel is not None:
        kernel.write(asked.out, left, right, asked.factor)
        for left, right in terms:
            kernel.add(asked.out, left, right, asked.factor)
        if bias is not None:
            asked.out.add_(bias)
        return
    product = asked.out if plain else torch.empty_like(asked.out, dtype=left.dtype)
    if alone := bias is not None and len(held) == 1:
        torch.addmm(bias, left, right, alpha=asked.factor, out=product)
    else:
        torch.mm(left, right, out=product)
    for left, right in terms:
        product.addmm_(left, right)
    if not plain:
        asked.out.copy_(product)
    if asked.factor != 1 and not alone:
        asked.out.mul_(asked.factor)
    if bias is not None and not alone:
        asked.out.add_(bias)


def _by_loops(sums: Sequence[tuple[Sum, Sequence[tuple[torch.Tensor, torch.Tensor]]]]) -> bool:
    """Compute sums by the loops; return False without computing if they do not support all of them."""
    if not sums:
        return False
    dtype = sums[0][1][0][0].dtype
    if not compiled_products().has("sums_of_products", dtype):
        return False
    operands = [x for each, terms in sums for x in chain(*terms, () if each.bias is None else (each.bias,))]
    results = [each.out for each, _ in sums]
    if not (_readable(operands, _kinds(dtype)) and _readable(results, _kinds(dtype, torch.float32))):
        return False
    numbers, factors, biases = array("q"), array("f"), []
    for each, terms in sums:
        out, bias = each.out, each.bias
        size, at = out.shape, 0
        if bias is not None:
            if bias.shape != size[1:]:
                return False
            biases.append(bias := bias.contiguous())
            at = bias.data_ptr()
        numbers.extend((out.data_ptr(), *out.stride(), *size, out.dtype is torch.float32, at, len(terms)))
        factors.append(each.factor)
        for left, right in terms:
            above, below = left.shape, right.shape
            if not (len(above) == len(below) == 2 and above[1] == below[0] and (above[0], below[1]) == size):
                return False
            numbers.extend((left.data_ptr(), *left.stride(), right.data_ptr(), *right.stride(), below[0]))
    addresses = numbers.buffer_info()[0], factors.buffer_info()[0]
    compiled_products().run(
        "sums_of_products", dtype, len(sums), *map(c_void_p, addresses), torch.get_num_threads()
    )
    return True


_memory_of = attrgetter("is_cpu", "layout", "dtype")


@cache
def _kinds(*dtypes: torch.dtype) -> frozenset[tuple[bool, torch.layout, torch.dtype]]:
    """Return `_memory_of` readable tensors: of one of these dtypes, in plain CPU memory."""
    return frozenset((True, torch.strided, dtype) for dtype in dtypes)


def _readable(tensors: Sequence[torch.Tensor], kinds: frozenset[Any]) -> bool:
    return kinds.issuperset(map(_memory_of, tensors)) and PLAIN.issuperset(map(type, tensors))


@dataclass(frozen=True)
class Timing:
    """Milliseconds of a LoRA layer's products by torch's operators and by the compiled loops.

    `ratio`: median over the turns of torch's time over the loops'.
    """

    torch: float
    loops: float
    ratio: float

    @property
    def faster(self) -> bool:
        """True if the loops are at least about as fast; on some CPUs torch uses instructions they lack (AMX)."""
        return self.ratio > MARGIN


_TIMINGS = measured.Kept(Timing)


def timing(dtype: torch.dtype) -> Timing:
    """Return the times of both ways, measured once per machine, dtype and thread count in tenths of a second."""
    return _timing(dtype, torch.get_num_threads())


@cache
def _timing(dtype: torch.dtype, threads: int) -> Timing:
    file = measured.file_of("products", REVISION, threads)
    return _TIMINGS.of(file, dtype_name(dtype), lambda: measure(dtype, threads))[0]


def measure(dtype: torch.dtype, threads: int) -> Timing:

    def ways() -> dict[bool, Callable[[], None]]:
        steps = _layer_of(dtype)

        def run(compiled: bool) -> None:
            for sums in steps:
                write_sums(sums, compiled=compiled)

        return {compiled: partial(run, compiled) for compiled in (False, True)}

    times = measured.in_turns(ways, _TURNS, threads)
    ratios = [torchs / own for torchs, own in zip(times[False], times[True], strict=True)]
    return Timing(*(round(statistics.median(each), 4) for each in (times[False], times[True], ratios)))


def _layer_of(dtype: torch.dtype) -> list[list[Sum]]:
    """Return the products of two LoRA layers with the same input: X Aᵀ, the outputs, and the backward's gradients."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    def new(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(*shape, dtype=of)

    x, down = random(_ROWS, _WIDTH), random(_RANK, _WIDTH)
    hidden, d_hidden = new(_ROWS, _RANK), new(_ROWS, _RANK)
    layers = [(random(_WIDTH, _WIDTH), random(_WIDTH, _RANK), random(_ROWS, _WIDTH)) for _ in range(2)]
    d_input = tuple((grad, weight) for weight, _, grad in layers)
    return [
        [Sum(hidden, ((x, down.t()),))],
        *([Sum(new(_ROWS, _WIDTH), ((x, weight.t()), (hidden, up.t())))] for weight, up, _ in layers),
        *(
            [
                Sum(d_hidden, ((grad, up),)),
                Sum(new(_WIDTH, _RANK, of=torch.float32), ((grad.t(), hidden),), factor=2.0),
            ]
            for _, up, grad in layers
        ),
        [Sum(new(_ROWS, _WIDTH), (*d_input, (d_hidden, down)))],
        [Sum(new(_RANK, _WIDTH, of=torch.float32), ((d_hidden.t(), x),))],
    ]

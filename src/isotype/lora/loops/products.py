"""Computes sums of matrix products on a CPU. Compiled loops (products.cpp) sum in float32 and round the sum once.

A LoRA layer has two such sums: its output X Wᵀ + (X Aᵀ) Bᵀ, and the gradient of an input that several layers share. With
torch's operators, each product reads and writes the whole sum.
"""

from array import array
from collections.abc import Iterable, Sequence
from ctypes import c_void_p
from functools import cache, partial
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch

from isotype.compat.torch import PLAIN, dispatch_depth, needs_operators
from isotype.lora.kernels import kernel_of
from isotype.lora.loops.loading import loops_of
from isotype.precision.devices.cpu import compiler_options, multiplies_by_amx

_FILES = tuple(Path(__file__).with_name(name) for name in ("products.cpp", "products.h", "vectors.h"))
compiled_products = cache(partial(loops_of, *_FILES))
"""Returns the compiled loops. The first call on a machine compiles for some seconds."""

FEWEST = 64
"""The compiled loops need at least this many rows. With fewer rows, packing the weight for each product takes too long."""


class Sum(NamedTuple):
    """`out` = factor · Σ left @ right + bias, for matrices of one dtype and any strides.

    Attributes:
        out: `[rows, columns]`, in the dtype of the matrices or float32.
        terms: left `[rows, depth]` and right `[depth, columns]` of each product. There is at least one product, and small
            products come first (see `write_sums`). Without a bias, `terms` may be an iterator that creates the matrices of a
            product on demand.
        bias: `[columns]`, or None.
    """

    out: torch.Tensor
    terms: Iterable[tuple[torch.Tensor, torch.Tensor]]
    bias: torch.Tensor | None = None
    factor: float = 1.0


def is_used(dtype: torch.dtype, x: torch.Tensor) -> bool:
    """Return True if the compiled loops support products of `x` in a dtype, and are as fast as torch on this machine."""
    return (
        not needs_operators()
        and x.device.type == "cpu"
        and x.numel() >= FEWEST * x.shape[-1]
        and type(x) in PLAIN
        and compiled_products().has("sums_of_products", dtype)
        and _are_fast(dtype)
    )


@cache
def _are_fast(dtype: torch.dtype) -> bool:
    """Return True if the loops are as fast as torch: on x86 CPUs with AVX2, except for bfloat16 if torch uses AMX."""
    return bool(compiler_options()) and not (dtype == torch.bfloat16 and multiplies_by_amx())


def write_sums(sums: Iterable[Sum], *, compiled: bool) -> None:
    """Compute sums of products of matrices of one dtype on one device, without derivatives.

    Args:
        sums: the sums to compute. No sum reads the result of another sum. An iterator may create the sums on demand.
        compiled: True to use the compiled loops if they support all sums (see `is_used`). torch's operators round a sum after
            each product, except for float32 sums on some GPUs (`isotype.lora.kernels`). Because of this rounding, small terms
            come first, and a (large) bias comes last.

    Raises:
        RuntimeError: torch's error for matrices that do not match.
    """
    if not compiled:
        for item in sums:
            _by_torch(item, item.terms)
        return
    pairs = [(item, tuple(item.terms)) for item in sums]  # keeps the terms alive until they are read
    # Dispatch modes get torch's operators, as on a machine without a compiler.
    if dispatch_depth() or not _by_loops(pairs):
        for item, terms in pairs:
            _by_torch(item, terms)


_Terms = Iterable[tuple[torch.Tensor, torch.Tensor]]


def _by_torch(item: Sum, terms: _Terms) -> None:
    out, bias, factor = item.out, item.bias, item.factor
    listed = None if bias is None else tuple(terms)
    alone = listed is not None and len(listed) == 1
    terms = iter(terms if listed is None else listed)
    left, right = next(terms)
    plain = out.dtype == left.dtype
    kernel = None if plain else kernel_of("float32_product", left, right)
    if kernel is not None:
        kernel.write(out, left, right, factor)
        del left, right  # only one weight is in memory at a time
        for left, right in terms:
            kernel.write(out, left, right, factor, add=True)
            del left, right
        if bias is not None:
            out.add_(bias)
        return
    product = out if plain else torch.empty_like(out, dtype=left.dtype)
    if bias is not None and alone:
        torch.addmm(bias, left, right, alpha=factor, out=product)
    else:
        torch.mm(left, right, out=product)
    del left, right
    for left, right in terms:
        product.addmm_(left, right)
        del left, right
    if not plain:
        out.copy_(product)
    if factor != 1 and not alone:
        out.mul_(factor)
    if bias is not None and not alone:
        out.add_(bias)


def _by_loops(sums: Sequence[tuple[Sum, Sequence[tuple[torch.Tensor, torch.Tensor]]]]) -> bool:
    """Compute all sums by the compiled loops and return True. Return False if the loops do not support one of the sums."""
    if not sums:
        return False
    dtype = sums[0][1][0][0].dtype
    if not compiled_products().has("sums_of_products", dtype):
        return False
    operands = [x for item, terms in sums for x in chain(*terms, () if item.bias is None else (item.bias,))]
    results = [item.out for item, _ in sums]
    if not (_readable(operands, _kinds(dtype)) and _readable(results, _kinds(dtype, torch.float32))):
        return False
    numbers, factors, biases = array("q"), array("f"), []
    for item, terms in sums:
        out, bias = item.out, item.bias
        size, at = out.shape, 0
        if bias is not None:
            if bias.shape != size[1:]:
                return False
            biases.append(bias := bias.contiguous())
            at = bias.data_ptr()
        numbers.extend((out.data_ptr(), *out.stride(), *size, out.dtype is torch.float32, at, len(terms)))
        factors.append(item.factor)
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
    return frozenset((True, torch.strided, dtype) for dtype in dtypes)


def _readable(tensors: Sequence[torch.Tensor], kinds: frozenset[Any]) -> bool:
    return kinds.issuperset(map(_memory_of, tensors)) and PLAIN.issuperset(map(type, tensors))

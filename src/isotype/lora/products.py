"""Sums of products of matrices on a CPU by compiled loops (products.cpp): summed in float32, rounded once.

A LoRA layer is made of them: X Wᵀ + (X Aᵀ) Bᵀ is one, and so is the gradient of an input that several layers read. torch has an
operator for each product, and each reads and writes the whole sum.
"""

from __future__ import annotations

import statistics
import threading
import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from ctypes import c_void_p
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

from isotype.core.dtypes import dtype_name
from isotype.lora import measured
from isotype.lora.loops import Loops, loops_of

SOURCE = Path(__file__).with_suffix(".cpp")
HEADERS = tuple(Path(__file__).with_name(name) for name in ("products.h", "vectors.h"))
_PLAIN = (torch.Tensor, torch.nn.Parameter)

FEWEST = 64
"""Rows of an input from which on the compiled loops are used: they pack a weight for each product, which few rows do not pay for."""


REVISION = 1
"""Of the loops: what was measured of former ones does not count."""

_ROWS, _WIDTH, _RANK, _TURNS = 512, 1024, 16, 7


@dataclass(frozen=True)
class Sum:
    """`out` = factor · Σ left @ right + bias; matrices of one dtype, of any strides.

    Attributes:
        out: `[rows, columns]` of that dtype or float32.
        terms: left `[rows, depth]` and right `[depth, columns]` of each product, at least one. torch's operators take one
            after another: an iterator may make each when it is its turn.
        bias: `[columns]`.
        factor: what the products are multiplied by.
    """

    out: torch.Tensor
    terms: Iterable[tuple[torch.Tensor, torch.Tensor]]
    bias: torch.Tensor | None = None
    factor: float = 1.0


def compiled_products() -> Loops:
    """The compiled loops; compiling takes some seconds, once on a machine."""
    return loops_of(SOURCE, *HEADERS)


def is_used(dtype: torch.dtype, x: torch.Tensor, *others: torch.Tensor) -> bool:
    """Whether the compiled loops take products of an input with others in a dtype: they can, and are faster here."""
    return (
        not torch.compiler.is_compiling()
        and x.device.type == "cpu"
        and x.numel() >= FEWEST * x.shape[-1]
        and all(type(each) in _PLAIN for each in (x, *others))
        and compiled_products().has("sums_of_products", dtype)
        and timing(dtype).faster
    )


def write_sums(sums: Sequence[Sum], *, compiled: bool) -> None:
    """Write sums of products of matrices of one dtype on one device; no derivatives.

    Args:
        sums: what to compute, none of which reads what another writes.
        compiled: by the compiled loops, see `is_used`; else by torch's operators, which round after each product.
    """
    # Who watches torch's operators sees them, as on a machine without a compiler.
    if compiled and not torch._C._len_torch_dispatch_stack():
        _by_loops(sums)
        return
    _each_by_torch(sums)


def _each_by_torch(sums: Sequence[Sum]) -> None:
    for each in sums:
        _by_torch(each)


def _by_torch(asked: Sum) -> None:
    terms = iter(asked.terms)
    left, right = next(terms)
    plain = asked.out.dtype == left.dtype
    made = asked.out if plain else torch.empty_like(asked.out, dtype=left.dtype)
    alpha = 1.0 if asked.bias is None else asked.factor
    if asked.bias is None:
        torch.mm(left, right, out=made)
    else:
        torch.addmm(asked.bias, left, right, alpha=alpha, out=made)
    for left, right in terms:
        made.addmm_(left, right, alpha=alpha)
    if not plain:
        asked.out.copy_(made)
    if alpha != asked.factor:
        asked.out.mul_(asked.factor)


def _by_loops(sums: Sequence[Sum]) -> None:
    numbers = array("q")
    held = [tuple(each.terms) for each in sums]  # until they have been read
    for each, terms in zip(sums, held, strict=True):
        out, bias = each.out, 0 if each.bias is None else each.bias.data_ptr()
        dtype, floats = terms[0][0].dtype, out.dtype == torch.float32
        numbers.extend((out.data_ptr(), *out.stride(), *out.shape, floats, bias, len(terms)))
        for left, right in terms:
            numbers.extend(
                (left.data_ptr(), *left.stride(), right.data_ptr(), *right.stride(), left.shape[1])
            )
    factors = array("f", [each.factor for each in sums])
    addresses = (c_void_p(each.buffer_info()[0]) for each in (numbers, factors))
    compiled_products().run("sums_of_products", dtype, len(sums), *addresses, torch.get_num_threads())


@dataclass(frozen=True)
class Timing:
    """Milliseconds of a LoRA layer's products: by torch's operators, by the compiled loops."""

    torch: float
    loops: float

    @property
    def faster(self) -> bool:
        """Whether the loops are: torch multiplies by instructions that they do not have on some CPUs (AMX)."""
        return self.loops < self.torch


_known: dict[tuple[int, torch.dtype], Timing] = {}
_lock = threading.Lock()


def timing(dtype: torch.dtype) -> Timing:
    """How long both ways take here: measured once on a machine for each dtype and number of threads, in some tenths of a second."""
    threads = torch.get_num_threads()
    key = threads, dtype
    if key in _known:
        return _known[key]
    with _lock:
        if key not in _known:
            file = measured.file_of("products", REVISION, threads)
            _known[key] = _kept(file, dtype) or _kept_now(file, dtype, threads)
        return _known[key]


def _kept(file: Path, dtype: torch.dtype) -> Timing | None:
    try:
        return Timing(**measured.read(file)[dtype_name(dtype)])
    except (KeyError, TypeError):  # not measured, or in another layout
        return None


def _kept_now(file: Path, dtype: torch.dtype, threads: int) -> Timing:
    made = measure(dtype, threads)
    measured.keep(file, dtype_name(dtype), asdict(made))
    return made


def measure(dtype: torch.dtype, threads: int) -> Timing:
    """Time both ways in turns, in a thread of its own."""
    times: tuple[list[float], list[float]] = [], []

    def run() -> None:
        sums = _layer_of(dtype)
        ways: tuple[Callable[[], None], ...] = partial(_each_by_torch, sums), partial(_by_loops, sums)
        for turn in range(_TURNS + 1):
            for way, taken in zip(ways, times, strict=True):
                began = time.perf_counter()
                way()
                if turn:  # the first one warms up
                    taken.append((time.perf_counter() - began) * 1e3)

    measured.apart(run, threads)
    return Timing(*(round(statistics.median(taken), 4) for taken in times))


def _layer_of(dtype: torch.dtype) -> list[Sum]:
    """The output of a layer with LoRA, and the gradient of an input that two layers read."""
    generator = torch.Generator().manual_seed(0)

    def made(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    x, y, hidden = made(_ROWS, _WIDTH), made(_ROWS, _WIDTH), made(_ROWS, _RANK)
    one, other, up = made(_WIDTH, _WIDTH), made(_WIDTH, _WIDTH), made(_WIDTH, _RANK)
    forward = Sum(torch.empty_like(x), ((x, one.t()), (hidden, up.t())))
    return [forward, Sum(torch.empty_like(x), ((x, one), (y, other), (hidden, up.t())))]

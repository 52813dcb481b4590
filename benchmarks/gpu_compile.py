"""Every Triton kernel compiled for GPUs that are not there: its registers, what spills out of them, its shared memory.

The launches are those that `isotype.lora.gpu.elementwise` makes of tensors in the shapes of real models, which have no memory here; each is
compiled for its own arguments (which of them are 1, which are multiples of 16, which need 64 bits) by Triton and the assembler
that Triton brings along. It shows what does not build, and what would be slow as it builds; not whether the numbers are right
(tests/lora/test_gpu_kernels.py), nor how fast they come (`benchmarks/gpu.py --parts exactness`).

Needs Triton, and no GPU: pip install 'isotype[gpu]'. Each of about 500 kernels takes a second; --small does one shape and dtype of each.

Run: python benchmarks/gpu_compile.py [--cards t4 h100 …] [--small] [--json FILE]
Prints a table of kernels and cards; ends with 1 where a kernel does not build, spills, or wants more shared memory than a block may have.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"  # read when the kernels are defined

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget

from isotype.core.dtypes import dtype_name
from isotype.lora.gpu import elementwise, kernels

KERNELS = ("rms_norm", "rms_norm_backward", "gated", "gated_backward", "rotary")


@dataclass(frozen=True)
class Card:
    """What Triton compiles for.

    Attributes:
        target: its name for the architecture, and how many threads a warp has.
        shared: bytes of shared memory that one block may have.
    """

    target: GPUTarget
    shared: int


CARDS = {
    "t4": Card(GPUTarget("cuda", 75, 32), 64 << 10),
    "a100": Card(GPUTarget("cuda", 80, 32), 163 << 10),
    "rtx3090": Card(GPUTarget("cuda", 86, 32), 99 << 10),
    "rtx4090": Card(GPUTarget("cuda", 89, 32), 99 << 10),
    "h100": Card(GPUTarget("cuda", 90, 32), 227 << 10),
    "b200": Card(GPUTarget("cuda", 100, 32), 227 << 10),
    "rtx5090": Card(GPUTarget("cuda", 120, 32), 99 << 10),
    "mi250": Card(GPUTarget("hip", "gfx90a", 64), 64 << 10),
    "mi300x": Card(GPUTarget("hip", "gfx942", 64), 64 << 10),
    "rx7900": Card(GPUTarget("hip", "gfx1100", 32), 64 << 10),
}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_WIDTHS = (128, 576, 4096, 4099, 8192, 16384)
"""Of norms: a head, SmolLM2, Llama 8B, an odd one, Llama 70B and 405B."""
_HEADS = ((1, 64), (3, 64), (32, 128), (64, 128), (128, 128), (16, 256))
"""(heads, numbers of each): SmolLM2's keys and queries in turn, Llama 8B, 70B and 405B, Gemma."""
_MANY = 1 << 31


class Device:
    """Takes the place of a GPU's driver: Triton asks it what to compile for."""

    def __init__(self, cards: Sequence[str]) -> None:
        self.cards, self.card = list(cards), cards[0]

    def get_current_target(self) -> GPUTarget:
        """The architecture."""
        return CARDS[self.card].target

    def get_current_device(self) -> int:
        """A number for each: Triton keeps what it has compiled by it."""
        return self.cards.index(self.card)

    def get_current_stream(self, device: int) -> int:
        """Nothing is launched."""
        return 0


@dataclass(frozen=True)
class Case:
    """One call of a function of `isotype.lora.gpu.elementwise`, which launches a kernel or two."""

    name: str
    dtype: torch.dtype
    call: Callable[[], object]


@dataclass(frozen=True)
class Built:
    """What one launch takes of a card.

    Attributes:
        kernel, case, dtype, card: which one.
        failed: why it does not build; the rest is 0 then.
        warps: of a program.
        registers: of a thread.
        spilled: bytes of a thread that did not fit into them.
        shared: bytes of a program.
    """

    kernel: str
    case: str
    dtype: str
    card: str
    failed: str = ""
    warps: int = 0
    registers: int = 0
    spilled: int = 0
    shared: int = 0

    @property
    def good(self) -> bool:
        """Whether it builds, in registers and shared memory that are there."""
        return not self.failed and not self.spilled and self.shared <= CARDS[self.card].shared

    def __str__(self) -> str:
        if self.failed:
            return "fails"
        more = [f"{self.spilled} B spilled"] * bool(self.spilled)
        more += [f"{self.shared} B shared"] * (self.shared > CARDS[self.card].shared)
        return ", ".join([f"{self.registers} x {self.warps}", *more])


def _empty(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _norm(dtype: torch.dtype, width: int, rows: int = 64, *, promoted: bool = False) -> None:
    x, inverse = _empty(dtype, rows, width), _empty(torch.float32, rows, 1)
    weight = _empty(torch.float32 if promoted else dtype, width)
    y, _ = elementwise.rms_norm(x, weight, 1e-5, float(promoted))
    elementwise.rms_norm_backward(y, x, weight, inverse, float(promoted))


def _gated(dtype: torch.dtype, activation: str, *shape: int) -> None:
    gate = _empty(dtype, *shape)
    elementwise.product(activation, gate, gate)
    elementwise.product_backward(activation, gate, gate, gate)


def _rotary(dtype: torch.dtype, heads: int, dim: int, tokens: int = 2048, rows: int = 1) -> None:
    x = _empty(dtype, rows, tokens, heads, dim).transpose(1, 2)
    table = _empty(dtype, 1, tokens, dim)
    for back in (False, True):
        elementwise.rotate(x, table, table, back)


def cases(small: bool) -> Iterator[Case]:
    """Every kernel in every shape and dtype; `small`: in one of each."""
    for dtype in DTYPES[:1] if small else DTYPES:
        for width in _WIDTHS[-1:] if small else _WIDTHS:
            yield Case(f"width {width}", dtype, partial(_norm, dtype, width))
        for name in elementwise.ACTIVATIONS:
            yield Case(name, dtype, partial(_gated, dtype, name, 64, 14336))
        for heads, dim in _HEADS[-2:-1] if small else _HEADS:
            yield Case(f"{heads} heads of {dim}", dtype, partial(_rotary, dtype, heads, dim))
        if small:
            continue
        if dtype != torch.float32:
            yield Case("float32 weight", dtype, partial(_norm, dtype, 4096, promoted=True))
        yield Case("one number", dtype, partial(_gated, dtype, "silu", 1))
        yield Case("odd", dtype, partial(_gated, dtype, "silu", 5, 333))
        yield Case("odd tokens", dtype, partial(_rotary, dtype, 9, 96, 333, 3))
        yield Case("1 token", dtype, partial(_rotary, dtype, 32, 128, 1))
        yield Case("2^31 numbers", dtype, partial(_norm, dtype, 4096, _MANY // 4096))
        yield Case("2^31 numbers", dtype, partial(_gated, dtype, "silu", _MANY // 14336 + 1, 14336))
        yield Case("2^31 numbers", dtype, partial(_rotary, dtype, 32, 128, _MANY // 4096 + 1))


class Compiler:
    """Compiles launches in the place of launching them.

    Args:
        cards: names of `CARDS`.
    """

    def __init__(self, cards: Sequence[str]) -> None:
        self.device = Device(cards)
        self._built: list[Built] = []
        self._case: Case | None = None
        triton.runtime.driver.set_active(self.device)
        for name in KERNELS:
            kernel = getattr(kernels, name)
            kernel.run = partial(self._run, name, kernel.run)

    def built(self, card: str, case: Case) -> list[Built]:
        """What the launches of a case take of a card."""
        self.device.card, self._case, self._built = card, case, []
        case.call()
        return self._built

    def _run(self, name: str, run: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        assert self._case is not None
        where = name, self._case.name, dtype_name(self._case.dtype), self.device.card
        try:
            compiled = run(*args, **{**kwargs, "warmup": True})
        except Exception as failure:  # noqa: BLE001 - a compiler raises whatever it likes
            self._built.append(Built(*where, failed=f"{type(failure).__name__}: {failure}"[:500]))
            return
        registers, spilled = _registers(compiled.asm)
        self._built.append(
            Built(*where, "", compiled.metadata.num_warps, registers, spilled, compiled.metadata.shared)
        )


def _registers(asm: Any) -> tuple[int, int]:
    """(registers of a thread, bytes of it that lie outside of them), as the assembler says it."""
    if "amdgcn" in asm:
        texts = (f".{key}:" for key in ("vgpr_count", "private_segment_fixed_size"))
        registers, spilled = (re.search(rf"{re.escape(text)}\s+(\d+)", asm["amdgcn"]) for text in texts)
    else:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(asm["cubin"])
            file.flush()
            command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
            text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        registers, spilled = (re.search(rf"{key}:(\d+)", text) for key in ("REG", "STACK"))
    assert registers is not None
    assert spilled is not None
    return int(registers[1]), int(spilled[1])


def table(built: Sequence[Built], cards: Sequence[str]) -> str:
    """A line for each kernel, case and dtype, a column for each card: registers x warps, and what is wrong."""
    lines: dict[tuple[str, str, str], dict[str, list[str]]] = {}
    for each in built:
        cells = lines.setdefault((each.kernel, each.case, each.dtype), {})
        cells.setdefault(each.card, []).append(str(each))
    rows = [["kernel", "case", "dtype", *cards]]
    # Of rotations there and back the one that takes more; what is wrong has the longer text.
    rows += [[*key, *(max(cells[card], key=len) for card in cards)] for key, cells in lines.items()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def main() -> int:
    """Compile, print, and say what is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--cards", nargs="+", choices=CARDS, default=list(CARDS))
    parser.add_argument("--small", action="store_true", help="one shape and dtype of each kernel")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every launch there as well")
    options = parser.parse_args()
    compiler, built = Compiler(options.cards), []
    for card in options.cards:
        for case in cases(options.small):
            built += compiler.built(card, case)
    print(f"Triton {triton.__version__}; registers of a thread x warps of a program")
    print(table(built, options.cards))
    wrong = [each for each in built if not each.good]
    for each in wrong:
        print(f"{each.kernel}, {each.case}, {each.dtype}, {each.card}: {each.failed or each}")
    print(f"{len(built)} launches, {len(wrong)} wrong")
    if options.json is not None:
        options.json.write_text(
            json.dumps([asdict(each) for each in built], indent=1) + "\n", encoding="utf-8"
        )
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())

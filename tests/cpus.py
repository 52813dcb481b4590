"""CPUs that a test pretends to run on: what the package sees of one; its arithmetic stays this machine's.

`ISOTYPE_TEST_CPU=cpu-amx pytest …` runs every test so (processes that a test starts see the real CPU).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from isotype.core.compiled import NotCompiledError, find_compilers
from isotype.lora import fused
from isotype.precision.devices import profile as hardware
from isotype.precision.devices.cpu import CpuFeatures, OneDnn, compiler_options

F16, BF16 = torch.float16, torch.bfloat16

CPUS: dict[str, tuple[CpuFeatures, OneDnn]] = {
    "cpu-avx2": (CpuFeatures("AMD EPYC", frozenset({"avx2"}), "a test"), OneDnn(frozenset())),
    "cpu-avx512": (
        CpuFeatures("AMD EPYC", frozenset({"avx2", "avx512f", "avx512_bf16"}), "a test"),
        OneDnn(frozenset({BF16})),
    ),
    "cpu-amx": (
        CpuFeatures("Intel Xeon", frozenset({"avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16"}), "a test"),
        OneDnn(frozenset({BF16, F16})),
    ),
}


def no_compiler() -> str:
    """Why nothing is compiled on this machine, "" where something is."""
    try:
        find_compilers()
    except NotCompiledError as error:
        return str(error)
    return ""


def no_bfloat16_loops() -> str:
    """Why there are no compiled products in bfloat16, "" where there are."""
    return no_compiler() or (
        ""
        if "-mavx512bf16" in compiler_options()
        else "this CPU has no products of bfloat16 that loops are made of"
    )


def pretend(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `device="cpu"` be such a CPU, to isotype and to bitsandbytes."""
    features, onednn = CPUS[name]
    monkeypatch.setattr(hardware, "this_cpu", lambda: features)
    monkeypatch.setattr(hardware, "this_onednn", lambda: onednn)
    monkeypatch.setattr(fused, "this_cpu_emulates", hardware.this_cpu_emulates.__wrapped__)
    modules: Any = pytest.importorskip("bitsandbytes.nn.modules")
    monkeypatch.setattr(modules, "has_avx512bf16", lambda: name != "cpu-avx2")

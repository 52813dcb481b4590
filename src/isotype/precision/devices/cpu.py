"""The features of a CPU. These features determine which table of accepted dtypes applies to the CPU.

oneDNN runs convolutions, recurrent layers and 16-bit matmuls. It supports bfloat16 with AVX512 or newer, and float16
with AVX512-FP16 or AMX. On other CPUs, torch's own kernels run. They accept other dtypes than oneDNN.
"""

import os
import platform
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from isotype.core.dtypes import dtype_name

_F16, _BF16 = torch.float16, torch.bfloat16


@dataclass(frozen=True)
class CpuFeatures:
    """CPU features as reported by the operating system.

    Attributes:
        title: model name.
        flags: Linux names of the instruction-set flags (`avx512_bf16`, `asimdhp`); None if unknown.
        source: the place where the flags were read, or the reason why they could not be read.
        machine: architecture by `platform.machine()` (`x86_64`, `aarch64`, `arm64`).
    """

    title: str
    flags: frozenset[str] | None
    source: str
    machine: str = "x86_64"


@dataclass(frozen=True)
class OneDnn:
    """The 16-bit dtypes that torch's oneDNN supports on a CPU.

    Attributes:
        takes: 16-bit dtypes with kernels in oneDNN that `ONEDNN_MAX_CPU_ISA` allows.
        limit: value of `ONEDNN_MAX_CPU_ISA` in capitals; "" if it is not set.
    """

    takes: frozenset[torch.dtype]
    limit: str = ""

    def forbids(self, flag: str) -> bool:
        """Return True if `limit` forbids oneDNN the instructions of an x86 flag (`avx512_bf16`)."""
        allowed = _ALLOWED.get(self.limit)
        return allowed is not None and flag not in allowed


# Dtype -> Linux flag -> common name. With one of the flags, matmuls in the dtype run in hardware.
CPU_INSTRUCTIONS: dict[torch.dtype, dict[str, str]] = {
    _BF16: {"amx_bf16": "AMX-BF16", "avx512_bf16": "AVX512-BF16", "bf16": "Arm BF16"},
    _F16: {"amx_fp16": "AMX-FP16", "avx512_fp16": "AVX512-FP16", "asimdhp": "Arm FP16"},
}
_SYSCTL_FLAGS = {"FEAT_BF16": "bf16", "FEAT_FP16": "asimdhp"}

# Value of ONEDNN_MAX_CPU_ISA -> allowed flags of 16-bit instructions. Other values are no limit.
# https://uxlfoundation.github.io/oneDNN/dev_guide_cpu_dispatcher_control.html
_CORE_BF16 = frozenset({"avx512_bf16"})
_CORE_FP16 = _CORE_BF16 | {"avx512_fp16"}
_CORE_AMX = _CORE_FP16 | {"amx_bf16"}
_ALLOWED: dict[str, frozenset[str]] = {
    **dict.fromkeys(("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2"), frozenset[str]()),
    **dict.fromkeys(("AVX512_CORE", "AVX512_CORE_VNNI"), frozenset[str]()),
    "AVX512_CORE_BF16": _CORE_BF16,
    **dict.fromkeys(("AVX512_CORE_FP16", "AVX10_1_512"), _CORE_FP16),
    **dict.fromkeys(("AVX512_CORE_AMX", "AVX10_1_512_AMX"), _CORE_AMX),
}


def _fields(text: str) -> dict[str, str]:
    """Return key -> value for lines `key : value`. If a key is repeated, its first line counts."""
    fields_read: dict[str, str] = {}
    for line in text.splitlines():
        key, colon, value = line.partition(":")
        if colon:
            fields_read.setdefault(key.strip(), value.strip())
    return fields_read


def parse_cpuinfo(text: str) -> CpuFeatures:
    """Return the features in the field `flags` (x86) or `Features` (Arm) of `/proc/cpuinfo`."""
    fields = _fields(text)
    title = fields.get("model name") or fields.get("Model") or fields.get("Hardware") or "CPU"
    flags = fields.get("flags", fields.get("Features"))
    machine = "aarch64" if "Features" in fields else "x86_64" if "flags" in fields else platform.machine()
    if flags is None:
        return CpuFeatures(title, None, "/proc/cpuinfo lists no instruction-set flags", machine)
    return CpuFeatures(title, frozenset(flags.split()), "/proc/cpuinfo", machine)


def parse_sysctl(text: str) -> CpuFeatures:
    """Return the features in the output of `sysctl machdep.cpu hw.optional` on macOS, for Apple and Intel chips."""
    fields = _fields(text)
    title = fields.get("machdep.cpu.brand_string", "CPU")
    arm = {flag for feature, flag in _SYSCTL_FLAGS.items() if fields.get(f"hw.optional.arm.{feature}") == "1"}
    keys = ("machdep.cpu.features", "machdep.cpu.leaf7_features")
    intel = {flag for key in keys for flag in fields.get(key, "").lower().split()}
    if not fields:
        return CpuFeatures(title, None, "sysctl printed nothing", platform.machine())
    return CpuFeatures(title, frozenset(arm | intel), "sysctl", "x86_64" if intel else "arm64")


def parse_capabilities(capabilities: Mapping[str, object]) -> CpuFeatures:
    """Return the features in `torch.cpu.get_capabilities()`, which newer torch has on every system."""
    flags = frozenset(key for key, value in capabilities.items() if value is True)
    title = str(capabilities.get("cpu_name", "CPU"))
    machine = str(capabilities.get("architecture", platform.machine()))
    return CpuFeatures(title, flags, "torch.cpu.get_capabilities", machine)


def this_cpu() -> CpuFeatures:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        return parse_cpuinfo(cpuinfo.read_text(encoding="utf-8", errors="replace"))
    if platform.system() == "Darwin":
        command = ("/usr/sbin/sysctl", "machdep.cpu", "hw.optional")
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
        return parse_sysctl(done.stdout)
    # torch.cpu.get_capabilities is missing in the oldest supported torch.
    capabilities: Callable[[], Mapping[str, object]] | None = getattr(torch.cpu, "get_capabilities", None)
    if capabilities is not None:
        return parse_capabilities(capabilities())
    system = platform.system() or "this system"
    title, source = platform.processor() or "CPU", f"no way to read CPU flags on {system}"
    return CpuFeatures(title, None, source, platform.machine())


_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma")


def compiler_options() -> tuple[str, ...]:
    """Return the options of the C++ compiler for this CPU, within `ATEN_CPU_CAPABILITY` and `ONEDNN_MAX_CPU_ISA`."""
    capability: str = torch.backends.cpu.get_cpu_capability()
    if capability == "AVX512":
        onednn = this_onednn()
        forbidden = onednn is not None and onednn.forbids("avx512_bf16")
        bfloat16 = "avx512_bf16" in (this_cpu().flags or ()) and not forbidden
        return (*_AVX512, "-mavx512bf16") if bfloat16 else _AVX512
    return ("-mavx2", "-mfma") if capability == "AVX2" else ()


def this_onednn() -> OneDnn | None:
    """Return the 16-bit dtypes of oneDNN on this CPU; None if torch was built without oneDNN."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return None
    functions = {
        _BF16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
        _F16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
    }
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA") or ""
    return OneDnn(frozenset(dtype for dtype, supported in functions.items() if supported()), limit.upper())


def multiplies_by_amx() -> bool:
    """Return True if oneDNN multiplies bfloat16 by AMX instructions on this CPU."""
    onednn = this_onednn()
    return onednn is not None and "amx_bf16" in (this_cpu().flags or ()) and not onednn.forbids("amx_bf16")


def why_not_native(dtype: torch.dtype, name: str, features: CpuFeatures, onednn: OneDnn | None) -> str | None:
    """Return a clause that says why matmuls in a 16-bit dtype are slow on a CPU; None if they run in hardware."""
    instructions = CPU_INSTRUCTIONS[dtype]
    if features.flags is None:
        return f"it is unknown if this CPU has {name} instructions ({features.source})"
    present = features.flags.intersection(instructions)
    if not present:
        return f"this CPU has no {name} instructions (none of {', '.join(instructions.values())})"
    if onednn is None:
        return f"this torch has no oneDNN, which runs {name} matmuls on a CPU"
    if all(onednn.forbids(flag) for flag in present):
        return f"ONEDNN_MAX_CPU_ISA={onednn.limit} forbids oneDNN this CPU's {name} instructions"
    return None


# oneDNN's dtypes -> (table, required flag). AVX512-FP16 and AVX2-VNNI-2 have float16, too, but only AMX was measured.
_TABLES: dict[frozenset[torch.dtype], tuple[str, str]] = {
    frozenset[torch.dtype](): ("cpu-avx2", ""),
    frozenset({_BF16}): ("cpu-avx512", ""),
    frozenset({_BF16, _F16}): ("cpu-amx", "amx_bf16"),
}


def contract_table(features: CpuFeatures, onednn: OneDnn | None) -> tuple[str, str]:
    """Return the name of the best table of dtypes, and a clause on how this CPU differs from the CPU of the table ("" if not)."""
    if onednn is None:
        return "cpu-avx2", "this torch has no oneDNN, but the tables were measured with oneDNN"
    table, flag = _TABLES.get(onednn.takes, ("cpu-amx", "amx_bf16"))
    if features.machine.lower() not in ("x86_64", "amd64"):
        return table, f"this is a CPU of type {features.machine}, but the tables were measured on x86 CPUs"
    if onednn.takes not in _TABLES or (flag and features.flags is not None and flag not in features.flags):
        takes = " and ".join(sorted(map(dtype_name, onednn.takes)))
        return table, f"no table was measured on a CPU without {flag} but with {takes} in oneDNN"
    return table, ""

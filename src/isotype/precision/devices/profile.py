"""Device profiles: the native dtypes, memory and peak rates of this machine's devices and of devices known by name.

`profiles.json` has the named profiles, from data sheets. The profile of a real device depends only on the values that
its driver returns, so that tests can simulate any machine.
"""

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch

from isotype.core.dtypes import dtype_name, parse_dtype
from isotype.core.errors import PrecisionError
from isotype.core.names import plural
from isotype.precision.devices.cpu import (
    CPU_INSTRUCTIONS,
    CpuFeatures,
    OneDnn,
    contract_table,
    this_cpu,
    this_onednn,
    why_not_native,
)
from isotype.precision.devices.names import apple_chip, card_of, names, records

DeviceKind = Literal["cpu", "cuda", "rocm", "xpu", "mps"]
Support = Literal["native", "emulated", "refused"]

_F16, _BF16, _F32, _F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
_HALVES = frozenset({_F16, _BF16})


@dataclass(frozen=True)
class StepRates:
    """Rates of whole training steps on a device.

    Attributes:
        launch: host seconds per kernel launch.
        spread: factor by which a step may be faster or slower than the prediction.
    """

    launch: float
    spread: float


@dataclass(frozen=True)
class DeviceProfile:
    """Properties of one device.

    Attributes:
        name: name of the profile (`"t4"`) or of a real device (`"cpu"`, `"cuda:0"`).
        kind: the torch backend. ROCm and CUDA are different kinds.
        native: dtypes whose matmuls run in hardware at full rate.
        emulated: dtype -> the reason why its matmuls run slowly.
        refused: dtype -> the reason why its matmuls do not run at all.
        memory_bytes: bytes that torch can use; None if the size varies. The driver of a GPU reports fewer bytes than the
            advertised size.
        peak_flops: dtype -> peak rate of dense matmuls in FLOP/s, with float32 accumulation and without TF32. Dtypes without a
            published rate are missing. Emulated dtypes may have a rate.
        memory_bandwidth: peak bytes per second; None if unknown.
        flash_attention: dtypes in which scaled_dot_product_attention does not store the scores.
        capability: compute capability as in torch.cuda; on ROCm, from the gfx architecture; None for other devices.
        float64_slower: float32's rate divided by float64's; 1 if float64 is native or unsupported.
        speed: dtype -> measured matmul rate divided by the float32 rate; empty if not measured.
        contracts: name of the table of accepted dtypes if this kind of device has several tables (`"cpu-avx2"`); else "".
        unlike: a clause on how this device differs from the device on which the table was measured; "" if it does not differ.
        repacks_4bit: True if bitsandbytes repacks 4-bit weights on this device in evaluation mode.
        random_rate: random values (dropout masks) per second and thread; None if not measured.
        page_rate: bytes of zeroed pages that the operating system provides to a CPU per second; None if not measured.
        steps: rates of whole steps. If `steps` is None, the time of a step is predicted as the sum of the times of its
            operators.
    """

    name: str
    title: str
    kind: DeviceKind
    native: frozenset[torch.dtype]
    emulated: Mapping[torch.dtype, str]
    refused: Mapping[torch.dtype, str]
    flash_attention: frozenset[torch.dtype]
    source: str
    memory_bytes: int | None = None
    peak_flops: Mapping[torch.dtype, float] = field(default_factory=dict)
    memory_bandwidth: float | None = None
    present: bool = False
    capability: tuple[int, int] | None = None
    float64_slower: int = 1
    speed: Mapping[torch.dtype, float] = field(default_factory=dict)
    contracts: str = ""
    unlike: str = ""
    repacks_4bit: bool = False
    random_rate: float | None = None
    page_rate: float | None = None
    steps: StepRates | None = None

    @property
    def runs_fp8(self) -> bool:
        """True if FP8 layers of transformers run on the device. For other devices, `from_pretrained` dequantizes the layers."""
        return self.kind == "xpu" or (self.capability or (0, 0)) >= (8, 9)

    def supports(self, dtype: torch.dtype) -> Support:
        """Return how the device runs matmuls in `dtype`. A dtype that is not in the profile counts as refused."""
        if dtype in self.native:
            return "native"
        return "emulated" if dtype in self.emulated else "refused"

    def reason(self, dtype: torch.dtype) -> str:
        """Return the reason for `supports(dtype)`, as a clause."""
        if dtype in self.native:
            return f"{dtype_name(dtype)} matmuls run in hardware on {self.title}"
        unknown = f"no {dtype_name(dtype)} matmul is known on {self.title}"
        return self.emulated.get(dtype) or self.refused.get(dtype) or unknown

    def best_dtype(self) -> torch.dtype:
        """Return the best compute dtype: bfloat16 if native, else float16 if native, else float32."""
        return next((dtype for dtype in (_BF16, _F16) if dtype in self.native), _F32)

    @property
    def rates(self) -> Mapping[torch.dtype, float]:
        """Peak rates, with float64's if its rate follows from float32's."""
        derived = self.float64_slower > 1 and _F32 in self.peak_flops
        return (
            {_F64: self.peak_flops[_F32] / self.float64_slower, **self.peak_flops}
            if derived
            else self.peak_flops
        )

    def slower(self, dtype: torch.dtype, other: torch.dtype) -> float | None:
        """Return the time of matmuls in `dtype`, divided by the time in `other` (measured or published); None if unknown."""
        rates = self.speed or self.rates
        return rates[other] / rates[dtype] if {dtype, other} <= rates.keys() else None


# ------------------------------------------------------------------- what follows from a card's architecture

# Compute capabilities with half of float32's rate in float64. The others have 1/32 before 8.0, and 1/64 from 8.0 on.
_FAST_FLOAT64 = frozenset({(6, 0), (7, 0), (8, 0), (9, 0), (10, 0)})
_FAST_FLOAT16 = frozenset({(5, 3), (6, 0), (6, 2)})  # without tensor cores
_CDNA = frozenset({"gfx90a", "gfx942", "gfx950"})
# Major version of an RDNA GPU -> float32's rate divided by float64's, by AMD's data sheets.
_RDNA_FLOAT64 = {10: 16, 11: 32, 12: 64}


def _support(
    emulated: Mapping[torch.dtype, str],
    refused: Mapping[torch.dtype, str] = MappingProxyType({}),
    flash: frozenset[torch.dtype] = frozenset(),
    capability: tuple[int, int] | None = None,
    float64_slower: int = 1,
) -> dict[str, Any]:
    """Return fields of a profile. A dtype is native unless it is emulated or refused."""
    if float64_slower > 1:
        emulated = {**emulated, _F64: f"float64 runs at 1/{float64_slower} of the float32 rate"}
    native = frozenset({_F32, _F64, *_HALVES}) - emulated.keys() - refused.keys()
    fields = {"native": native, "emulated": emulated, "refused": refused, "flash_attention": flash}
    return {**fields, "capability": capability, "float64_slower": float64_slower}


def _cuda_support(major: int, minor: int) -> dict[str, Any]:
    """Return the fields that follow from an NVIDIA GPU's compute capability.

    Source: CUDA C++ Programming Guide, throughput of arithmetic instructions by compute capability. For bfloat16 below
    7.0, the source is https://github.com/pytorch/pytorch/issues/57773.
    """
    emulated, refused, capability = {}, {}, (major, minor)
    if major < 7:
        refused[_BF16] = f"cuBLAS has no bfloat16 matmuls for compute capability {major}.{minor}"
    elif major < 8:
        cores = "no bfloat16 tensor cores before compute capability 8.0"
        emulated[_BF16] = f"{cores}: its matmuls run several times slower than float16"
    if major < 7 and capability not in _FAST_FLOAT16:
        emulated[_F16] = f"compute capability {major}.{minor} has no fast float16 arithmetic"
    slower = 1 if capability in _FAST_FLOAT64 else 32 if major < 8 else 64
    return _support(emulated, refused, _HALVES if major >= 8 else frozenset(), capability, slower)


def _rocm_support(arch: str) -> dict[str, Any]:
    """Return the fields that follow from an AMD GPU's architecture. CDNA2, RDNA3 and later have bfloat16 instructions."""
    version = re.fullmatch(r"gfx(\d+)(\d)[\da-f]", arch)
    capability = (int(version[1]), int(version[2])) if version else None
    major, emulated = capability[0] if capability else 0, {}
    if arch not in _CDNA and major < 11:
        emulated[_BF16] = f"{arch or 'this architecture'} has no full-rate bfloat16 matrix instructions"
    flash = _HALVES if arch in _CDNA else frozenset()
    return _support(emulated, {}, flash, capability, _RDNA_FLOAT64.get(major, 1))


# ---------------------------------------------------------------------------------------------- named profiles


def _of_record(name: str) -> DeviceProfile:
    record = records()[name]
    gib, bandwidth = record["memory_gib"], record["bandwidth_gb_per_s"]
    if record["kind"] == "cuda":
        support = _cuda_support(*record["capability"])
    elif record["kind"] == "rocm":
        support = _rocm_support(record["arch"])
    else:
        emulated, refused = (
            {parse_dtype(key): reason for key, reason in record[runs].items()}
            for runs in ("emulated", "refused")
        )
        support = _support(emulated, refused, frozenset(map(parse_dtype, record["flash_attention"])))
    return DeviceProfile(
        name=name,
        title=record["title"],
        kind=record["kind"],
        memory_bytes=None if gib is None else int(gib * 2**30),
        peak_flops={parse_dtype(key): rate * 1e12 for key, rate in record["peak_tflops"].items()},
        memory_bandwidth=None if bandwidth is None else bandwidth * 1e9,
        source=record["source"],
        speed={parse_dtype(key): rate for key, rate in record.get("matmul_speed", {}).items()},
        contracts=record.get("contracts", ""),
        repacks_4bit=record.get("repacks_4bit", False),
        **support,
    )


# --------------------------------------------------------------------------------------------------------- CPU


def cpu_profile(features: CpuFeatures, memory_bytes: int | None, onednn: OneDnn | None) -> DeviceProfile:
    """Return the profile of a CPU. `onednn` is None if torch has no oneDNN; 16-bit matmuls are then slow."""
    reasons = {d: why_not_native(d, dtype_name(d), features, onednn) for d in CPU_INSTRUCTIONS}
    emulated = {dtype: reason for dtype, reason in reasons.items() if reason is not None}
    support = _support(emulated, flash=frozenset({_F32, _BF16, _F16}))
    table, unlike = contract_table(features, onednn)
    measured = _of_record(table)
    return DeviceProfile(
        name="cpu",
        title=features.title,
        kind="cpu",
        memory_bytes=memory_bytes,
        present=True,
        source=features.source,
        speed=measured.speed if support["native"] == measured.native and not unlike else {},
        contracts=table,
        unlike=unlike,
        repacks_4bit="avx512_bf16" in (features.flags or ()),
        **support,
    )


@cache
def this_cpu_emulates(dtype: torch.dtype) -> bool:
    """Return True if this CPU has no instructions for products in `dtype`."""
    known = dtype in CPU_INSTRUCTIONS
    return known and cpu_profile(this_cpu(), None, this_onednn()).supports(dtype) != "native"


def _this_memory() -> int | None:
    """Return the bytes of the machine's memory, or of the container's limit if the limit is lower; None if unknown."""
    names: Mapping[str, int] = getattr(os, "sysconf_names", {})  # missing on Windows
    if not {"SC_PAGE_SIZE", "SC_PHYS_PAGES"} <= names.keys():
        return None
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
    texts = [limit.read_text(encoding="utf-8").strip() for limit in limits if limit.exists()]
    return min([installed, *(int(text) for text in texts if text.isdecimal())])


# ------------------------------------------------------------------------------------------------ accelerators


def _accelerator(
    name: str, kind: DeviceKind, title: str, memory_bytes: int, support: Mapping[str, Any]
) -> DeviceProfile:
    """Return an accelerator's profile. Its rates come from the record with the same driver name and the closest memory size."""
    cards = [_of_record(key) for key, record in records().items() if title in record["driver_names"]]
    unknown = DeviceProfile(name, title, kind, **support, source="no data sheet known for this card")
    sheet = min(cards, key=lambda card: abs((card.memory_bytes or 0) - memory_bytes), default=unknown)
    source = f"{kind} driver; {sheet.source}"
    here = {"name": name, "title": title, "memory_bytes": memory_bytes, "present": True, "source": source}
    return replace(sheet, **{**support, **here})


def cuda_profile(
    title: str, memory_bytes: int, capability: tuple[int, int], name: str = "cuda"
) -> DeviceProfile:
    return _accelerator(name, "cuda", title, memory_bytes, _cuda_support(*capability))


def rocm_profile(title: str, memory_bytes: int, arch: str, name: str = "cuda") -> DeviceProfile:
    """Return the profile of an AMD GPU by its architecture (`"gfx942:sramecc+:xnack-"`)."""
    return _accelerator(name, "rocm", title, memory_bytes, _rocm_support(arch.partition(":")[0]))


def xpu_profile(
    title: str, memory_bytes: int, *, matrix_engine: bool, float64: bool, name: str = "xpu"
) -> DeviceProfile:
    """Return the profile of an Intel GPU: bfloat16 is native with XMX engines."""
    emulated = {} if matrix_engine else {_BF16: "no XMX engines, so torch converts bfloat16 in software"}
    refused = {} if float64 else {_F64: "this GPU has no float64 arithmetic"}
    return _accelerator(name, "xpu", title, memory_bytes, _support(emulated, refused))


def mps_profile(
    title: str, memory_bytes: int | None, name: str = "mps", *, present: bool = True
) -> DeviceProfile:
    """Return the profile of an Apple GPU by the name of the chip (`"Apple M2 Pro"`). M3 and later have bfloat16."""
    generic, chip = _of_record("mps"), re.search(r"\bM(\d+)\b", title)
    emulated = {} if chip is not None and int(chip.group(1)) >= 3 else generic.emulated
    here: dict[str, Any] = {"name": name, "title": f"{title} GPU", "memory_bytes": memory_bytes}
    return replace(generic, **_support(emulated, generic.refused), **here, present=present)


def _probe_cuda(device: torch.device) -> DeviceProfile:
    index = torch.cuda.current_device() if device.index is None else device.index
    raw = torch.cuda.get_device_properties(index)
    if torch.version.hip:
        return rocm_profile(raw.name, raw.total_memory, getattr(raw, "gcnArchName", ""), str(device))
    return cuda_profile(raw.name, raw.total_memory, (raw.major, raw.minor), str(device))


def _probe_xpu(device: torch.device) -> DeviceProfile:
    raw = torch.xpu.get_device_properties(device)
    engine = bool(getattr(raw, "has_subgroup_matrix_multiply_accumulate", False))
    float64 = bool(getattr(raw, "has_fp64", False))
    return xpu_profile(raw.name, raw.total_memory, matrix_engine=engine, float64=float64, name=str(device))


def _probe_mps(device: torch.device) -> DeviceProfile:
    return mps_profile(this_cpu().title, torch.mps.recommended_max_memory(), str(device))


# Device type -> (function that counts the devices, function that probes one), in order of preference for "auto".
_BACKENDS: dict[str, tuple[Callable[[], int], Callable[[torch.device], DeviceProfile]]] = {
    "cuda": (torch.cuda.device_count, _probe_cuda),
    "xpu": (torch.xpu.device_count, _probe_xpu),
    "mps": (torch.mps.device_count, _probe_mps),
    "cpu": (
        lambda: 1,
        lambda device: replace(cpu_profile(this_cpu(), _this_memory(), this_onednn()), name=str(device)),
    ),
}


# ----------------------------------------------------------------------------------------------------- look-up


def device_profile(device: str | torch.device = "auto") -> DeviceProfile:
    """Return the profile of a device of this machine, or a named profile.

    Args:
        device: `"auto"` (the machine's best accelerator, else the CPU), a device of this machine (`"cpu"`, `"cuda"`,
            `"cuda:1"`, `"mps"`, `"xpu"`), or a profile's name in any spelling (`"t4"`, `"NVIDIA T4"`). `"mps"` and
            `"xpu"` name generic profiles if this machine has no such device.

    Raises:
        PrecisionError: the name is unknown, or the real device is not in this machine.
    """
    name = re.sub(r"^gpu(?=:|$)", "cuda", str(device).strip().lower())
    if name == "auto":
        name = next(kind for kind, (count, _) in _BACKENDS.items() if count() > 0)
    real = re.fullmatch(r"(cpu|cuda|xpu|mps)(?::(0|[1-9][0-9]*))?", name)
    if real is None:
        return _named_profile(name)
    kind, index = real.group(1), int(real.group(2) or 0)
    count, probe = _BACKENDS[kind]
    if index < count():
        return probe(torch.device(name))
    if name in names():
        return _named_profile(name)
    raise _absent_device(name, kind, count())


def _named_profile(name: str) -> DeviceProfile:
    if chip := apple_chip(name):
        return mps_profile(f"Apple {' '.join(chip).title()}", None, "-".join(chip), present=False)
    return _of_record(card_of(name))


def _absent_device(name: str, kind: str, count: int) -> PrecisionError:
    build = torch.version.cuda or torch.version.hip or "a CPU build"
    counted = f"torch {torch.__version__} ({build}) finds {plural(count, f'{kind} device')}"
    fix = (
        f"use {kind}:{count - 1}"
        if count
        else f"use auto (the CPU if there is no other device), or install a torch built for {kind}; to check a "
        f"run for another machine, name a profile such as {'h100' if kind == 'cuda' else kind}"
    )
    expected = f"a device that torch finds; {counted}"
    return PrecisionError.of("device not in this machine", f"device {name!r}", expected, fix)

"""Device profiles: native dtypes, memory and peak rates of this machine or a named device.

Named profiles come from `profiles.json` (data sheets). Real devices are probed by pure functions over text or
small records, so that tests can describe any machine.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import torch

from isotype.core.dtypes import dtype_name
from isotype.core.errors import PrecisionError
from isotype.precision.devices.cpu import (
    CPU_INSTRUCTIONS,
    CpuFeatures,
    OneDnn,
    contract_source,
    this_cpu,
    this_onednn,
    why_not_native,
)
from isotype.precision.devices.names import cards_named, words_of

DeviceKind = Literal["cpu", "cuda", "rocm", "xpu", "mps"]
Support = Literal["native", "emulated", "refused"]

_F16, _BF16, _F32, _F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
_HALVES = frozenset({_F16, _BF16})


@dataclass(frozen=True)
class StepRates:
    """Step-level rates of a device.

    Attributes:
        between: share of the traced bytes and launches between products that remains after kernel fusion.
        launch: host seconds per kernel launch.
        spread: factor by which a step may be faster or slower than predicted.
    """

    between: float
    launch: float
    spread: float


@dataclass(frozen=True)
class DeviceProfile:
    """Properties of one device.

    Attributes:
        name: key of the profile (`"t4"`) or the device itself (`"cpu"`, `"cuda:0"`).
        title: common name.
        kind: its torch backend.
        native: dtypes whose matmuls run in hardware at full rate.
        emulated: dtype -> why its matmuls run, but slowly.
        refused: dtype -> why its matmuls do not run at all.
        memory_bytes: memory that torch can use, in bytes (on a GPU the driver's total, which is below the
            advertised size); None if it varies.
        peak_flops: dtype -> dense matmul peak in FLOP/s, without sparsity, with float32 accumulation and
            without TF32; only dtypes with a published rate.
        memory_bandwidth: peak bytes/s, or None.
        flash_attention: dtypes that scaled_dot_product_attention runs without materialising the scores.
        present: True when this device is in this machine.
        source: of the numbers.
        capability: compute capability as torch.cuda gives it (on ROCm that of the gfx architecture), or
            None.
        speed: dtype -> rate of its matmuls over float32's, measured on such a device; empty if not
            measured.
        contracts: name of the contract table of such a device where its kind has several (`"cpu-avx2"`),
            else "".
        unlike: why that table's device differs, as a clause; "" if it does not.
        repacks_4bit: whether bitsandbytes repacks 4-bit weights there in evaluation.
        random_rate: random values per second and thread (dropout masks); None if not measured.
        page_rate: bytes per second of zeroed pages from a CPU's system; None if not measured.
        steps: step-level rates; None if unknown: then a step takes the sum of its operators.
    """

    name: str
    title: str
    kind: DeviceKind
    native: frozenset[torch.dtype]
    emulated: Mapping[torch.dtype, str]
    refused: Mapping[torch.dtype, str]
    memory_bytes: int | None
    peak_flops: Mapping[torch.dtype, float]
    memory_bandwidth: float | None
    flash_attention: frozenset[torch.dtype]
    present: bool
    source: str
    capability: tuple[int, int] | None = None
    speed: Mapping[torch.dtype, float] = field(default_factory=dict)
    contracts: str = ""
    unlike: str = ""
    repacks_4bit: bool = False
    random_rate: float | None = None
    page_rate: float | None = None
    steps: StepRates | None = None

    def supports(self, dtype: torch.dtype) -> Support:
        """Return the support of matmuls in `dtype`; a dtype not in the profile is refused."""
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
        """Return the preferred compute dtype: bfloat16, else float16, else float32, whichever is native first."""
        return next((dtype for dtype in (_BF16, _F16) if dtype in self.native), _F32)

    def slower(self, dtype: torch.dtype, other: torch.dtype) -> float | None:
        """Return how many times slower matmuls in `dtype` are than in `other`; None if not measured."""
        rates = self.speed
        return rates[other] / rates[dtype] if {dtype, other} <= rates.keys() else None


# ---------------------------------------------------------------------------------------------- named profiles


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _from_record(name: str, record: Mapping[str, Any]) -> DeviceProfile:
    gib, bandwidth = record["memory_gib"], record["bandwidth_gb_per_s"]
    return DeviceProfile(
        name=name,
        title=record["title"],
        kind=record["kind"],
        native=frozenset(map(_dtype, record["native"])),
        emulated={_dtype(key): reason for key, reason in record["emulated"].items()},
        refused={_dtype(key): reason for key, reason in record["refused"].items()},
        memory_bytes=None if gib is None else int(gib * 2**30),
        peak_flops={_dtype(key): rate * 1e12 for key, rate in record["peak_tflops"].items()},
        memory_bandwidth=None if bandwidth is None else bandwidth * 1e9,
        flash_attention=frozenset(map(_dtype, record["flash_attention"])),
        present=False,
        source=record["source"],
        capability=tuple(record["capability"]) if "capability" in record else None,
        speed={_dtype(key): rate for key, rate in record.get("matmul_speed", {}).items()},
        contracts=record.get("contracts", ""),
        repacks_4bit=record.get("repacks_4bit", False),
    )


@cache
def _records() -> dict[str, Any]:
    text = resources.files("isotype.precision.devices").joinpath("profiles.json").read_text(encoding="utf-8")
    records: dict[str, Any] = json.loads(text)
    return records


@cache
def _names() -> dict[str, str]:
    """Return accepted profile name -> record name, for names and aliases."""
    aliases = {alias: name for name, record in _records().items() for alias in record.get("aliases", ())}
    return {name: name for name in _records()} | aliases


def profile_names() -> tuple[str, ...]:
    """Return the profile names of `device_profile`, with aliases, sorted."""
    return tuple(sorted(_names()))


@cache
def _by_driver_name() -> dict[str, str]:
    return {driver: name for name, record in _records().items() for driver in record["driver_names"]}


def _data_sheet(driver_name: str) -> DeviceProfile | None:
    """Return the named profile of a card by its exact driver name; None if there is none."""
    name = _by_driver_name().get(driver_name)
    return None if name is None else _from_record(name, _records()[name])


# --------------------------------------------------------------------------------------------------------- CPU


def cpu_profile(features: CpuFeatures, memory_bytes: int | None, onednn: OneDnn | None) -> DeviceProfile:
    """Return the profile of a CPU; without oneDNN (None) torch has no fast 16-bit matmuls."""
    reasons = {
        dtype: why_not_native(dtype, dtype_name(dtype), features, onednn) for dtype in CPU_INSTRUCTIONS
    }
    emulated = {dtype: reason for dtype, reason in reasons.items() if reason is not None}
    source = contract_source(features, onednn)
    measured = _named_profile(source.table)
    native = frozenset({_F32, _F64, *reasons}) - emulated.keys()
    return DeviceProfile(
        name="cpu",
        title=features.title,
        kind="cpu",
        native=native,
        emulated=emulated,
        refused={},
        memory_bytes=memory_bytes,
        peak_flops={},
        memory_bandwidth=None,
        flash_attention=frozenset({_F32, _BF16, _F16}),
        present=True,
        source=features.source,
        speed=measured.speed if native == measured.native and not source.unlike else {},
        contracts=source.table,
        unlike=source.unlike,
        repacks_4bit="avx512_bf16" in (features.flags or ()),
    )


@cache
def this_cpu_emulates(dtype: torch.dtype) -> bool:
    """Return whether this CPU has no instructions for products in `dtype`."""
    return (
        dtype in CPU_INSTRUCTIONS and cpu_profile(this_cpu(), None, this_onednn()).supports(dtype) != "native"
    )


def _this_memory() -> int | None:
    """Return the usable memory in bytes: the machine's, or a container's limit; None if unknown."""
    names: Mapping[str, int] = getattr(os, "sysconf_names", {})  # missing on Windows
    if not {"SC_PAGE_SIZE", "SC_PHYS_PAGES"} <= names.keys():
        return None
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
    texts = [limit.read_text(encoding="utf-8").strip() for limit in limits if limit.exists()]
    return min([installed, *(int(text) for text in texts if text.isdecimal())])


# ------------------------------------------------------------------------------------------------ accelerators


@dataclass(frozen=True)
class AcceleratorProperties:
    """Driver properties of an accelerator, sufficient for its profile.

    Attributes:
        title: the driver's name of the card.
        memory_bytes: total memory, or None.
        capability: CUDA compute capability, (0, 0) for others.
        arch: ROCm architecture (`"gfx942:sramecc+:xnack-"`), "" for others.
        matrix_engine: XPU only: whether it has XMX matrix engines.
        float64: XPU only: whether it has float64 arithmetic.
    """

    title: str
    memory_bytes: int | None
    capability: tuple[int, int] = (0, 0)
    arch: str = ""
    matrix_engine: bool = True
    float64: bool = True


def _accelerator(
    name: str,
    kind: DeviceKind,
    properties: AcceleratorProperties,
    emulated: Mapping[torch.dtype, str],
    refused: Mapping[torch.dtype, str],
    flash: frozenset[torch.dtype],
) -> DeviceProfile:
    """Return the data sheet's profile of a known card, else one from the driver's properties."""
    unknown = DeviceProfile(
        name=name,
        title=properties.title,
        kind=kind,
        native=frozenset({_F32, _F64, *_HALVES}) - emulated.keys() - refused.keys(),
        emulated=emulated,
        refused=refused,
        memory_bytes=properties.memory_bytes,
        peak_flops={},
        memory_bandwidth=None,
        flash_attention=flash,
        present=True,
        source=f"{kind} driver; no data sheet known for this card",
        capability=properties.capability if any(properties.capability) else None,
    )
    sheet = _data_sheet(properties.title)
    if sheet is None or sheet.kind != kind:
        return unknown
    return replace(
        sheet,
        name=name,
        title=properties.title,
        memory_bytes=properties.memory_bytes,
        present=True,
        source=f"{kind} driver; {sheet.source}",
    )


def cuda_profile(properties: AcceleratorProperties, name: str = "cuda") -> DeviceProfile:
    """Return the profile of an NVIDIA GPU by its compute capability.

    Source: CUDA C++ Programming Guide, arithmetic instruction throughput by compute capability.
    """
    major, minor = properties.capability
    if major >= 8:
        return _accelerator(name, "cuda", properties, {}, {}, _HALVES)
    emulated = {_BF16: f"no bfloat16 tensor cores before compute capability 8.0 (this is {major}.{minor})"}
    if major < 7 and properties.capability not in {(5, 3), (6, 0), (6, 2)}:
        emulated[_F16] = f"compute capability {major}.{minor} has no fast float16 arithmetic"
    return _accelerator(name, "cuda", properties, emulated, {}, frozenset())


def rocm_profile(properties: AcceleratorProperties, name: str = "cuda") -> DeviceProfile:
    """Return the profile of an AMD GPU by its architecture (matrix instructions from CDNA2 and RDNA3 on)."""
    arch = properties.arch.partition(":")[0]
    cdna = arch in {"gfx90a", "gfx942", "gfx950"}
    emulated = {}
    if not cdna and not re.fullmatch(r"gfx1[12]\d\d", arch):
        emulated[_BF16] = f"{arch or 'this architecture'} has no full-rate bfloat16 matrix instructions"
    return _accelerator(name, "rocm", properties, emulated, {}, _HALVES if cdna else frozenset())


def xpu_profile(properties: AcceleratorProperties, name: str = "xpu") -> DeviceProfile:
    """Return the profile of an Intel GPU: bfloat16 and float16 run in XMX engines if it has them."""
    emulated = (
        {} if properties.matrix_engine else {_BF16: "no XMX engines: torch converts bfloat16 in software"}
    )
    refused = {} if properties.float64 else {_F64: "this GPU has no float64 arithmetic"}
    return _accelerator(name, "xpu", properties, emulated, refused, frozenset())


def mps_profile(properties: AcceleratorProperties, name: str = "mps") -> DeviceProfile:
    """Return the profile of an Apple GPU by its chip's name (`"Apple M2 Pro"`); M3 and later have bfloat16."""
    generic = _from_record("mps", _records()["mps"])
    chip = re.search(r"\bM(\d+)\b", properties.title)
    modern = chip is not None and int(chip.group(1)) >= 3
    return replace(
        generic,
        name=name,
        title=f"{properties.title} GPU",
        native=generic.native | {_BF16} if modern else generic.native,
        emulated={} if modern else generic.emulated,
        memory_bytes=properties.memory_bytes,
        present=True,
        source=f"sysctl; {generic.source}",
    )


def _probe_cuda(device: torch.device) -> DeviceProfile:
    index = torch.cuda.current_device() if device.index is None else device.index
    raw = torch.cuda.get_device_properties(index)
    properties = AcceleratorProperties(
        title=raw.name,
        memory_bytes=raw.total_memory,
        capability=(raw.major, raw.minor),
        arch=getattr(raw, "gcnArchName", ""),
    )
    make = rocm_profile if torch.version.hip else cuda_profile
    return make(properties, str(device))


def _probe_xpu(device: torch.device) -> DeviceProfile:
    raw = torch.xpu.get_device_properties(device)
    properties = AcceleratorProperties(
        title=raw.name,
        memory_bytes=raw.total_memory,
        matrix_engine=bool(getattr(raw, "has_subgroup_matrix_multiply_accumulate", False)),
        float64=bool(getattr(raw, "has_fp64", False)),
    )
    return xpu_profile(properties, str(device))


def _probe_mps(device: torch.device) -> DeviceProfile:
    title = this_cpu().title
    return mps_profile(AcceleratorProperties(title, torch.mps.recommended_max_memory()), str(device))


def _probe_cpu(device: torch.device) -> DeviceProfile:
    return replace(cpu_profile(this_cpu(), _this_memory(), this_onednn()), name=str(device))


@dataclass(frozen=True)
class _Backend:
    """A device type of torch: the number of devices, and the function that probes one."""

    count: Callable[[], int]
    probe: Callable[[torch.device], DeviceProfile]


# In order of preference for "auto".
_BACKENDS: dict[str, _Backend] = {
    "cuda": _Backend(torch.cuda.device_count, _probe_cuda),
    "xpu": _Backend(torch.xpu.device_count, _probe_xpu),
    "mps": _Backend(torch.mps.device_count, _probe_mps),
    "cpu": _Backend(lambda: 1, _probe_cpu),
}


# ----------------------------------------------------------------------------------------------------- look-up


def device_profile(device: str | torch.device = "auto") -> DeviceProfile:
    """Return the profile of a real device of this machine, or a named one.

    Args:
        device: `"auto"` for the best accelerator here, else this CPU; a real device (`"cpu"`, `"cuda"`,
            `"cuda:1"`, `"mps"`, `"xpu"`), probed now; or a profile name in any spelling (`"t4"`, `"NVIDIA
            T4"`). `"mps"` and `"xpu"` are generic profiles on machines without one.

    Raises:
        PrecisionError: the name is unknown, or the real device is not there.
    """
    name = str(device).strip().lower()
    if name == "auto":
        name = next(kind for kind, backend in _BACKENDS.items() if backend.count() > 0)
    real = re.fullmatch(r"(cpu|cuda|xpu|mps)(?::(0|[1-9][0-9]*))?", name)
    if real is None:
        return _named_profile(name)
    kind, index = real.group(1), int(real.group(2) or 0)
    backend = _BACKENDS[kind]
    if index < backend.count():
        return backend.probe(torch.device(name))
    if name in _names():
        return _named_profile(name)
    raise _absent_device(name, kind, backend.count())


def _named_profile(name: str) -> DeviceProfile:
    words = words_of(name)
    exact = next((each for each in (name, "".join(words), "-".join(words)) if each in _names()), None)
    if exact is not None:
        return _from_record(_names()[exact], _records()[_names()[exact]])
    cards, is_card = cards_named(name, _records())
    if len(cards) == 1 and is_card:
        return _from_record(cards[0], _records()[cards[0]])
    if cards:
        raise PrecisionError.of(
            "a name of several devices" if len(cards) > 1 else "unknown device",
            f"device {name!r}",
            "the name of one card",
            f"give one of {', '.join(cards)}",
        )
    close = difflib.get_close_matches(name, _names(), n=3, cutoff=0.5)
    fix = f"did you mean {' or '.join(close)}?" if close else "give one of these names"
    expected = f"auto, cpu, cuda, cuda:N, mps, xpu, or a profile: {', '.join(profile_names())}"
    raise PrecisionError.of("unknown device", f"device {name!r}", expected, fix)


def _absent_device(name: str, kind: str, count: int) -> PrecisionError:
    build = torch.version.cuda or torch.version.hip or "a CPU build"
    seen = f"torch {torch.__version__} ({build}) sees {count} {kind} device{'' if count == 1 else 's'}"
    profile = "h100" if kind == "cuda" else "auto"
    fix = (
        f"use {kind}:{count - 1}"
        if count
        else f"use auto (the CPU if there is no other device), or install a torch built for {kind}; to plan for one with "
        f"isotype check, name a profile such as {profile}"
    )
    return PrecisionError.of(
        "device not in this machine", f"device {name!r}", f"a device that torch sees; {seen}", fix
    )

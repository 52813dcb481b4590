"""Device profiles: the native dtypes, memory and peak rates of this machine's devices and of devices known by name.

`profiles.json` has the named profiles, from data sheets. The profile of a real device depends only on the text
or properties that its driver returns, so tests can simulate any machine.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch

from isotype.core.arguments import did_you_mean
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

DeviceKind = Literal["cpu", "cuda", "rocm", "xpu", "mps"]
Support = Literal["native", "emulated", "refused"]

_F16, _BF16, _F32, _F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
_HALVES = frozenset({_F16, _BF16})
# Words shared by many cards.
_MAKERS = frozenset({"nvidia", "geforce", "tesla", "quadro", "amd", "instinct", "radeon", "gpu"})
_CARDS = ("cuda", "rocm")
_CAPACITY = re.compile(r"(\d+)\s*gi?b?\b")
_SPELLING = re.compile(r"[a-z0-9 _-]*")
_WORDS = re.compile(r"\d+g\b|[a-z]+\d*[a-z]*|\d+[a-z]*")
# Words of a series or a board, which alone name no card.
_SHARED = re.compile(r"rtx|gtx|sxm\d*|pcie|hbm\d*\w*|\d+g")
# Words that, after a number, name another card: an RTX 5070 is no RTX 5070 Ti.
_VARIANTS = frozenset({"ti", "super"})
_ATTACHED = re.compile(r"(\d)(ti|super)\b")
# Bounds of the advertised memory over the usable one, in GiB: the driver takes a share of the advertised memory.
_LEAST, _MOST = 0.97, 1.12


@dataclass(frozen=True)
class StepRates:
    """Rates of whole training steps on a device.

    Attributes:
        between: the share of the bytes and kernel launches between matmuls that remains after kernel fusion.
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
        name: name of the profile (`"t4"`) or of a real device (`"cpu"`, `"cuda:0"`).
        kind: the torch backend; ROCm and CUDA are different kinds.
        native: dtypes whose matmuls run in hardware at full rate.
        emulated: dtype -> why its matmuls run slowly.
        refused: dtype -> why its matmuls do not run at all.
        memory_bytes: bytes that torch can use; None if the size varies. On a GPU this is the driver's total, which is
            below the advertised size.
        peak_flops: dtype -> peak rate of dense matmuls in FLOP/s, with float32 accumulation and without TF32. `peak_flops`
            has only the dtypes with a published rate.
        memory_bandwidth: peak bytes per second; None if unknown.
        flash_attention: dtypes in which scaled_dot_product_attention does not materialize the scores.
        capability: compute capability as in torch.cuda; on ROCm it is derived from the gfx architecture; None for other
            devices.
        speed: dtype -> measured matmul rate, divided by that of float32; empty if not measured.
        contracts: name of the table of operator contracts if devices of this kind have several (`"cpu-avx2"`); else "".
        unlike: a clause that says how this device differs from the device of the measured table; "" if it does not differ.
        repacks_4bit: whether bitsandbytes, in evaluation mode, repacks 4-bit weights on this device.
        random_rate: random values (dropout masks) per second and thread; None if not measured.
        page_rate: bytes of zeroed pages that a CPU's operating system provides per second; None if not measured.
        steps: rates of whole steps. If they are unknown (None), a step is predicted as the sum of its operators.
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

    @property
    def runs_fp8(self) -> bool:
        """True if FP8 layers of transformers run; for other devices, `from_pretrained` dequantizes their weights."""
        return self.kind == "xpu" or (self.capability or (0, 0)) >= (8, 9)

    def supports(self, dtype: torch.dtype) -> Support:
        """Return how the device runs matmuls in `dtype`; a dtype that the profile lacks counts as refused."""
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
        """Return the best compute dtype: bfloat16 if it is native, else float16 if it is native, else float32."""
        return next((dtype for dtype in (_BF16, _F16) if dtype in self.native), _F32)

    def slower(self, dtype: torch.dtype, other: torch.dtype) -> float | None:
        """Return how many times slower matmuls in `dtype` are than in `other`; None if not measured."""
        return self.speed[other] / self.speed[dtype] if {dtype, other} <= self.speed.keys() else None


# ---------------------------------------------------------------------------------------------- named profiles


def _of_record(name: str) -> DeviceProfile:
    record = _records()[name]
    gib, bandwidth = record["memory_gib"], record["bandwidth_gb_per_s"]
    return DeviceProfile(
        name=name,
        title=record["title"],
        kind=record["kind"],
        native=frozenset(map(parse_dtype, record["native"])),
        emulated={parse_dtype(key): reason for key, reason in record["emulated"].items()},
        refused={parse_dtype(key): reason for key, reason in record["refused"].items()},
        memory_bytes=None if gib is None else int(gib * 2**30),
        peak_flops={parse_dtype(key): rate * 1e12 for key, rate in record["peak_tflops"].items()},
        memory_bandwidth=None if bandwidth is None else bandwidth * 1e9,
        flash_attention=frozenset(map(parse_dtype, record["flash_attention"])),
        present=False,
        source=record["source"],
        capability=tuple(record["capability"]) if "capability" in record else None,
        speed={parse_dtype(key): rate for key, rate in record.get("matmul_speed", {}).items()},
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
    aliases = {alias: name for name, record in _records().items() for alias in record.get("aliases", ())}
    return {name: name for name in _records()} | aliases


def profile_names() -> tuple[str, ...]:
    """Return the names and aliases of all profiles, sorted."""
    return tuple(sorted(_names()))


# --------------------------------------------------------------------------------------------------------- CPU


def cpu_profile(features: CpuFeatures, memory_bytes: int | None, onednn: OneDnn | None) -> DeviceProfile:
    """Return the profile of a CPU. `onednn` is None if torch has no oneDNN: 16-bit matmuls are then slow."""
    reasons = {d: why_not_native(d, dtype_name(d), features, onednn) for d in CPU_INSTRUCTIONS}
    emulated = {dtype: reason for dtype, reason in reasons.items() if reason is not None}
    table, unlike = contract_table(features, onednn)
    measured = _named_profile(table)
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
        speed=measured.speed if native == measured.native and not unlike else {},
        contracts=table,
        unlike=unlike,
        repacks_4bit="avx512_bf16" in (features.flags or ()),
    )


@cache
def this_cpu_emulates(dtype: torch.dtype) -> bool:
    """Return whether this CPU has no instructions for products in `dtype`."""
    known = dtype in CPU_INSTRUCTIONS
    return known and cpu_profile(this_cpu(), None, this_onednn()).supports(dtype) != "native"


def _this_memory() -> int | None:
    """Return the bytes of the machine's memory, or the container's limit if that is lower; None if unknown."""
    names: Mapping[str, int] = getattr(os, "sysconf_names", {})  # missing on Windows
    if not {"SC_PAGE_SIZE", "SC_PHYS_PAGES"} <= names.keys():
        return None
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
    texts = [limit.read_text(encoding="utf-8").strip() for limit in limits if limit.exists()]
    return min([installed, *(int(text) for text in texts if text.isdecimal())])


# ------------------------------------------------------------------------------------------------ accelerators


def _accelerator(
    name: str,
    kind: DeviceKind,
    title: str,
    memory_bytes: int | None,
    emulated: Mapping[torch.dtype, str],
    refused: Mapping[torch.dtype, str] = MappingProxyType({}),
    flash: frozenset[torch.dtype] = frozenset(),
    capability: tuple[int, int] | None = None,
) -> DeviceProfile:
    """Return a card's profile from `profiles.json`, or else from the properties that the driver returns."""
    sheets = (key for key, record in _records().items() if title in record["driver_names"])
    sheet = next(map(_of_record, sheets), None)
    if sheet is not None and sheet.kind == kind:
        return replace(
            sheet,
            name=name,
            title=title,
            memory_bytes=memory_bytes,
            present=True,
            source=f"{kind} driver; {sheet.source}",
        )
    return DeviceProfile(
        name=name,
        title=title,
        kind=kind,
        native=frozenset({_F32, _F64, *_HALVES}) - emulated.keys() - refused.keys(),
        emulated=emulated,
        refused=refused,
        memory_bytes=memory_bytes,
        peak_flops={},
        memory_bandwidth=None,
        flash_attention=flash,
        present=True,
        source=f"{kind} driver; no data sheet known for this card",
        capability=capability,
    )


def cuda_profile(
    title: str, memory_bytes: int | None, capability: tuple[int, int], name: str = "cuda"
) -> DeviceProfile:
    """Return the profile of an NVIDIA GPU by its compute capability.

    Source: CUDA C++ Programming Guide, arithmetic instruction throughput by compute capability.
    """
    major, minor = capability
    emulated = {}
    if major < 8:
        emulated[_BF16] = f"no bfloat16 tensor cores before compute capability 8.0 (this is {major}.{minor})"
    if major < 7 and capability not in {(5, 3), (6, 0), (6, 2)}:
        emulated[_F16] = f"compute capability {major}.{minor} has no fast float16 arithmetic"
    flash = _HALVES if major >= 8 else frozenset[torch.dtype]()
    return _accelerator(name, "cuda", title, memory_bytes, emulated, flash=flash, capability=capability)


def rocm_profile(
    title: str,
    memory_bytes: int | None,
    arch: str,
    capability: tuple[int, int] | None = None,
    name: str = "cuda",
) -> DeviceProfile:
    """Return the profile of an AMD GPU by its architecture (`"gfx942:sramecc+:xnack-"`).

    CDNA2, RDNA3 and later have matrix instructions.
    """
    arch = arch.partition(":")[0]
    cdna = arch in {"gfx90a", "gfx942", "gfx950"}
    emulated = {}
    if not cdna and not re.fullmatch(r"gfx1[12]\d\d", arch):
        emulated[_BF16] = f"{arch or 'this architecture'} has no full-rate bfloat16 matrix instructions"
    flash = _HALVES if cdna else frozenset[torch.dtype]()
    return _accelerator(name, "rocm", title, memory_bytes, emulated, flash=flash, capability=capability)


def xpu_profile(
    title: str, memory_bytes: int | None, *, matrix_engine: bool, float64: bool, name: str = "xpu"
) -> DeviceProfile:
    """Return the profile of an Intel GPU: bfloat16 is native with XMX engines."""
    emulated = {} if matrix_engine else {_BF16: "no XMX engines: torch converts bfloat16 in software"}
    refused = {} if float64 else {_F64: "this GPU has no float64 arithmetic"}
    return _accelerator(name, "xpu", title, memory_bytes, emulated, refused)


def mps_profile(title: str, memory_bytes: int | None, name: str = "mps") -> DeviceProfile:
    """Return the profile of an Apple GPU by the chip's name (`"Apple M2 Pro"`); M3 and later have bfloat16."""
    generic = _of_record("mps")
    chip = re.search(r"\bM(\d+)\b", title)
    modern = chip is not None and int(chip.group(1)) >= 3
    return replace(
        generic,
        name=name,
        title=f"{title} GPU",
        native=generic.native | {_BF16} if modern else generic.native,
        emulated={} if modern else generic.emulated,
        memory_bytes=memory_bytes,
        present=True,
        source=f"sysctl; {generic.source}",
    )


def _probe_cuda(device: torch.device) -> DeviceProfile:
    index = torch.cuda.current_device() if device.index is None else device.index
    raw = torch.cuda.get_device_properties(index)
    capability, name = (raw.major, raw.minor), str(device)
    if torch.version.hip:
        return rocm_profile(raw.name, raw.total_memory, getattr(raw, "gcnArchName", ""), capability, name)
    return cuda_profile(raw.name, raw.total_memory, capability, name)


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
        device: `"auto"` (the best accelerator of this machine, else the CPU), a device of this machine (`"cpu"`,
            `"cuda"`, `"cuda:1"`, `"mps"`, `"xpu"`), or a profile's name in any spelling (`"t4"`, `"NVIDIA T4"`). If this
            machine has no such device, `"mps"` and `"xpu"` are the names of generic profiles.

    Raises:
        PrecisionError: the name is unknown, or the real device is not in this machine.
    """
    name = str(device).strip().lower()
    if name == "auto":
        name = next(kind for kind, (count, _) in _BACKENDS.items() if count() > 0)
    real = re.fullmatch(r"(cpu|cuda|xpu|mps)(?::(0|[1-9][0-9]*))?", name)
    if real is None:
        return _named_profile(name)
    kind, index = real.group(1), int(real.group(2) or 0)
    count, probe = _BACKENDS[kind]
    if index < count():
        return probe(torch.device(name))
    if name in _names():
        return _named_profile(name)
    raise _absent_device(name, kind, count())


def _named_profile(name: str) -> DeviceProfile:
    words = words_of(name)
    for spelling in (name, "".join(words), "-".join(words)):
        if spelling in _names():
            return _of_record(_names()[spelling])
    is_card = not all(_SHARED.fullmatch(word) for word in words)
    cards = [key for key, record in _records().items() if words and _fits(words, key, record, is_card)]
    if len(cards) == 1 and is_card:
        return _of_record(cards[0])
    if cards:
        headline = "a name of several devices" if len(cards) > 1 else "unknown device"
        fix = f"give one of {', '.join(cards)}"
        raise PrecisionError.of(headline, f"device {name!r}", "the name of one card", fix)
    fix = did_you_mean(name, _names(), "give one of these names", cutoff=0.5)
    expected = f"auto, cpu, cuda, cuda:N, mps, xpu, or a profile: {', '.join(profile_names())}"
    raise PrecisionError.of("unknown device", f"device {name!r}", expected, fix)


def _absent_device(name: str, kind: str, count: int) -> PrecisionError:
    build = torch.version.cuda or torch.version.hip or "a CPU build"
    counted = f"torch {torch.__version__} ({build}) finds {plural(count, f'{kind} device')}"
    profile = "h100" if kind == "cuda" else "auto"
    fix = (
        f"use {kind}:{count - 1}"
        if count
        else f"use auto (the CPU if there is no other device), or install a torch built for {kind}; to plan for one with "
        f"isotype check, name a profile such as {profile}"
    )
    expected = f"a device that torch finds; {counted}"
    return PrecisionError.of("device not in this machine", f"device {name!r}", expected, fix)


# ------------------------------------------- names of cards: `rtx-4090`, `4090`, `NVIDIA GeForce RTX 4090`


def words_of(name: str) -> tuple[str, ...]:
    """Split a card's name into lower-case words without the maker, with the memory as `80g`; () for any other text."""
    if not _SPELLING.fullmatch(name.lower()):
        return ()
    text = _CAPACITY.sub(r"\1g", name.lower()).replace("rtx", "rtx ").replace("gtx", "gtx ")
    text = _ATTACHED.sub(r"\1 \2", text)
    return tuple(word for word in _WORDS.findall(text) if word not in _MAKERS)


def _fits(words: tuple[str, ...], key: str, record: Mapping[str, Any], is_card: bool) -> bool:
    if record["kind"] not in _CARDS:
        return False
    texts = (key, record["title"], *record["driver_names"], *record.get("aliases", ()))
    owned = {word for text in texts for word in words_of(text)}
    if is_card and not owned & _VARIANTS <= set(words):
        return False
    return all(word in owned or _is_memory(word, record["memory_gib"]) for word in words)


def _is_memory(word: str, gib: float | None) -> bool:
    capacity = re.fullmatch(r"(\d+)g", word)
    return capacity is not None and gib is not None and _LEAST * gib <= int(capacity[1]) <= _MOST * gib

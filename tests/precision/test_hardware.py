from __future__ import annotations

import json
import re
import string
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from isotype.core.errors import PrecisionError
from isotype.precision.devices import profile as hardware
from isotype.precision.devices.cpu import (
    CpuFeatures,
    OneDnn,
    parse_capabilities,
    parse_cpuinfo,
    parse_sysctl,
    this_onednn,
)
from isotype.precision.devices.names import names, profile_names, records, words_of
from isotype.precision.devices.profile import (
    DeviceProfile,
    cpu_profile,
    cuda_profile,
    device_profile,
    mps_profile,
    rocm_profile,
    xpu_profile,
)
from tests.refusals import refused

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
GIB = 2**30
RECORDS: dict[str, dict[str, Any]] = json.loads(
    Path(hardware.__file__).with_name("profiles.json").read_text()
)
OLD = OneDnn(frozenset())

MILAN = """\
processor	: 0
vendor_id	: AuthenticAMD
model name	: AMD EPYC 7B13
flags		: fpu sse sse2 avx avx2 f16c fma
bugs		: sysret_ss_attrs

processor	: 1
model name	: AMD EPYC 7B13
flags		: fpu
"""
SAPPHIRE_RAPIDS = "model name : Intel(R) Xeon(R) Platinum 8481C\nflags : avx512f avx512_bf16 avx512_fp16 amx_bf16 amx_tile\n"
GENOA = "model name : AMD EPYC 9B14\nflags : avx2 avx512f avx512_bf16\n"
CASCADE_LAKE = "model name : Intel(R) Xeon(R) CPU @ 2.80GHz\nflags : avx2 avx512f avx512_vnni\n"
GRAVITON3 = "processor : 0\nFeatures : fp asimd fphp asimdhp sve i8mm bf16\nCPU implementer : 0x41\n"
RASPBERRY_PI4 = "processor : 0\nFeatures : fp asimd evtstrm crc32 cpuid\nModel : Raspberry Pi 4 Model B\n"
APPLE_M1 = """\
machdep.cpu.brand_string: Apple M1
hw.optional.arm.FEAT_BF16: 0
hw.optional.arm.FEAT_FP16: 1
"""
APPLE_M2 = APPLE_M1.replace("M1", "M2").replace("BF16: 0", "BF16: 1")
INTEL_MAC = """\
machdep.cpu.brand_string: Intel(R) Core(TM) i9-9880H CPU @ 2.30GHz
machdep.cpu.features: FPU SSE4.2 AVX1.0 F16C
machdep.cpu.leaf7_features: AVX2 BMI2
"""


@pytest.mark.parametrize(
    ("features", "title", "halves", "best"),
    [
        (parse_cpuinfo(MILAN), "AMD EPYC 7B13", set(), F32),
        (parse_cpuinfo(SAPPHIRE_RAPIDS), "Intel(R) Xeon(R) Platinum 8481C", {BF16, F16}, BF16),
        (parse_cpuinfo(GENOA), "AMD EPYC 9B14", {BF16}, BF16),
        (parse_cpuinfo(CASCADE_LAKE), "Intel(R) Xeon(R) CPU @ 2.80GHz", set(), F32),
        (parse_cpuinfo(GRAVITON3), "CPU", {BF16, F16}, BF16),
        (parse_cpuinfo(RASPBERRY_PI4), "Raspberry Pi 4 Model B", set(), F32),
        (parse_sysctl(APPLE_M1), "Apple M1", {F16}, F16),
        (parse_sysctl(APPLE_M2), "Apple M2", {BF16, F16}, BF16),
        (parse_sysctl(INTEL_MAC), "Intel(R) Core(TM) i9-9880H CPU @ 2.30GHz", set(), F32),
        (
            parse_capabilities({"cpu_name": "AMD Ryzen 9", "avx512_bf16": True, "avx512_fp16": False}),
            "AMD Ryzen 9",
            {BF16},
            BF16,
        ),
    ],
)
def test_cpu_from_its_flags(
    features: CpuFeatures, title: str, halves: set[torch.dtype], best: torch.dtype
) -> None:
    profile = cpu_profile(features, 8 * GIB, onednn=OLD)
    assert profile.title == title
    assert profile.native == {F32, F64} | halves
    assert profile.emulated.keys() == {BF16, F16} - halves
    assert profile.best_dtype() is best
    assert profile.memory_bytes == 8 * GIB
    assert profile.present


AMX, AVX512, AVX2 = (OneDnn(frozenset(takes)) for takes in ({BF16, F16}, {BF16}, ()))


@pytest.mark.parametrize(
    ("cpu", "onednn", "name"),
    [
        (MILAN, AVX2, "cpu-avx2"),
        (GENOA, AVX512, "cpu-avx512"),
        (SAPPHIRE_RAPIDS, AMX, "cpu-amx"),
        (SAPPHIRE_RAPIDS, replace(AVX512, limit="AVX512_CORE_BF16"), "cpu-avx512"),
        (SAPPHIRE_RAPIDS, replace(AVX2, limit="AVX2"), "cpu-avx2"),
        (GENOA, replace(AVX2, limit="SSE41"), "cpu-avx2"),
    ],
)
def test_a_cpu_is_what_its_onednn_makes_of_it(cpu: str, onednn: OneDnn, name: str) -> None:
    """The profile of the same name: its contracts, what runs in hardware, and how fast."""
    profile, named = cpu_profile(parse_cpuinfo(cpu), None, onednn), device_profile(name)
    assert (profile.contracts, profile.unlike) == (name, "")
    assert (profile.native, profile.speed) == (named.native, named.speed)
    assert profile.emulated.keys() == named.emulated.keys()


def test_a_lowered_instruction_set_is_named() -> None:
    profile = cpu_profile(parse_cpuinfo(GENOA), None, replace(AVX512, limit="AVX512_CORE"))
    assert profile.reason(BF16) == (
        "ONEDNN_MAX_CPU_ISA=AVX512_CORE forbids oneDNN this CPU's bfloat16 instructions"
    )
    assert profile.contracts == "cpu-avx512"
    assert profile.speed == {}, "nobody has measured how fast oneDNN converts bfloat16 there"


@pytest.mark.parametrize(
    ("features", "onednn", "table", "why"),
    [
        (parse_cpuinfo(GRAVITON3), AMX, "cpu-amx", "this is a CPU of type aarch64"),
        (parse_sysctl(APPLE_M1), AVX2, "cpu-avx2", "this is a CPU of type arm64"),
        (parse_cpuinfo(MILAN), AMX, "cpu-amx", "no table was measured on a CPU without amx_bf16"),
        (parse_cpuinfo(MILAN), None, "cpu-avx2", "this torch has no oneDNN"),
    ],
)
def test_a_cpu_that_nobody_has_measured_says_so(
    features: CpuFeatures, onednn: OneDnn | None, table: str, why: str
) -> None:
    profile = cpu_profile(features, None, onednn)
    assert profile.contracts == table
    assert profile.unlike.startswith(why)
    assert profile.speed == {}


@pytest.mark.real_cpu
def test_the_limit_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "avx512_core_bf16")
    onednn = this_onednn()
    if onednn is not None:
        assert [onednn.forbids(flag) for flag in ("avx512_bf16", "amx_bf16")] == [False, True]
        monkeypatch.delenv("ONEDNN_MAX_CPU_ISA")
        assert not replace(onednn, limit="").forbids("amx_bf16")


def test_cpu_reasons_say_what_is_missing() -> None:
    slow = cpu_profile(parse_cpuinfo(MILAN), None, onednn=OLD)
    assert slow.supports(BF16) == "emulated"
    assert slow.reason(BF16) == (
        "this CPU has no bfloat16 instructions (none of AMX-BF16, AVX512-BF16, Arm BF16)"
    )
    assert slow.reason(F32) == "float32 matmuls run in hardware on AMD EPYC 7B13"
    assert slow.supports(torch.int8) == "refused"
    assert slow.reason(torch.int8) == "no int8 matmul is known on AMD EPYC 7B13"

    without = cpu_profile(parse_cpuinfo(GENOA), None, onednn=None)
    assert without.reason(BF16) == "this torch has no oneDNN, which runs bfloat16 matmuls on a CPU"

    unknown = cpu_profile(parse_cpuinfo("processor : 0\n"), None, onednn=OLD)
    assert unknown.reason(F16) == (
        "it is unknown if this CPU has float16 instructions (/proc/cpuinfo lists no instruction-set flags)"
    )


@given(st.text(alphabet=string.printable, max_size=300))
def test_parsers_take_any_text(text: str) -> None:
    for parse in (parse_cpuinfo, parse_sysctl):
        profile = cpu_profile(parse(text), None, onednn=OLD)
        assert profile.supports(F32) == "native"
        assert all(profile.supports(dtype) != "refused" for dtype in (BF16, F16))


def _nvidia(
    capability: tuple[int, int], title: str = "NVIDIA Unheard Of", name: str = "cuda"
) -> DeviceProfile:
    return cuda_profile(title, 10 * GIB, capability, name)


@pytest.mark.parametrize(
    ("capability", "halves", "flash"),
    [
        ((5, 2), set(), set()),
        ((5, 3), {F16}, set()),
        ((6, 0), {F16}, set()),
        ((6, 1), set(), set()),
        ((6, 2), {F16}, set()),
        ((7, 0), {F16}, set()),
        ((7, 5), {F16}, set()),
        ((8, 0), {F16, BF16}, {F16, BF16}),
        ((8, 9), {F16, BF16}, {F16, BF16}),
        ((12, 0), {F16, BF16}, {F16, BF16}),
    ],
)
def test_cuda_from_its_capability(
    capability: tuple[int, int], halves: set[torch.dtype], flash: set[torch.dtype]
) -> None:
    profile = _nvidia(capability, name="cuda:1")
    assert profile.name == "cuda:1"
    assert profile.native & {F16, BF16} == halves
    assert profile.flash_attention == flash
    assert profile.memory_bytes == 10 * GIB
    assert profile.peak_flops == {}
    assert profile.source == "cuda driver; no data sheet known for this card"
    assert profile.supports(BF16) == (
        "native" if BF16 in halves else "emulated" if capability >= (7, 0) else "refused"
    )


@pytest.mark.parametrize(
    ("slower", "capabilities"),
    [
        (1, ((6, 0), (7, 0), (8, 0), (9, 0), (10, 0))),
        (32, ((5, 2), (6, 1), (7, 5))),
        (64, ((8, 6), (8, 7), (8, 9), (10, 3), (11, 0), (12, 0), (12, 1))),
    ],
)
def test_float64_is_slow_on_all_but_the_large_chips(
    slower: int, capabilities: tuple[tuple[int, int], ...]
) -> None:
    for profile in map(_nvidia, capabilities):
        assert profile.supports(F64) == ("native" if slower == 1 else "emulated"), profile.capability
        assert slower == 1 or f"1/{slower} of" in profile.reason(F64)


def test_a_named_card_runs_what_any_card_of_its_architecture_runs() -> None:
    for name, record in RECORDS.items():
        named = device_profile(name)
        if named.kind == "cuda":
            here = _nvidia(tuple(record["capability"]))
        elif named.kind == "rocm":
            here = rocm_profile("AMD Unheard Of", GIB, record["arch"])
        else:
            continue
        for field in ("native", "emulated", "refused", "flash_attention", "capability"):
            assert getattr(here, field) == getattr(named, field), name
            assert field not in record or field == "capability", (
                f"{name}: {field} follows from the architecture"
            )


def test_cuda_known_card_brings_its_data_sheet_but_its_own_memory() -> None:
    profile = _nvidia((7, 5), "Tesla T4")
    assert profile.peak_flops == {F32: 8.1e12, F16: 65e12}
    assert profile.memory_bytes == 10 * GIB
    assert profile.present
    assert profile.source == "cuda driver; NVIDIA T4 data sheet"
    assert _nvidia((6, 1)).reason(F16) == "compute capability 6.1 has no fast float16 arithmetic"


@pytest.mark.parametrize(
    ("arch", "bfloat16", "flash"),
    [
        ("gfx942:sramecc+:xnack-", "native", {F16, BF16}),
        ("gfx90a", "native", {F16, BF16}),
        ("gfx1100", "native", set()),
        ("gfx1201", "native", set()),
        ("gfx1030", "emulated", set()),
        ("gfx906", "emulated", set()),
        ("", "emulated", set()),
    ],
)
def test_rocm_from_its_architecture(arch: str, bfloat16: str, flash: set[torch.dtype]) -> None:
    profile = rocm_profile("AMD Radeon", GIB, arch)
    numbers = {"gfx942": (9, 4), "gfx1030": (10, 3), "gfx1100": (11, 0), "gfx1201": (12, 0), "": None}
    assert profile.capability == numbers.get(arch.partition(":")[0], (9, 0))
    assert (profile.supports(F64) == "native") == (arch[:4] != "gfx1")
    assert profile.kind == "rocm"
    assert profile.supports(BF16) == bfloat16
    assert profile.supports(F16) == "native"
    assert profile.flash_attention == flash


def test_xpu_and_mps() -> None:
    arc = xpu_profile("Intel Arc A770", 16 * GIB, matrix_engine=True, float64=False)
    assert arc.best_dtype() is BF16
    assert arc.supports(F64) == "refused"
    assert arc.reason(F64) == "this GPU has no float64 arithmetic"
    integrated = xpu_profile("Intel Iris", GIB, matrix_engine=False, float64=True)
    assert integrated.supports(BF16) == "emulated"

    m2, m3 = (mps_profile(f"Apple {chip} Pro", GIB) for chip in ("M2", "M3"))
    assert m2.best_dtype() is F16
    assert m3.best_dtype() is BF16
    assert m2.reason(F64) == "the MPS framework has no float64"


@pytest.mark.parametrize("name", profile_names())
def test_named_profiles_are_consistent(name: str) -> None:
    profile = device_profile(name)
    listed = [profile.native, set(profile.emulated), set(profile.refused)]
    assert sum(map(len, listed)) == len(set().union(*listed)), "a dtype is listed twice"
    assert {F32, F16, BF16} <= set().union(*listed)
    assert profile.peak_flops.keys() <= profile.native | profile.emulated.keys()
    assert profile.flash_attention <= profile.native or profile.kind == "cpu"
    assert not profile.present
    assert profile.source
    if profile.kind in {"cuda", "rocm"}:
        assert profile.memory_bytes is not None
        assert profile.memory_bandwidth is not None
        sizes = (
            6,
            8,
            10,
            11,
            12,
            16,
            20,
            24,
            32,
            40,
            48,
            64,
            80,
            94,
            96,
            128,
            141,
            144,
            180,
            186,
            192,
            256,
            270,
            279,
            288,
        )
        assert any(0.9 * size < profile.memory_bytes / GIB <= size for size in sizes), (
            "above any advertised memory"
        )
        # A matmul of n = 16384 must be bound by arithmetic; a slip of a factor 1000 in either rate is not.
        assert 1e10 < profile.memory_bandwidth < 1e13
        assert all(1e12 < rate < 1e16 for rate in profile.peak_flops.values())
        assert all(
            rate > profile.peak_flops[F32] for dtype, rate in profile.peak_flops.items() if dtype is not F32
        )
        halves = {BF16, F16} if name == "mi100" else profile.native & {F16, BF16}  # at half of float16's rate
        assert profile.peak_flops.keys() == {F32, *halves}


SERIES = {
    r"rtx20..(ti|super)?": 4,
    r"titanrtx|quadrortx\d+": 8,
    r"v100.*|titanv": 8,
    r"gtx1660ti|p100.*": 2,
    r"rtx[345]0\d0(ti|tisuper|super|d)?(-.*)?": 2,
    r"rtxa\d+(-.*)?|rtx\d000ada|rtxpro\d+(-.*)?|gb10": 4,
    r"a2|a10|a16|a40|l4|l40s": 4,
    r"a10g|l20|l40": 2,
    r"a30|[ah][18]00(-pcie|-\d+g.*)?|max\d+": 16,
    r"rx[67][89]00xtx?|w7900|strix-halo": 2,
    r"rx9070(xt)?|r9700": 4,
    r"[ab]\d[578]0": 8,
}


def test_the_rates_of_a_series_are_those_of_its_tensor_cores() -> None:
    """Tensor cores with float32 accumulation over the plain ones: NVIDIA halves it for GeForce, one number for a series."""
    named = set()
    for name in RECORDS:
        for times in [times for series, times in SERIES.items() if re.fullmatch(series, name)]:
            rates = device_profile(name).peak_flops
            assert rates[F16] / rates[F32] == pytest.approx(times, rel=0.08), name
            named.add(name)
    assert len(named) > 90


def test_a_rate_is_the_product_that_its_source_writes_out() -> None:
    product = re.compile(r"([\d,]+) (\w+ \w+) x ([\d,]+) MHz(?: \([^)]*\))? x (\d+) FLOP a clock")
    sources = {name: product.search(record["source"]) for name, record in RECORDS.items()}
    written = {name: match for name, match in sources.items() if match}
    assert len(written) >= 60
    for name, match in written.items():
        cores, mhz, flop = (int(number.replace(",", "")) for number in match.group(1, 3, 4))
        dtype = "float16" if match[2] in ("tensor cores", "matrix engines") else "float32"
        assert RECORDS[name]["peak_tflops"][dtype] == pytest.approx(cores * mhz * flop * 1e-6, abs=0.06), name


def test_the_driver_tells_two_cards_of_one_name_by_their_memory() -> None:
    title = "NVIDIA GeForce RTX 4060 Ti"
    large = cuda_profile(title, int(15.57 * GIB), (8, 9))
    assert large.memory_bytes == device_profile("rtx4060ti-16g").memory_bytes
    assert large.peak_flops == device_profile("rtx4060ti-16g").peak_flops
    for name in ("rtx3080-10g", "rtx3080-12g"):
        named = device_profile(name)
        here = cuda_profile("NVIDIA GeForce RTX 3080", (named.memory_bytes or 0) + 2**27, (8, 6))
        assert (here.peak_flops, here.memory_bandwidth) == (named.peak_flops, named.memory_bandwidth)


def test_driver_names_are_unique_and_profiles_share_no_alias() -> None:
    entries = records()
    drivers = [
        (driver, record["memory_gib"]) for record in entries.values() for driver in record["driver_names"]
    ]
    assert len(drivers) == len(set(drivers))
    aliases = [alias for record in entries.values() for alias in record.get("aliases", ())]
    assert not set(aliases) & set(entries)
    assert len(names()) == len(profile_names())
    assert device_profile("a100") == device_profile("A100-80g")


def test_this_machine() -> None:
    profile = device_profile("cpu")
    assert profile.present
    assert profile.name == "cpu"
    assert profile.memory_bytes is None or profile.memory_bytes > 2**28
    assert device_profile(torch.device("cpu")) == profile
    assert device_profile("cpu:0") == replace(profile, name="cpu:0")


def test_auto_prefers_the_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    card = _nvidia((8, 0))
    monkeypatch.setitem(hardware._BACKENDS, "cuda", (lambda: 2, lambda device: card))
    assert device_profile("auto") is card
    assert device_profile("cuda:1") is card
    with pytest.raises(PrecisionError, match="use cuda:1"):
        device_profile("cuda:2")


def test_auto_without_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("cuda", "xpu", "mps"):
        monkeypatch.setitem(hardware._BACKENDS, kind, (lambda: 0, hardware._BACKENDS[kind][1]))
    assert device_profile() == device_profile("cpu")
    assert device_profile("mps").title == "Apple GPU"
    with pytest.raises(PrecisionError) as caught:
        device_profile("cuda:1")
    build = torch.version.cuda or torch.version.hip or "a CPU build"
    assert str(caught.value) == (
        "device not in this machine\n"
        "  - device 'cuda:1'\n"
        f"    expected  a device that torch finds; torch {torch.__version__} ({build}) finds 0 cuda devices\n"
        "    fix       use auto (the CPU if there is no other device), or install a torch built for cuda; to check a run "
        "for another machine, name a profile such as h100"
    )


@pytest.mark.parametrize(
    ("card", "spellings"),
    [
        (
            "rtx4090",
            (
                "rtx-4090",
                "RTX 4090",
                "4090",
                "NVIDIA GeForce RTX 4090",
                "GeForce_RTX_4090",
                "rtx 4090 24GB",
                "gpu rtx4090",
            ),
        ),
        (
            "a100-80g",
            ("a100", "a100-80gb", "A100 80GB", "NVIDIA A100-SXM4-80GB", "A100 SXM 80 GB", "a100_80g"),
        ),
        ("a100-40g", ("a100-40gb", "A100 40 GiB", "a100 sxm 40gb")),
        ("a100-80g-pcie", ("A100 PCIe 80GB", "NVIDIA A100 80GB PCIe", "a100-pcie-80gb", "a100 pcie")),
        ("a100-40g-pcie", ("A100 PCIe 40GB", "NVIDIA A100-PCIE-40GB")),
        ("h100-pcie", ("h100 pcie", "NVIDIA H100 PCIe", "H100 PCIe 80GB")),
        ("h100-nvl", ("H100 NVL", "NVIDIA H100 NVL", "h100 nvl 94gb")),
        ("gh200", ("GH200", "NVIDIA GH200 480GB", "gh200 96gb")),
        ("gh200-144g", ("GH200 144GB", "NVIDIA GH200 144G HBM3e")),
        ("rtxa6000", ("A6000", "RTX A6000", "NVIDIA RTX A6000", "rtx-a6000")),
        ("rtx6000ada", ("RTX 6000 Ada", "6000 Ada", "NVIDIA RTX 6000 Ada Generation", "rtx6000-ada 48GB")),
        (
            "rtxpro6000",
            ("RTX PRO 6000", "rtx-pro-6000 96GB", "NVIDIA RTX PRO 6000 Blackwell Workstation Edition"),
        ),
        ("a40", ("NVIDIA A40", "A40 48GB")),
        ("rtx2080ti", ("RTX 2080 Ti", "2080ti", "GeForce RTX 2080 Ti")),
        ("rtx2080", ("RTX 2080", "2080")),
        ("rtx2060", ("rtx 2060", "2060")),
        ("rtx3060", ("RTX 3060", "3060 12GB")),
        ("rtx4060ti-16g", ("RTX 4060 Ti 16GB", "4060 ti 16gb")),
        ("rtx4060ti-8g", ("RTX 4060 Ti 8GB",)),
        ("rtx4080", ("RTX 4080", "4080 16gb")),
        ("rtx5060ti-16g", ("RTX 5060 Ti 16GB", "5060ti-16gb")),
        ("rtx5060ti-8g", ("RTX 5060 Ti 8GB", "5060ti-8gb")),
        ("rtx3080-10g", ("3080", "rtx 3080 10gb", "NVIDIA GeForce RTX 3080")),
        ("rtx3080-12g", ("3080 12GB", "rtx-3080-12gb")),
        ("rtx3080-laptop-8g", ("3080 laptop", "RTX 3080 Mobile")),
        ("rtx3080-laptop-16g", ("RTX 3080 Laptop GPU 16GB",)),
        ("rtx4070tisuper", ("RTX-4070-Ti-Super", "4070 ti super 16gb", "NVIDIA GeForce RTX 4070 Ti SUPER")),
        ("rtx4070ti", ("4070 Ti", "rtx 4070ti 12gb")),
        ("rtx4090-laptop", ("4090 laptop", "NVIDIA GeForce RTX 4090 Laptop GPU", "rtx4090laptop 16gb")),
        ("rtx4090d", ("4090D", "NVIDIA GeForce RTX 4090 D")),
        ("a30", ("NVIDIA A30",)),
        ("quadrortx6000", ("Quadro RTX 6000", "quadro rtx6000 24gb")),
        (
            "rtxpro6000-maxq",
            ("RTX PRO 6000 Max-Q", "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition"),
        ),
        ("gb10", ("dgx spark", "NVIDIA DGX Spark", "NVIDIA GB10")),
        ("orin-64g", ("Jetson AGX Orin 64GB",)),
        ("m40-12g", ("Tesla M40",)),
        ("rx7900xtx", ("7900xtx", "RX 7900 XTX", "AMD Radeon RX 7900 XTX 24GB")),
        ("rx7900xt", ("7900 xt",)),
        ("mi325x", ("MI325X", "AMD Instinct MI325X 256GB")),
        ("strix-halo", ("Strix Halo", "Radeon 8060S", "Ryzen AI Max+ 395")),
        ("b580", ("Intel Arc B580", "Intel(R) Arc(TM) B580 Graphics", "arc b580 12gb")),
        ("max1550", ("Intel Data Center GPU Max 1550",)),
        ("m3-max", ("apple m3 max", "M3 Max", "m3max", "Apple M3 Max GPU")),
        ("m4", ("Apple M4",)),
        ("rtx5070ti-laptop", ("5070 Ti Laptop", "RTX 5070 Ti Laptop GPU 12GB")),
        ("rx9070", ("9070", "RX 9070 16GB")),
        ("h200", ("H200", "h200 sxm", "NVIDIA H200 141GB")),
        ("h200-nvl", ("H200 NVL",)),
        ("rtx5070ti", ("RTX 5070 Ti", "5070ti", "rtx-5070-ti 16GB", "NVIDIA GeForce RTX 5070 Ti")),
        ("rtx5080", ("RTX 5080", "5080 16gb", "NVIDIA GeForce RTX 5080")),
        ("v100-pcie-32g", ("Tesla V100-PCIE-32GB", "V100 PCIe 32GB")),
        ("h100", ("H100 80GB", "nvidia h100", "H100-SXM", "NVIDIA H100 80GB HBM3", "h100-80gb")),
        ("v100-32g", ("V100 32GB", "Tesla V100-SXM2-32GB")),
        ("v100-16g", ("Tesla V100",)),
        ("t4", ("NVIDIA T4", "Tesla T4", "t4 16gb")),
        ("mi300x", ("AMD Instinct MI300X", "MI300X", "mi300x-192gb")),
        ("l40s", ("L40S", "NVIDIA L40S 48GB")),
        ("a10g", ("NVIDIA A10G", "a10g 24gb")),
    ],
)
def test_a_card_has_one_profile_however_it_is_written(card: str, spellings: tuple[str, ...]) -> None:
    for spelling in spellings:
        assert device_profile(spelling).name == card, spelling


@pytest.mark.parametrize(
    ("name", "candidates"),
    [
        ("80gb", "a100-80g, a100-80g-pcie, a800-80g, a800-80g-pcie, h100, h100-pcie, h800, h800-pcie"),
        ("4060 ti", "rtx4060ti-8g, rtx4060ti-16g"),
        ("NVIDIA GeForce RTX 5060 Ti", "rtx5060ti-16g, rtx5060ti-8g"),
        ("rtx 20gb", "rtxa4500, rtx4000ada"),
        ("rtx 6000", "quadrortx6000, rtx6000ada, rtxpro6000"),
        ("v100 sxm2", "v100-16g, v100-32g"),
        ("pvc", "max1100, max1550"),
        ("Battlemage", "b580, b570"),
        ("gfx942", "mi300x, mi300a, mi325x"),
        ("sm_100", "b200, gb200"),
        ("sm75", "t4, rtx2060"),
    ],
)
def test_a_name_of_several_cards_lists_them(name: str, candidates: str) -> None:
    with pytest.raises(PrecisionError, match="a name of several devices") as raised:
        device_profile(name)
    assert f"use one of {candidates}" in str(raised.value)


@pytest.mark.parametrize(
    "name",
    [
        "A100 PCIe 32GB",
        "rtx 4090 ti",
        "h100 sxm 96gb",
        "a100 24gb",
        "nvidia",
        "",
        "5070 16gb",
        "5080 super",
        "3080 16gb",
        "4090 laptop 24gb",
        "5060 super",
        "k80",
        "rx 7900",
        "sm",
        "gfx",
        "apple m30",
        "m3 ultra max",
    ],
)
def test_another_card_is_none_of_ours(name: str) -> None:
    with pytest.raises(PrecisionError, match="unknown device"):
        device_profile(name)


def test_unknown_device_names_close_ones() -> None:
    assert refused(PrecisionError, device_profile, "a100-90gb") == (
        "unknown device\n"
        "  - device 'a100-90gb'\n"
        "    expected  auto, cpu, cuda, cuda:N, mps, xpu, or the name of a GPU in docs/devices.md (t4, rtx4090, mi300x, m3-max)\n"
        "    fix       did you mean a100-80g or a100-40g or h100-80g?"
    )
    with pytest.raises(PrecisionError, match="see docs/devices"):
        device_profile("zzzzzzzz")


@given(
    st.text(max_size=20)
    | st.sampled_from(profile_names())
    | st.from_regex(r"(cpu|cuda|xpu|mps):\d{1,3}", fullmatch=True)
)
def test_any_name_gives_a_profile_or_a_precision_error(name: str) -> None:
    folded = name.strip().lower()
    if folded in {"auto", "cpu", "cpu:0", "mps", "xpu", *profile_names()}:
        assert device_profile(name).supports(F32) == "native"
        return
    if words_of(folded):  # perhaps another spelling of a card's name
        assert set(folded) <= set("abcdefghijklmnopqrstuvwxyz0123456789 _+-()")
        return
    with pytest.raises(PrecisionError) as caught:
        device_profile(name)
    assert repr(folded) in str(caught.value)


def test_bfloat16_runs_on_nvidias_from_capability_8_on() -> None:
    cards = [profile for profile in map(device_profile, profile_names()) if profile.kind == "cuda"]
    assert cards
    for profile in cards:
        assert profile.capability is not None
        assert (profile.capability >= (8, 0)) == (torch.bfloat16 in profile.native), profile.name
    assert device_profile("mps").capability is None
    assert _nvidia((6, 1)).capability == (6, 1)

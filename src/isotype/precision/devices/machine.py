"""Checks of this machine and its libraries: rates, versions, a trial of bitsandbytes."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from isotype.core.compiled import NotCompiledError, check_folder, find_compilers
from isotype.precision.devices.probe import MatmulRate, measure_all
from isotype.precision.devices.profile import DeviceProfile, device_profile
from isotype.precision.versions import Incompatibility, incompatible_here, installed, missing

# Half the widest gap between two nf4 levels (0.696 and 1) bounds the error of values in [-1, 1].
_NF4_BOUND = 0.153
_ANSWER = "isotype-doctor:"
_BITSANDBYTES_SCRIPT = f"""
import json, sys
import torch
from isotype.compat.compiler import import_uncompiled
import_uncompiled("bitsandbytes")  # it asks for the compiler, whose import takes longer than the rest
from bitsandbytes import functional
from bitsandbytes.cextension import lib
answer = {{"library": type(lib).__name__}}
if sys.argv[1]:  # a device; none where it is not in this machine
    weight = torch.linspace(-1, 1, 4096, device=sys.argv[1]).reshape(64, 64)
    packed, state = functional.quantize_4bit(weight, quant_type="nf4")
    answer["nf4_error"] = (functional.dequantize_4bit(packed, state) - weight).abs().max().item()
print("{_ANSWER}" + json.dumps(answer))
"""
# The wrapper class of bitsandbytes' native library tells which one was loaded.
_LIBRARIES = {
    "BNBNativeLibrary": "its native CPU library",
    "CudaBNBNativeLibrary": "its native GPU library",
    "XpuBNBNativeLibrary": "its native XPU library",
    "ErrorHandlerMockBNBNativeLibrary": "PyTorch operators, because its native library does not load",
}


@dataclass(frozen=True)
class BitsandbytesStatus:
    """Result of trying bitsandbytes.

    Attributes:
        version: installed version; None if it is missing.
        works: whether quantization works on the device; None if it could not be tried.
        backend: the library in use, as a clause; None unless it works.
        message: why it does not work or was not tried; None if it works.
    """

    version: str | None
    works: bool | None
    backend: str | None
    message: str | None


@dataclass(frozen=True)
class DoctorReport:
    """State of the machine and its libraries.

    Attributes:
        profile: of the device.
        rates: measured matmul rates by dtype; empty if the device is not in this machine.
        versions: installed versions; None if missing.
        toolkits: GPU toolkit of the torch build; empty for a CPU build.
        python: version and platform of the interpreter.
        incompatibilities: incompatible versions.
        missing: requirements of the `train` extra that are not installed.
        bitsandbytes: result of trying it.
        compiler: the parts of CPU training that a C++ compiler speeds up, or that lack one, as a clause;
            "" for other devices.
    """

    profile: DeviceProfile
    rates: Mapping[torch.dtype, MatmulRate]
    versions: Mapping[str, str | None]
    toolkits: Mapping[str, str]
    python: str
    incompatibilities: tuple[Incompatibility, ...]
    missing: tuple[str, ...]
    bitsandbytes: BitsandbytesStatus
    compiler: str = ""

    @property
    def torch_build(self) -> str:
        """`"CUDA 13.0 build"`, `"ROCm 7.1 build"` or `"CPU build"`."""
        names = {"cuda": "CUDA", "rocm": "ROCm"}
        builds = [f"{names[kit]} {version}" for kit, version in self.toolkits.items()]
        return f"{builds[0] if builds else 'CPU'} build"

    @property
    def torch_failure(self) -> str | None:
        """Why torch cannot compute on the device; None if it can or if the device is not here."""
        rate = self.rates.get(torch.float32)
        return rate.message if rate else None

    @property
    def ok(self) -> bool:
        """False for version errors, or if torch cannot compute on the device."""
        return self.torch_failure is None and not any(
            incompatibility.severity == "error" for incompatibility in self.incompatibilities
        )


def gather_doctor_report(
    device: str | torch.device = "auto", probe_seconds: float = 3.0, bitsandbytes_timeout: float = 120.0
) -> DoctorReport:
    """Probe the device, measure it if it is in this machine, and compare the installed versions.

    Args:
        device: a real device or the name of a profile.
        probe_seconds: time budget of the matmul measurements.
        bitsandbytes_timeout: seconds to wait for the bitsandbytes trial.

    Raises:
        PrecisionError: the device is unknown or not there.
    """
    profile, versions = device_profile(device), installed()
    return DoctorReport(
        profile=profile,
        rates=measure_all(profile.name, probe_seconds) if profile.present else {},
        versions=versions,
        toolkits=_toolkits(),
        python=f"Python {platform.python_version()}, {platform.system()} {platform.machine()}",
        incompatibilities=incompatible_here(),
        missing=tuple(missing(versions)),
        bitsandbytes=try_bitsandbytes(versions["bitsandbytes"], profile, bitsandbytes_timeout),
        compiler=compiler_here() if profile.present and profile.kind == "cpu" else "",
    )


def compiler_here() -> str:
    """Return the parts of CPU training that a C++ compiler speeds up, or that lack one."""
    try:
        check_folder()
        return (
            f"{find_compilers()[0][0]} compiles attention, LoRA layers, norms and the loss at the first step"
        )
    except NotCompiledError as none:
        return f"{none}: attention, LoRA layers, norms and the loss run by torch's operators, more slowly"


def try_bitsandbytes(
    version: str | None, profile: DeviceProfile, timeout: float, script: str = _BITSANDBYTES_SCRIPT
) -> BitsandbytesStatus:
    """Import bitsandbytes in a child process (it prints, and is slow) and quantize if the device is here."""
    if version is None:
        return BitsandbytesStatus(None, None, None, "it is not installed")
    command = [sys.executable, "-c", script, profile.name if profile.present else ""]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout)
    except subprocess.TimeoutExpired:
        return BitsandbytesStatus(version, False, None, f"it did not answer within {timeout:g} s")
    answers = [line for line in done.stdout.splitlines() if line.startswith(_ANSWER)]
    if done.returncode != 0 or not answers:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        message = lines[-1] if lines else f"the process ended with status {done.returncode} without output"
        return BitsandbytesStatus(version, False, None, message)
    if not profile.present:
        return BitsandbytesStatus(
            version, None, None, f"it imports, but no {profile.title} is here to try it on"
        )
    return read_answer(version, json.loads(answers[-1].removeprefix(_ANSWER)))


def read_answer(version: str, answer: Mapping[str, Any]) -> BitsandbytesStatus:
    """Return the status for the child's answer: `library`, native library's class; `nf4_error`, largest error."""
    error = answer["nf4_error"]
    if not error <= _NF4_BOUND:  # also true of nan
        message = (
            f"values in [-1, 1] come back from nf4 off by {error:.3g}; {_NF4_BOUND} is the most possible"
        )
        return BitsandbytesStatus(version, False, None, message)
    return BitsandbytesStatus(version, True, _LIBRARIES.get(answer["library"], answer["library"]), None)


def _toolkits() -> dict[str, str]:
    """Return the GPU toolkit of the torch build: `{"cuda": "13.0"}`, `{"rocm": "7.1"}`, or nothing."""
    built = {"cuda": torch.version.cuda, "rocm": torch.version.hip}
    return {name: version for name, version in built.items() if version}

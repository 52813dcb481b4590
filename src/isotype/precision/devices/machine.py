"""Checks this machine for `isotype doctor`: measures matmul rates, reads library versions and tries bitsandbytes."""

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

# The error of values in [-1, 1] is at most half of the widest gap between nf4's levels: the gap from 0.696 to 1.
_NF4_BOUND = 0.153
_ANSWER = "isotype-doctor:"
_TIMEOUT = 120.0  # seconds
_BITSANDBYTES_SCRIPT = f"""
import json, sys
import torch
from isotype.compat.compiler import import_uncompiled
import_uncompiled("bitsandbytes")  # without torch's compiler, which would take most of the time
from bitsandbytes import functional
from bitsandbytes.cextension import lib
answer = {{"library": type(lib).__name__}}
if sys.argv[1]:  # the device; empty if it is not in this machine
    weight = torch.linspace(-1, 1, 4096, device=sys.argv[1]).reshape(64, 64)
    packed, state = functional.quantize_4bit(weight, quant_type="nf4")
    answer["nf4_error"] = (functional.dequantize_4bit(packed, state) - weight).abs().max().item()
print("{_ANSWER}" + json.dumps(answer))
"""
# Wrapper class of bitsandbytes' native library -> the library in words.
_LIBRARIES = {
    "BNBNativeLibrary": "its native CPU library",
    "CudaBNBNativeLibrary": "its native GPU library",
    "XpuBNBNativeLibrary": "its native XPU library",
    "ErrorHandlerMockBNBNativeLibrary": "PyTorch operators, because its native library cannot be loaded",
}


@dataclass(frozen=True)
class BitsandbytesStatus:
    """Result of a trial of bitsandbytes.

    Attributes:
        works: True if quantization works on the device; None if it was not tried.
        backend: a clause that names the library of bitsandbytes; None unless quantization works.
        message: a clause that says why quantization does not work or was not tried; None if it works.
    """

    version: str | None
    works: bool | None
    backend: str | None
    message: str | None


@dataclass(frozen=True)
class DoctorReport:
    """State of the machine and its libraries.

    Attributes:
        rates: dtype -> measured matmul rate; empty if the device is not in this machine.
        versions: package -> installed version, None for a missing package.
        toolkits: `cuda` or `rocm` -> toolkit version of the torch build; empty for a CPU build.
        missing: requirements of the `train` extra that are not installed.
        compiler: a clause on the C++ compiler of a CPU (see `compiler_here`); "" for other devices.
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
        """torch's build: `"CUDA 13.0 build"`, `"ROCm 7.1 build"` or `"CPU build"`."""
        names = {"cuda": "CUDA", "rocm": "ROCm"}
        builds = [f"{names[kit]} {version}" for kit, version in self.toolkits.items()]
        return f"{builds[0] if builds else 'CPU'} build"

    @property
    def torch_failure(self) -> str | None:
        """The error of a float32 matmul on the device; None if the matmul works or the device is not in this machine."""
        rate = self.rates.get(torch.float32)
        return rate.message if rate else None

    @property
    def ok(self) -> bool:
        """False if versions are incompatible or torch cannot compute on the device."""
        errors = any(conflict.severity == "error" for conflict in self.incompatibilities)
        return self.torch_failure is None and not errors


def gather_doctor_report(device: str | torch.device) -> DoctorReport:
    """Return the state of this machine and its libraries.

    Args:
        device: a device of this machine, or the name of a profile. The rates of a profile are not measured.

    Raises:
        PrecisionError: the device is unknown or not in this machine.
    """
    profile, versions = device_profile(device), installed()
    toolkits = {"cuda": torch.version.cuda, "rocm": torch.version.hip}
    return DoctorReport(
        profile=profile,
        rates=measure_all(profile.name, 3.0) if profile.present else {},
        versions=versions,
        toolkits={name: version for name, version in toolkits.items() if version},
        python=f"Python {platform.python_version()}, {platform.system()} {platform.machine()}",
        incompatibilities=incompatible_here(),
        missing=tuple(missing(versions)),
        bitsandbytes=try_bitsandbytes(versions["bitsandbytes"], profile, _TIMEOUT),
        compiler=compiler_here() if profile.present and profile.kind == "cpu" else "",
    )


def compiler_here() -> str:
    """Return a clause that names the C++ compiler and what it compiles, or says why there is no compiler."""
    try:
        check_folder()
        compiler = find_compilers()[0][0]
    except NotCompiledError as none:
        return f"{none}: attention, LoRA layers, norms and the loss use torch's operators, which are slower"
    return f"{compiler} compiles attention, LoRA layers, norms and the loss at the first step"


def try_bitsandbytes(
    version: str | None, profile: DeviceProfile, timeout: float, script: str = _BITSANDBYTES_SCRIPT
) -> BitsandbytesStatus:
    """Import bitsandbytes in a child process, and quantize with it if the device is in this machine."""
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
        message = f"it can be imported, but this machine has no {profile.title} for a trial"
        return BitsandbytesStatus(version, None, None, message)
    return read_answer(version, json.loads(answers[-1].removeprefix(_ANSWER)))


def read_answer(version: str, answer: Mapping[str, Any]) -> BitsandbytesStatus:
    """Return the status from the `answer` of a child process: the class of bitsandbytes' library, and the largest error of nf4."""
    error = answer["nf4_error"]
    if not error <= _NF4_BOUND:  # also for NaN
        changed = f"an nf4 round trip changes values in [-1, 1] by up to {error:.3g}"
        return BitsandbytesStatus(
            version, False, None, f"{changed}; correct kernels change them by at most {_NF4_BOUND}"
        )
    return BitsandbytesStatus(version, True, _LIBRARIES.get(answer["library"], answer["library"]), None)

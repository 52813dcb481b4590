"""The report of `isotype doctor`: dtypes and speeds of the device, libraries, necessary changes, and a verdict."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from packaging.requirements import Requirement
from rich.columns import Columns
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from isotype.compat.torch_device import device_type
from isotype.contracts.contract import doubts
from isotype.core.dtypes import COMPUTE_DTYPES, dtype_name
from isotype.core.json_records import encoded
from isotype.core.names import format_bytes, grouped
from isotype.lora import kernels
from isotype.precision.devices.machine import BitsandbytesStatus, DoctorReport
from isotype.precision.devices.probe import MatmulRate
from isotype.precision.devices.profile import DeviceProfile
from isotype.precision.versions import Incompatibility, pip_command
from isotype.report.text import fitting, pair_table, table_of


def speeds(report: DoctorReport) -> dict[torch.dtype, float]:
    """Return the FLOP/s of each compute dtype, either measured on a device of this machine or taken from the device's data sheet."""
    if not report.profile.present:
        return {dtype: rate for dtype, rate in report.profile.peak_flops.items() if dtype in COMPUTE_DTYPES}
    measured = {dtype: rate.flops_per_second for dtype, rate in report.rates.items()}
    return {dtype: rate for dtype, rate in measured.items() if rate is not None}


def cost_here(dtype: torch.dtype, report: DoctorReport) -> str:
    rates = speeds(report)
    if dtype not in rates:
        rate = report.rates.get(dtype)
        return "no published rate" if rate is None else f"refused: {rate.message}"
    if _unsteady(report):
        return "not compared"
    best = max(rates, key=lambda other: rates[other])
    slowdown = rates[best] / rates[dtype]
    if dtype == best:
        return "the fastest"
    if slowdown < 1.25:
        return f"as fast as {dtype_name(best)}"
    return f"matmuls run {slowdown:.{0 if slowdown >= 10 else 1}f}x slower than {dtype_name(best)}"


def auto_dtype(profile: DeviceProfile) -> str:
    native = [dtype_name(dtype) for dtype in COMPUTE_DTYPES if dtype in profile.native]
    best = dtype_name(profile.best_dtype())
    if native == [best]:
        return f"{best}, the only native dtype"
    scaling = "; float16 trains with loss scaling" if "float16" in native else ""
    return f"the checkpoint's dtype if it runs natively ({', '.join(native)}), else {best}{scaling}"


def contradiction(report: DoctorReport) -> str | None:
    """Return a warning if another dtype is at least 3 times as fast as the profile's best dtype, else None."""
    best, rates = report.profile.best_dtype(), speeds(report)
    if not report.profile.present or best not in rates or _unsteady(report):
        return None
    fastest = max(rates, key=lambda dtype: rates[dtype])
    slowdown = rates[fastest] / rates[best]
    if slowdown < 3:
        return None
    name, other = dtype_name(best), dtype_name(fastest)
    return f"{name} counts as native, but {other} was {slowdown:.1f}x faster: consider --dtype {other}"


def _unsteady(report: DoctorReport) -> str | None:
    """Return a warning if some matmuls of a dtype took much longer than others, else None."""
    rates = [rate for rate in report.rates.values() if rate.message is None and not rate.steady]
    if not rates:
        return None
    names = ", ".join(dtype_name(rate.dtype) for rate in rates)
    return f"{names}: some matmuls took much longer than others; run isotype doctor again when the machine is idle"


def by_change(incompatibilities: Iterable[Incompatibility]) -> dict[str, list[Incompatibility]]:
    return grouped(incompatibilities, lambda incompatibility: Requirement(incompatibility.change).name)


def verdict(report: DoctorReport) -> str:
    """Return a sentence that says whether the device can train LoRA and QLoRA, or which changes are necessary."""
    title, dtype = report.profile.title, dtype_name(report.profile.best_dtype())
    if report.torch_failure is not None:
        return f"Not ready: torch cannot multiply float32 matrices on {title}: {report.torch_failure}"
    errors = by_change(conflict for conflict in report.incompatibilities if conflict.severity == "error")
    if errors:
        return f"Not ready: change {', '.join(errors)} first"
    needed = [requirement for requirement in report.missing if not requirement.startswith("bitsandbytes")]
    if needed:
        return f"Ready to check set-ups for {title}; training needs {', '.join(needed)}"
    status = report.bitsandbytes
    if not report.profile.present:
        return f"{title} runs {dtype} natively; this machine has no such device, so isotype ran no test"
    if status.works:
        return f"Ready for {dtype} LoRA and QLoRA on {title}"
    return f"Ready for {dtype} LoRA on {title}, but not for QLoRA (bitsandbytes: {status.message})"


def kernel_rows(profile: DeviceProfile) -> list[tuple[str, str]]:
    """Return (operation, kernel) for each operation between matmuls, or an empty list for a CPU.

    For a GPU of this machine, the kernels were tried in the GPU's best dtype. For other GPUs, the returned kernels
    are expected, but were not tried.
    """
    if device_type(profile.kind) not in kernels.DEVICES:
        return []
    rows = []
    for operation in kernels.TABLE:
        if profile.present:
            detail = "silu" if operation == "gated" else ""
            kernel = kernels.chosen(operation, torch.device(profile.name), profile.best_dtype(), detail)
        else:
            kernel = kernels.foreseen(operation)
        why = f" ({'; '.join(kernel.reasons)})" if kernel.reasons else ""
        rows.append((operation.replace("_", " "), f"{kernel.name}{why}"))
    return rows


def _heading(text: str) -> Text:
    return Text(f"\n{text}", style="bold")


def _grid(rows: Sequence[tuple[Text | str, Text | str]]) -> Padding:
    return Padding(pair_table(rows, "dim"), (0, 0, 0, 2), expand=False)


_SUPPORT_STYLES = {"native": "green", "emulated": "yellow", "refused": "red"}


def _dtype_table(report: DoctorReport) -> Table:
    profile, rates = report.profile, speeds(report)
    speed = "measured" if profile.present else "data sheet"
    table = table_of("dtype", "runs", speed, "cost here", numbers=(speed,), folded=("cost here",))
    table.padding = (0, 3, 0, 0)
    for dtype in COMPUTE_DTYPES:
        support = profile.supports(dtype)
        rate = rates.get(dtype)
        table.add_row(
            dtype_name(dtype),
            Text(support, style=_SUPPORT_STYLES[support]),
            "-" if rate is None else format_rate(rate),
            Text(cost_here(dtype, report)),
        )
    return table


def format_rate(rate: float) -> str:
    """Format a rate in FLOP/s, as in `"95.0 GFLOP/s"` or `"1.0 TFLOP/s"`."""
    return f"{rate / 1e12:,.1f} TFLOP/s" if rate >= 1e12 else f"{rate / 1e9:,.1f} GFLOP/s"


def _device_rows(report: DoctorReport) -> list[tuple[str, str]]:
    profile = report.profile
    memory = f", {format_bytes(profile.memory_bytes)}" if profile.memory_bytes else ", memory size unknown"
    threads = torch.get_num_threads()
    cores = "1 CPU thread" if threads == 1 else f"{threads} CPU threads"
    where = profile.name if profile.present else f"profile {profile.name}; not in this machine"
    return [
        ("device", f"{profile.title} ({where}){memory}"),
        ("torch", f"{report.versions['torch']}, {report.torch_build}, {cores}"),
        ("python", report.python),
        ("source", profile.source),
    ]


def _bitsandbytes_line(status: BitsandbytesStatus) -> Text:
    if status.works:
        return Text(f"works through {status.backend} (test: a tensor was quantized to nf4 and dequantized)")
    if status.works is None:
        return Text(f"not tried: {status.message}", style="yellow")
    return Text(f"does not work: {status.message}", style="red")


def _problems(report: DoctorReport) -> list[tuple[Text | str, Text | str]]:
    rows: list[tuple[Text | str, Text | str]] = []
    for group in by_change(report.incompatibilities).values():
        failing = any(conflict.severity == "error" for conflict in group)
        label = Text("error", style="bold red") if failing else Text("warning", style="bold yellow")
        for conflict in group:
            rows.append((label, Text(conflict.fact)))
            label = Text()
    if report.missing:
        rows.append((Text("missing", style="bold yellow"), ", ".join(report.missing)))
    if command := pip_command(report.incompatibilities, report.missing):
        rows.append((Text("fix", style="bold"), Text(command)))
    return rows


def render_doctor(report: DoctorReport, console: Console) -> None:
    profile = report.profile
    console.print(Text("isotype doctor", style="bold"))
    console.print(_grid(_device_rows(report)))
    console.print(_heading("Matmuls"))
    console.print(fitting(_dtype_table(report), console, indent=2))
    slow = (dtype for dtype in COMPUTE_DTYPES if profile.supports(dtype) != "native")
    if reasons := [(dtype_name(dtype), profile.reason(dtype)) for dtype in slow]:
        console.print()
        console.print(_grid(reasons))
    console.print(_heading("Libraries"))
    libraries = [Text(f"{name} {version}") for name, version in report.versions.items() if version]
    console.print(Padding(Columns(libraries, padding=(0, 3), equal=True), (0, 0, 0, 2)))
    console.print()
    rows: list[tuple[Text | str, Text | str]] = [("bitsandbytes", _bitsandbytes_line(report.bitsandbytes))]
    rows += [("C++", report.compiler)] if report.compiler else []
    console.print(_grid(rows))
    if kernels_used := kernel_rows(profile):
        console.print(_heading("Kernels of the operations between matmuls"))
        console.print(_grid(kernels_used))
    if problems := _problems(report):
        console.print(_heading("To change"))
        console.print(_grid(problems))
    for doubt in (contradiction(report), _unsteady(report), *doubts(profile)):
        if doubt:
            console.print(Text(f"\n{doubt}", style="yellow"))
    console.print()
    console.print(Text(verdict(report), style="bold green" if report.ok else "bold red"))
    console.print(Text(f"--dtype auto means {auto_dtype(profile)}"))


def _profile_json(profile: DeviceProfile) -> dict[str, Any]:
    dtypes = sorted({*COMPUTE_DTYPES, *profile.native, *profile.emulated, *profile.refused}, key=str)
    names = "name title kind present memory_bytes memory_bandwidth peak_flops source"
    return {
        **encoded(profile, {DeviceProfile: names}),
        "flash_attention": sorted(map(dtype_name, profile.flash_attention)),
        "dtypes": {
            dtype_name(dtype): {"support": profile.supports(dtype), "reason": profile.reason(dtype)}
            for dtype in dtypes
        },
        "best_dtype": dtype_name(profile.best_dtype()),
        "contracts": profile.contracts or None,
        "doubts": doubts(profile),
    }


def doctor_json(report: DoctorReport) -> dict[str, Any]:
    names = {
        DoctorReport: "rates python torch_build toolkits versions incompatibilities missing bitsandbytes",
        MatmulRate: "flops_per_second repeats size message spread",
    }
    return {
        "ok": report.ok,
        "verdict": verdict(report),
        "auto_dtype": auto_dtype(report.profile),
        "device": _profile_json(report.profile),
        **encoded(report, names),
        "fix": pip_command(report.incompatibilities, report.missing),
        "compiler": report.compiler or None,
        "kernels": dict(kernel_rows(report.profile)),
    }

from __future__ import annotations

import io
import json
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from isotype.contracts.contract import contracts_here
from isotype.lora import kernels
from isotype.precision.devices import machine
from isotype.precision.devices.machine import (
    BitsandbytesStatus,
    DoctorReport,
    gather_doctor_report,
    read_answer,
    try_bitsandbytes,
)
from isotype.precision.devices.probe import MatmulRate
from isotype.precision.devices.profile import cuda_profile, device_profile
from isotype.precision.versions import Incompatibility
from isotype.report.doctor import (
    auto_dtype,
    contradiction,
    cost_here,
    doctor_json,
    format_rate,
    kernel_rows,
    render_doctor,
    verdict,
)
from tests.processes import Ended, run_code

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
WORKS = BitsandbytesStatus("0.50.2", True, "its native CPU library", None)


def _rate(dtype: torch.dtype, flops: float | None, message: str | None = None) -> MatmulRate:
    return MatmulRate(dtype, flops, 10, 256, message)


def _report(**changes: object) -> DoctorReport:
    """A report of a machine that does not depend on the one the tests run on."""
    profile = replace(
        device_profile("cpu-generic"), name="cpu", title="AMD EPYC", present=True, memory_bytes=8 * 2**30
    )
    report = DoctorReport(
        profile=profile,
        rates={F32: _rate(F32, 95e9), BF16: _rate(BF16, 1.4e9), F16: _rate(F16, 40e9)},
        versions={"torch": "2.13.0+cpu", "peft": "0.21.2", "bitsandbytes": "0.50.2", "gguf": None},
        toolkits={},
        python="Python 3.11.7, Linux x86_64",
        incompatibilities=(),
        missing=(),
        bitsandbytes=WORKS,
    )
    return replace(report, **changes)  # type: ignore[arg-type]


OLD_PEFT = Incompatibility(
    ("transformers 5.23.0", "peft 0.15.0"),
    "transformers 5.23.0 requires peft>=0.20.0, not 0.15.0",
    "peft>=0.20.0",
    "error",
)
OLD_BNB = Incompatibility(
    ("cuda 13.0", "bitsandbytes 0.47.0"),
    "cuda 13.0 needs bitsandbytes>=0.48.0, not 0.47.0",
    "bitsandbytes>=0.48.0",
    "warning",
)


def _text(report: DoctorReport, width: int = 80) -> str:
    console = Console(width=width, file=io.StringIO(), no_color=True, highlight=False)
    render_doctor(report, console)
    assert isinstance(console.file, io.StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())


def test_no_advice_where_calls_differ_much() -> None:
    """Under load float16 seemed 165 times faster than float32."""
    report = _report(rates={
        F32: replace(_rate(F32, 1e9), spread=9.0), BF16: _rate(BF16, 2e9), F16: _rate(F16, 165e9),
    })  # fmt: skip
    text = _text(report)
    assert contradiction(report) is None
    assert "consider --dtype" not in text
    assert "fastest" not in text
    assert "slower" not in text
    assert "float32    native       1.0 GFLOP/s   not compared" in text
    assert "float32: some matmuls took much longer than others; run" in text


def test_a_narrow_terminal_gets_one_row_under_another() -> None:
    text = _text(_report(), width=40)
    assert (
        "Matmuls\n"
        "  float32\n"
        "    runs       native\n"
        "    measured   95.0 GFLOP/s\n"
        "    cost here  the fastest\n"
        "  bfloat16\n"
        "    runs       emulated\n"
        "    measured   1.4 GFLOP/s\n"
        "    cost here  matmuls run 68x slower\n"
        "               than float32\n"
    ) in text


def test_whole_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert (
        _text(_report())
        == """\
isotype doctor
  device  AMD EPYC (cpu), 8.00 GiB
  torch   2.13.0+cpu, CPU build, 2 CPU threads
  python  Python 3.11.7, Linux x86_64
  source  measured on two cores of an AMD CPU, torch 2.13

Matmuls
  dtype      runs           measured   cost here
  float32    native     95.0 GFLOP/s   the fastest
  bfloat16   emulated    1.4 GFLOP/s   matmuls run 68x slower than float32
  float16    emulated   40.0 GFLOP/s   matmuls run 2.4x slower than float32

  bfloat16  no AVX512-BF16 or AMX: torch converts bfloat16 in software
  float16   no AVX512-FP16 or AMX-FP16: torch converts float16 in software

Libraries
  torch 2.13.0+cpu   peft 0.21.2   bitsandbytes 0.50.2

  bitsandbytes  works through its native CPU library (test: a tensor was
                quantized to nf4 and dequantized)

Ready for float32 LoRA and QLoRA on AMD EPYC
--dtype auto means float32, the only native dtype"""
    )


def test_conflicts_are_grouped_by_what_to_change() -> None:
    other = replace(OLD_PEFT, fact="isotype 0.1.0 requires peft>=0.19, not 0.15.0", change="peft>=0.19")
    report = _report(incompatibilities=(OLD_PEFT, other, OLD_BNB), missing=("gguf>=0.17",))
    assert not report.ok
    text = _text(report)
    assert text[text.index("To change") :].startswith("""\
To change
  error    transformers 5.23.0 requires peft>=0.20.0, not 0.15.0
           isotype 0.1.0 requires peft>=0.19, not 0.15.0
  warning  cuda 13.0 needs bitsandbytes>=0.48.0, not 0.47.0
  missing  gguf>=0.17
  fix      pip install --upgrade "peft>=0.20.0" "bitsandbytes>=0.48.0"
           "gguf>=0.17"

Not ready: change peft first
""")


@pytest.mark.parametrize("width", [40, 80, 120])
def test_no_line_is_wider_than_the_console(width: int) -> None:
    report = _report(incompatibilities=(OLD_PEFT, OLD_BNB), missing=("gguf>=0.17",))
    text = _text(report, width)
    assert max(map(len, text.splitlines())) <= width
    assert "Not ready: change peft first" in text


def test_names_with_brackets_are_not_markup() -> None:
    title = "CPU [bold]x[/bold]"
    assert title in _text(_report(profile=replace(_report().profile, title=title)))


def test_a_profile_that_is_not_here_shows_its_data_sheet() -> None:
    status = BitsandbytesStatus(
        "0.50.2", None, None, "it can be imported, but this machine has no NVIDIA T4 for a trial"
    )
    report = _report(profile=device_profile("t4"), rates={}, bitsandbytes=status)
    assert report.ok
    text = _text(report, 120)
    assert "NVIDIA T4 (profile t4; not in this machine), 14.7 GiB" in text
    assert "float16    native     65.0 TFLOP/s   the fastest" in text
    assert "float32    native      8.1 TFLOP/s   matmuls run 8.0x slower than float16" in text
    assert "bfloat16   emulated              -   no published rate" in text
    assert text.endswith(
        "NVIDIA T4 runs float16 natively; this machine has no such device, so isotype ran no test\n"
        "--dtype auto means the checkpoint's dtype if it runs natively (float32, float16), else float16; float16 "
        "trains with loss\nscaling"
    )


@pytest.mark.parametrize(
    ("changes", "ok", "line"),
    [
        ({}, True, "Ready for float32 LoRA and QLoRA on AMD EPYC"),
        (
            {"bitsandbytes": BitsandbytesStatus("0.1", False, None, "ImportError: libfoo.so")},
            True,
            "Ready for float32 LoRA on AMD EPYC, but not for QLoRA (bitsandbytes: ImportError: libfoo.so)",
        ),
        (
            {
                "bitsandbytes": BitsandbytesStatus(None, None, None, "it is not installed"),
                "missing": ("bitsandbytes>=0.49",),
            },
            True,
            "Ready for float32 LoRA on AMD EPYC, but not for QLoRA (bitsandbytes: it is not installed)",
        ),
        (
            {"missing": ("peft>=0.19", "bitsandbytes>=0.49", "trl>=1.15")},
            True,
            "Ready to check set-ups for AMD EPYC; training needs peft>=0.19, trl>=1.15",
        ),
        ({"incompatibilities": (OLD_BNB,)}, True, "Ready for float32 LoRA and QLoRA on AMD EPYC"),
        ({"incompatibilities": (OLD_PEFT,)}, False, "Not ready: change peft first"),
        (
            {"rates": {F32: _rate(F32, None, "CUDA error: no kernel image is available")}},
            False,
            "Not ready: torch cannot multiply float32 matrices on AMD EPYC: "
            "CUDA error: no kernel image is available",
        ),
    ],
)
def test_verdict(changes: dict[str, object], ok: bool, line: str) -> None:
    report = _report(**changes)
    assert report.ok is ok
    assert verdict(report) == line


def test_a_refused_dtype_shows_the_operators_words() -> None:
    rates = {**_report().rates, F16: _rate(F16, None, "\"addmm_impl_cpu_\" not implemented for 'Half'")}
    report = _report(rates=rates)
    assert cost_here(F16, report) == "refused: \"addmm_impl_cpu_\" not implemented for 'Half'"
    assert "float16    emulated              -   refused" in _text(report, 120)


def test_auto_dtype() -> None:
    assert auto_dtype(device_profile("h100")) == (
        "the checkpoint's dtype if it runs natively (float32, bfloat16, float16), else bfloat16; "
        "float16 trains with loss scaling"
    )
    assert auto_dtype(device_profile("cpu-generic")) == "float32, the only native dtype"


def test_a_measurement_that_belies_the_profile_is_said() -> None:
    card = cuda_profile("NVIDIA Unheard Of", 2**30, (8, 0))
    slow = _report(profile=card, rates={F32: _rate(F32, 90e9), BF16: _rate(BF16, 9e9)})
    assert (
        contradiction(slow)
        == "bfloat16 counts as native, but float32 was 10.0x faster: consider --dtype float32"
    )
    fast = replace(slow, rates={F32: _rate(F32, 9e9), BF16: _rate(BF16, 90e9)})
    assert contradiction(fast) is None
    assert contradiction(_report(profile=device_profile("h100"), rates={})) is None


@pytest.mark.parametrize(
    ("rate", "text"),
    [(95e9, "95.0 GFLOP/s"), (1.39e9, "1.4 GFLOP/s"), (65e12, "65.0 TFLOP/s"), (2.25e15, "2,250.0 TFLOP/s")],
)
def test_format_rate(rate: float, text: str) -> None:
    assert format_rate(rate) == text


def test_json_is_plain_and_complete() -> None:
    report = _report(incompatibilities=(OLD_PEFT,), missing=("gguf>=0.17",))
    answer = json.loads(json.dumps(doctor_json(report)))
    assert answer["ok"] is False
    assert answer["rates"]["bfloat16"]["flops_per_second"] == 1.4e9
    assert answer["device"]["dtypes"]["float16"]["support"] == "emulated"
    assert answer["incompatibilities"][0]["packages"] == ["transformers 5.23.0", "peft 0.15.0"]
    assert answer["fix"] == 'pip install --upgrade "peft>=0.20.0" "gguf>=0.17"'
    assert answer["bitsandbytes"]["works"] is True
    assert answer["verdict"] == "Not ready: change peft first"


# ------------------------------------------------------------------------------------------------- bitsandbytes


def _try(script: str, timeout: float = 60.0) -> BitsandbytesStatus:
    return try_bitsandbytes("0.1", _report().profile, timeout, script)


def test_bitsandbytes_failures_are_reported_in_their_own_words() -> None:
    assert _try("raise ImportError('libcudart.so.13: cannot open')") == BitsandbytesStatus(
        "0.1", False, None, "ImportError: libcudart.so.13: cannot open"
    )
    assert _try("import os; os._exit(3)").message == "the process ended with status 3 without output"
    assert _try("pass").message == "the process ended with status 0 without output"
    assert _try("import time; time.sleep(30)", 0.2).message == "it did not answer within 0.2 s"


def test_bitsandbytes_not_installed_or_device_not_here() -> None:
    assert try_bitsandbytes(None, _report().profile, 1) == BitsandbytesStatus(
        None, None, None, "it is not installed"
    )
    script = f"print('{machine._ANSWER}' + '{{}}')"
    assert try_bitsandbytes("0.1", device_profile("t4"), 60, script) == BitsandbytesStatus(
        "0.1", None, None, "it can be imported, but this machine has no NVIDIA T4 for a trial"
    )


def test_nf4_values_that_come_back_wrong_are_a_failure() -> None:
    good = read_answer("0.1", {"library": "BNBNativeLibrary", "nf4_error": 0.15})
    assert (good.works, good.backend) == (True, "its native CPU library")
    for error, shown in ((1.5, "1.5"), (float("nan"), "nan")):
        bad = read_answer("0.1", {"library": "BNBNativeLibrary", "nf4_error": error})
        assert bad.works is False
        assert bad.message == (
            f"an nf4 round trip changes values in [-1, 1] by up to {shown}; correct kernels change them by at most 0.153"
        )


@pytest.mark.real_cpu
def test_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial of bitsandbytes runs in a process that has imported torch before."""

    def forked(command: list[str], **_: object) -> Ended:
        assert command[:2] == [sys.executable, "-c"]
        return run_code(*command[2:])

    monkeypatch.setattr(machine, "subprocess", SimpleNamespace(run=forked, TimeoutExpired=TimeoutError))
    measure = machine.measure_all
    monkeypatch.setattr(machine, "measure_all", lambda device, seconds: measure(device, 0.05))
    report = gather_doctor_report("cpu")
    assert report.ok
    assert report.bitsandbytes.works is True
    assert report.missing == ()
    assert "isotype doctor" in _text(report)
    json.dumps(doctor_json(report))


def test_a_table_of_another_torch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.10.0+cpu")
    table = contracts_here("cpu").measured
    assert table is not None
    measured = table.torch_version.partition("+")[0]
    doubt = f"operators were measured with torch {measured}, and the installed torch is 2.10.0"
    text = io.StringIO()
    render_doctor(_report(), Console(file=text, width=120))
    assert doubt in text.getvalue()
    assert doctor_json(_report())["device"]["doubts"] == [doubt]


def test_a_cpu_is_asked_for_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "none-such")
    clause = machine.compiler_here()
    assert clause == (
        "there is no C++ compiler (none-such) on the path: "
        "attention, LoRA layers, norms and the loss use torch's operators, which are slower"
    )
    report = _report(compiler=clause)
    assert "  C++           there is no C++ compiler (none-such) on the path" in _text(report)
    assert doctor_json(report)["compiler"] == clause
    assert doctor_json(_report())["compiler"] is None
    assert "C++" not in _text(_report())
    monkeypatch.setenv("CXX", sys.executable)
    assert machine.compiler_here() == (
        f"{sys.executable} compiles attention, LoRA layers, norms and the loss at the first step"
    )


def test_the_kernels_of_a_gpu_are_named_with_what_was_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(operation: str, device: torch.device, dtype: torch.dtype, detail: str) -> kernels.Kernel:
        assert (device, dtype) == (torch.device("cuda", 0), F16)
        reasons = () if operation == "rms_norm" else ("triton: Triton is not installed",)
        return kernels.Kernel("torch" if reasons else "aten", None, reasons)

    monkeypatch.setattr(kernels, "chosen", chosen)
    card = device_profile("t4")
    here = replace(card, present=True, name="cuda:0")
    rows = dict(kernel_rows(here))
    assert rows["rms norm"] == "aten"
    assert rows["gated"] == "torch (triton: Triton is not installed)"
    assert kernel_rows(card)  # foreseen
    assert kernel_rows(device_profile("cpu")) == []

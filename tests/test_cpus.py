"""The suite does not depend on the machine: what a test sees of a CPU, and what fails one that asks for more."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

from isotype.precision.devices.cpu import compiler_options, this_cpu, this_onednn
from isotype.precision.devices.probe import measure_all
from isotype.precision.devices.profile import device_profile, this_cpu_emulates
from tests import cpus, processes
from tests.pairwise import pairwise
from tests.reality import real_step

REALLY = torch.backends.cpu.get_cpu_capability()


def test_a_test_sees_a_pretended_cpu(any_cpu: str) -> None:
    profile = device_profile("cpu")
    assert this_cpu().source == "a test"
    assert profile.contracts == any_cpu
    assert this_cpu_emulates(torch.bfloat16) == (any_cpu == "cpu-avx2")
    assert this_cpu_emulates(torch.float16) == (any_cpu != "cpu-amx")


@pytest.mark.real_cpu
def test_a_marked_test_sees_the_machine() -> None:
    assert this_cpu().source != "a test"
    assert ("-mavx512f" in compiler_options()) == (REALLY == "AVX512")
    assert measure_all("cpu", seconds_total=0.01)


@pytest.mark.skipif(REALLY not in ("AVX2", "AVX512"), reason="no x86 CPU")
def test_nothing_is_compiled_that_another_machine_would_not_compile() -> None:
    with cpus.seeing("cpu-avx2"):
        assert compiler_options() == ("-mavx2", "-mfma")


@pytest.mark.parametrize(
    "ask",
    [lambda: measure_all("cpu", 1.0), lambda: real_step(torch.nn.Linear(2, 2), {"input": torch.ones(2)})],
)
def test_a_test_that_asks_the_machine_without_the_mark_fails(ask: Callable[[], object], any_cpu: str) -> None:
    with pytest.raises(pytest.fail.Exception, match="mark it real_cpu"):
        ask()


def test_a_benchmark_that_takes_parts_of_the_tests_sees_the_machine() -> None:
    """What it prints is of this machine: nothing pretends a CPU before `install`."""
    started = [sys.executable, "-c", "from tests import cpus; print(cpus.seen())"]
    bare = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", cpus.VARIABLE)}
    seen = subprocess.run(started, env=bare, capture_output=True, text=True, check=True)
    assert seen.stdout.strip() == cpus.MACHINE


SEES = "from isotype.precision.devices.cpu import this_onednn; print(len(this_onednn().takes))"


@pairwise("any_cpu, imports", cpus.CPUS, ["torch", "a new interpreter"], strength=1, indirect=["any_cpu"])
def test_a_process_sees_what_the_test_sees(any_cpu: str, imports: str) -> None:
    onednn = this_onednn()
    assert onednn is not None
    if imports == "torch":
        printed = processes.printed(SEES)
    else:
        printed = subprocess.run(
            [sys.executable, "-c", SEES], capture_output=True, text=True, check=True
        ).stdout
    assert int(printed) == len(onednn.takes)

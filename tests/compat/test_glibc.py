"""What is freed between the steps of a training is kept for the next one, and given back at the end."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc's malloc")

# Blocks of 4 MiB are taken, written and freed in turns, the last one first, as a step frees what its forward has saved. Bytes lie in
# malloc's memory as tensors do; without torch the process is there at once.
_PROCESS = """
import json, resource
from contextlib import nullcontext
from pathlib import Path
from isotype.compat.glibc import freed_memory_kept

def resident():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")) / 1024

def step():
    saved = [bytes([number]) * (4 << 20) for number in range(1, 21)]
    while saved:
        saved.pop()

bytes([1]) * (31 << 20)  # just below 32 MiB: from here on glibc takes smaller blocks from its heap
before = resident()
with KEPT:
    step()
    began = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(2):
        step()
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - began
    during = resident()
print(json.dumps({"faults": faults, "during": during - before, "after": resident() - before}))
"""


def _measured(kept: str, **environment: str) -> dict[str, float]:
    command = [sys.executable, "-c", _PROCESS.replace("KEPT", kept)]
    own = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**own, **environment})
    found: dict[str, float] = json.loads(done.stdout)
    return found


def test_a_step_takes_the_memory_of_the_one_before() -> None:
    kept, plain = _measured("freed_memory_kept()"), _measured("nullcontext()")
    assert plain["faults"] > 5 * kept["faults"]  # 80 MiB a step are 20480 pages
    assert kept["during"] > 50
    assert kept["after"] < 40


def test_what_the_user_has_set_is_left() -> None:
    assert _measured("freed_memory_kept()", MALLOC_TRIM_THRESHOLD_="131072")["faults"] > 20000

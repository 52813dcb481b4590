"""One of several processes leaves its process group before Python shuts down."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.processes import printed

_PROCESS = """
import atexit
from torch import distributed
from isotype.train.launched import leave_group_at_exit

# What is registered first runs last.
atexit.register(lambda: print("in a group:", distributed.is_initialized()))
distributed.init_process_group("gloo", init_method="file://{store}", rank=0, world_size=1)
for _ in range({times}):
    leave_group_at_exit()
print("in a group:", distributed.is_initialized())
"""


def _said(tmp_path: Path, times: int) -> list[str]:
    script = _PROCESS.format(store=tmp_path / f"store{times}", times=times)
    return [
        line for line in printed(script).splitlines() if line.startswith("in a group")
    ]  # gloo prints, too


@pytest.mark.exhaustive  # what the next test would say if nothing left the group
def test_a_group_lasts_until_python_is_torn_down(tmp_path: Path) -> None:
    assert _said(tmp_path, 0) == ["in a group: True", "in a group: True"]


def test_the_group_is_left_before(tmp_path: Path) -> None:
    assert _said(tmp_path, 2) == ["in a group: True", "in a group: False"]

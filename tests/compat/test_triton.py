"""The end of a process that has loaded triton."""

from __future__ import annotations

import gc
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from types import SimpleNamespace

import pytest
from packaging.version import Version

from isotype.compat.triton import leave_garbage


def _installed() -> Version:
    try:
        return Version(version("triton"))
    except PackageNotFoundError:
        return Version("0")


@pytest.mark.parametrize(
    ("loaded", "freezes"), [(None, True), ("3.8.0", True), ("3.9.0", False), ("3.10.1", False)]
)
def test_the_last_collection_is_spared_unless_triton_prints_what_remains(
    loaded: str | None, freezes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    if loaded is not None:
        monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__=loaded))
    frozen: list[bool] = []
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(True))
    leave_garbage()
    assert frozen == [True] * freezes


@pytest.mark.lacking("" if _installed() >= Version("3.9") else "no triton that prints what a process leaves")
@pytest.mark.parametrize("ending", ["gc.freeze", "leave_garbage"])
def test_triton_still_prints_what_a_process_leaves(ending: str) -> None:
    """If `gc.freeze` no longer makes triton print, the module can go."""
    program = (
        "import atexit, gc, sys, triton\nfrom isotype.compat.triton import leave_garbage\n"
        f"gc.disable(); cycle = [triton.jit]; cycle.append(cycle); del cycle\natexit.register({ending})"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ("nanobind: leaked" in ended.stderr) == (ending == "gc.freeze")

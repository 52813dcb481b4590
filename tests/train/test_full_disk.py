"""A disk that becomes full at any call of a run or a merge: one message, whole checkpoints, and a resumed run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
# Every time test_trainer.py fills a small file system under a run, and tests/checkpoint/test_merge.py one under a merge.
pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile the library that refuses writes, which must be loaded between the C library and all others."""
    compiler = shutil.which("cc")
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("no C compiler, or no Linux: writes cannot be refused here")
    built = tmp_path_factory.mktemp("library") / "full_disk.so"
    source = Path(__file__).parent / "full_disk.c"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", built, source, "-ldl"], check=True)
    return built


@pytest.mark.parametrize(
    ("number", "compiles"),
    [(1, "0"), (4, "1"), (0, "1")],  # for each of the first, a compiler would run in an empty cache
)
def test_a_full_disk_at_any_call(number: int, compiles: str, library: Path, tmp_path: Path):
    surroundings = os.environ | {
        "LD_PRELOAD": str(library),
        "ISOTYPE_CACHE": str(tmp_path / "cache"),
        "ISOTYPE_COMPILE": compiles,
    }
    command = [sys.executable, "-m", "tests.train.full_disk", str(tmp_path), str(number)]
    done = subprocess.run(command, cwd=ROOT, env=surroundings, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    found: dict[str, list[dict[str, Any]]] = json.loads((tmp_path / "found.json").read_text())
    kinds = {"runs", "merges"}
    assert found.keys() == (kinds if number == 1 else kinds | {"exports", "caches"})
    assert all(len(results) >= (number or 6) for results in found.values())
    for result in (each for results in found.values() for each in results):
        told = f"{result['what']}: {result['printed']}"
        # Where a text was written in fewer calls than before, the disk has never been full.
        # A cache that cannot be written is replaced by a temporary folder; what else is written may end the command.
        ended = {0, 1} if "is used until this process ends" in told else {1}
        assert result["status"] in (ended if result["reached"] else {0}), told
        assert "Traceback" not in told
        assert "was not expected" not in told
        if result["reached"]:
            assert "No space left on device" in told
            assert str(tmp_path / "out") in told or str(tmp_path / "cache") in told
        # Nothing half-written remains, and what was saved before is whole.
        assert result["hidden"] == [], told
        assert result["damaged"] == [], told
        assert result["again"] == 0, f"{told}\n{result['printed again']}"
        assert result["hidden again"] == []
    for result in found["runs"]:
        assert result["same"], result["what"]  # every digit, as if the disk had never been full
        told = result["printed"]
        # What is safe, and how to go on; before the folder is locked there is nothing to tell.
        begun = result["reached"] and "nothing can be written to the output directory" not in told
        assert not begun or " complete" in told or "no checkpoint has been saved yet" in told, told
    for result in found["merges"] + found.get("exports", []):
        assert not result["reached"] or "run the same command again" in result["printed"]

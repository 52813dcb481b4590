"""`--model_revision` reaches policy, weights, adapter, chat and merge; a folder's name is never asked of the hub.

Everything runs in one process of its own, with a hub cache that holds two commits of a model and no network.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.processes import run_module
from tests.train.revisions import NAME, NEW

pytestmark = pytest.mark.slow


def ran(root: Path, *more: str) -> dict[str, Any]:
    done = run_module("tests.train.revisions", root, *more)
    assert done.returncode == 0, done.stderr
    content: dict[str, Any] = json.loads((root / "found.json").read_text())
    return content


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("revisions")


@pytest.fixture(scope="module")
def found(root: Path) -> dict[str, Any]:
    return ran(root)


def test_an_older_commit_is_trained_on_remembered_and_merged(tmp_path: Path):
    few = ran(tmp_path, "few")
    assert [few[name][0] for name in ("trained", "merge")] == [0, 0], few
    assert (few["config"]["base_model_name_or_path"], few["config"]["revision"]) == (NAME, NEW)
    assert few["layers"] == {"merged": 2}  # the branch has three


@pytest.mark.parametrize(
    "name", ["trained", "chat", "merge", "base", "further", "model old", "model new", "full", "local", "elsewhere"]
)  # fmt: skip
@pytest.mark.exhaustive
def test_the_command_runs(name: str, found: dict[str, Any]):
    status, printed = found[name]
    assert status == 0, printed


@pytest.mark.exhaustive
def test_an_adapter_remembers_the_commit(found: dict[str, Any]):
    for name in ("config", "further config"):
        config = found[name]
        assert (config["base_model_name_or_path"], config["revision"]) == (NAME, NEW)


@pytest.mark.exhaustive
def test_what_is_used_is_what_it_was_trained_on(found: dict[str, Any]):
    assert found["layers"] == {"merged": 2, "based": 2, "further": 2, "full": 2}
    assert found["same"]  # weights that the adapter leaves alone
    status, printed = found["other base"]
    assert status == 2
    assert f"--base {NAME}: num_hidden_layers 3" in printed


@pytest.mark.exhaustive
def test_the_reference_model_is_of_the_revision(found: dict[str, Any]):
    assert found["first loss"] == pytest.approx(math.log(2), abs=1e-6)  # where both give the same


@pytest.mark.exhaustive
def test_a_check_is_of_the_revision(found: dict[str, Any]):
    (_, old), (_, new) = found["check old"], found["check new"]
    assert old > new


@pytest.mark.exhaustive
def test_an_adapter_remembers_a_folder_by_its_whole_path(root: Path, found: dict[str, Any]):
    config = found["local config"]
    assert (config["base_model_name_or_path"], config["revision"]) == (
        str((root / "work" / "owner" / "tiny").resolve()),
        None,
    )
    status, printed = found["gone"]
    assert status == 2
    assert "error: the adapter's base model cannot be opened" in printed
    assert "hub" not in printed.replace("embedded:NAME, or a hub id", "").replace(str(root), "")

"""Expandable segments are asked of torch's allocator where it has them and nobody has said otherwise."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from isotype.core import allocator
from isotype.core.allocator import EXPANDABLE, VARIABLES, allocator_setting, built_for, let_segments_expand

_SOURCE = (
    "__version__ = '2.13.0'\ncuda: str | None = {cuda}\nhip: str | None = {hip}\nxpu: str | None = None\n"
)


@pytest.fixture
def torch_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """A torch of another build, and no variable set."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "version.py").write_text(_SOURCE.format(cuda="'13.0'", hip="None"))
    monkeypatch.setattr(
        allocator, "find_spec", lambda _: SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    )
    monkeypatch.setattr(sys, "platform", "linux")
    return monkeypatch


def test_it_is_asked_for_where_nobody_has_set_it(torch_for: pytest.MonkeyPatch) -> None:
    torch_for.setenv(VARIABLES[0], "")  # so that monkeypatch takes it away again
    torch_for.delenv(VARIABLES[0])
    assert allocator_setting() is None
    assert let_segments_expand(["--max_steps", "2"]) == EXPANDABLE
    assert allocator_setting() == f"PYTORCH_ALLOC_CONF={EXPANDABLE}"


@pytest.mark.parametrize("name", VARIABLES)
def test_what_the_user_has_set_stays(torch_for: pytest.MonkeyPatch, name: str) -> None:
    torch_for.setenv(name, "max_split_size_mb:128")
    assert let_segments_expand() is None
    assert allocator_setting() == f"{name}=max_split_size_mb:128"


def test_a_torch_for_another_device_gets_nothing(torch_for: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "version.py").write_text(_SOURCE.format(cuda="None", hip="'7.1'"))
    assert built_for("hip") == "7.1"
    assert let_segments_expand() is None
    assert allocator_setting() is None


def test_windows_has_none(torch_for: pytest.MonkeyPatch) -> None:
    torch_for.setattr(sys, "platform", "win32")
    assert let_segments_expand() is None


@pytest.mark.parametrize(
    ("arguments", "left"),
    [
        (["--use_vllm"], True),
        (["--use_vllm", "True"], True),
        (["--use-vllm=true"], True),
        (["--use_vllm", "False"], False),
        (["--use_vllm=no"], False),
    ],
)
def test_vllm_in_the_process_has_a_pool_of_its_own(
    torch_for: pytest.MonkeyPatch, arguments: list[str], left: bool
) -> None:
    torch_for.setenv(VARIABLES[0], "")
    torch_for.delenv(VARIABLES[0])
    assert (let_segments_expand(arguments) is None) == left


def test_the_installed_torch_is_read_as_it_tells_of_itself() -> None:
    import torch

    assert built_for("cuda") == torch.version.cuda
    assert built_for("hip") == torch.version.hip

"""A module's import is heard of whoever asks for it first, and how."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from isotype.compat.imports import when_imported

NAME = "awaited_module"


@pytest.fixture
def heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """What is heard of a module that can be imported but is not yet."""
    (tmp_path / f"{NAME}.py").write_text("value = 1\n")
    (tmp_path / "imports_it.py").write_text(f"import {NAME}\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    found: list[int] = []
    before = list(sys.meta_path)
    leave = when_imported(NAME, lambda: found.append(sys.modules[NAME].value))
    assert not found
    yield found
    leave()
    assert sys.meta_path == before
    for name in (NAME, "imports_it"):
        sys.modules.pop(name, None)


def _lazily() -> None:
    spec = importlib.util.find_spec(NAME)
    assert spec is not None
    assert spec.loader is not None
    spec.loader = importlib.util.LazyLoader(spec.loader)
    module = importlib.util.module_from_spec(spec)
    sys.modules[NAME] = module
    assert spec.loader is not None
    spec.loader.exec_module(module)
    assert module.value == 1


def _in_a_thread() -> None:
    thread = threading.Thread(target=importlib.import_module, args=(NAME,))
    thread.start()
    thread.join()


def _by_another_finder() -> None:
    """One that stands before ours and does not ask the others."""

    class First:
        @staticmethod
        def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
            return importlib.machinery.PathFinder.find_spec(name, path) if name == NAME else None

    sys.meta_path.insert(0, First)  # type: ignore[arg-type]
    try:
        importlib.import_module(NAME)
        importlib.import_module("imports_it")
    finally:
        sys.meta_path.remove(First)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "import_it",
    [
        lambda: importlib.import_module(NAME),
        lambda: importlib.import_module("imports_it"),
        lambda: (importlib.util.find_spec(NAME), importlib.import_module(NAME)),
        lambda: ([importlib.util.find_spec(NAME) for _ in range(3)], importlib.import_module("imports_it")),
        _lazily,
        _in_a_thread,
        _by_another_finder,
    ],
    ids=["at once", "by a library", "looked for", "looked for often", "lazily", "in a thread", "by a finder"],
)
def test_an_import_is_heard_of(heard: list[int], import_it: Callable[[], object]) -> None:
    import_it()
    assert heard == [1]
    module = sys.modules[NAME]
    assert module.__spec__ is not None
    assert "exec_module" not in vars(module.__spec__.loader)


def test_a_look_is_no_import(heard: list[int]) -> None:
    assert importlib.util.find_spec(NAME) is not None
    assert not heard


def test_an_import_that_fails_may_be_tried_again(heard: list[int], tmp_path: Path) -> None:
    (tmp_path / f"{NAME}.py").write_text(
        "import sys\nif not sys.awaited: raise RuntimeError('not yet')\nvalue = 2\n"
    )
    modules: Any = sys
    modules.awaited = False
    try:
        with pytest.raises(RuntimeError, match="not yet"):
            importlib.import_module(NAME)
        assert not heard
        modules.awaited = True
        importlib.import_module(NAME)
    finally:
        del modules.awaited
    assert heard == [2]


def test_a_module_that_is_there_is_heard_of_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, NAME, ModuleType(NAME))
    heard: list[int] = []
    when_imported(NAME, lambda: heard.append(1))
    assert heard == [1]

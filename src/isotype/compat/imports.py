"""Hearing of a module's import, in whatever order, thread or way a script comes to it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from isotype.compat.standard import is_being_imported


def when_imported(name: str, act: Callable[[], None]) -> Callable[[], None]:
    """Call `act` once, as soon as the module `name` has been imported; at once where it has been.

    Returns:
        What stops waiting.
    """
    finder = _Finder(name, act)
    if finder.is_imported():
        act()
    else:
        sys.meta_path.insert(0, finder)
    return finder.leave


@contextmanager
def code_refused() -> Iterator[None]:
    """Within it transformers refuses code of a checkpoint where it would ask "run the custom code? [y/N]", once it is imported."""
    name = "transformers.dynamic_module_utils"
    before: list[int] = []

    def refuse() -> None:
        module: Any = sys.modules[name]
        before.append(module.TIME_OUT_REMOTE_CODE)
        module.TIME_OUT_REMOTE_CODE = 0  # seconds that it waits for an answer

    leave = when_imported(name, refuse)
    try:
        yield
    finally:
        leave()
        if before:
            vars(sys.modules[name])["TIME_OUT_REMOTE_CODE"] = before[0]


class _Finder:
    """Delegates the lookup of one module and calls back when its import has succeeded.

    It stays until an import has succeeded: a look for the module (`importlib.util.find_spec`) is no import, and an
    import that failed may be tried again.
    """

    def __init__(self, name: str, act: Callable[[], None]) -> None:
        self._name, self._act = name, act
        self._lock = threading.Lock()
        self._over = False
        self._executing = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != self._name:
            # A finder that stands before us may have found it without asking us.
            if not self._executing and self.is_imported():
                self._arrived()
            return None
        spec = self._found_by_others(path, target)
        if spec is not None and spec.loader is not None:
            self._listen(spec.loader)
        return spec

    def _found_by_others(self, path: Any, target: Any) -> ModuleSpec | None:
        for finder in list(sys.meta_path):
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find(self._name, path, target) if find is not None else None
            if spec is not None:
                return spec
        return None

    def _listen(self, loader: Any) -> None:
        """The loader stays what it is; only its next `exec_module` tells us."""
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            vars(loader).pop("exec_module", None)
            self._executing = True
            try:
                execute(module)
            finally:
                self._executing = False
            self._arrived()

        loader.exec_module = exec_module

    def is_imported(self) -> bool:
        """Whether the module is there in full; to ask a lazy one would import it."""
        module = sys.modules.get(self._name)
        return type(module) is ModuleType and not is_being_imported(module)

    def _arrived(self) -> None:
        with self._lock:
            over, self._over = self._over, True
        if not over:
            self.leave()
            self._act()

    def leave(self) -> None:
        self._over = True
        if self in sys.meta_path:
            sys.meta_path.remove(self)

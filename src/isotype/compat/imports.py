"""Callbacks for the import of a module, in any thread and by any importer."""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from isotype.compat.replaced import replace
from isotype.compat.standard import is_being_imported


def when_imported(name: str, act: Callable[[], None]) -> Callable[[], None]:
    """Call `act` after the module `name` is imported; now if it already is. Return a function that cancels the call."""
    finder = _Finder(name, act)
    if finder.is_imported():
        act()
    else:
        sys.meta_path.insert(0, finder)
    return finder.leave


@contextmanager
def code_refused() -> Iterator[None]:
    """Let transformers refuse a checkpoint's code, instead of asking "run the custom code? [y/N]"."""
    name = "transformers.dynamic_module_utils"
    with ExitStack() as after:

        def refuse() -> None:
            # It is the number of seconds to wait for an answer.
            after.callback(replace(sys.modules[name], "TIME_OUT_REMOTE_CODE", 0))

        after.callback(when_imported(name, refuse))
        yield


class _Finder:
    """An import finder that calls `act` after the first import of a module. Other finders search for the module.

    The finder stays in `sys.meta_path` until the import succeeds, because a failed import may be repeated.
    """

    def __init__(self, name: str, act: Callable[[], None]) -> None:
        self._name, self._act = name, act
        self._lock = threading.Lock()
        self._over = False
        self._executing = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != self._name:
            # A finder before this one may have found the module.
            if not self._executing and self.is_imported():
                self._arrived()
            return None
        for finder in list(sys.meta_path):
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find(name, path, target) if find is not None else None
            if spec is not None:
                if spec.loader is not None:
                    self._listen(spec.loader)
                return spec
        return None

    def _listen(self, loader: Any) -> None:
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
        """Return whether the module's import is complete. This does not import a lazy module."""
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

"""Defers the import of torch's compiler. The import takes two seconds, and `isotype check` compiles nothing.

These modules import all of `torch._dynamo` without compiling anything (torch 2.13, transformers 5.23):

- torch/_subclasses/fake_tensor.py: `FakeTensorMode.__init__` reads `torch._dynamo.config`
- torch/_compile.py: `torch._disable_dynamo` calls `disable` for each dispatch mode and optimizer,
  https://github.com/pytorch/pytorch/blob/v2.13.0/torch/_compile.py
- torch/__init__.py: `compile` imports `torch._inductor` (torch 2.15), which imports submodules of `torch._dynamo`
- torch/optim/optimizer.py: `_use_grad_for_differentiable` calls `graph_break`, which matters in compiled code only
- transformers/masking_utils.py imports a class from `torch._dynamo._trace_wrapped_higher_order_op`;
  integrations/deepgemm.py and flex_attention.py mark functions for the compiler,
  https://github.com/huggingface/transformers/blob/main/src/transformers/masking_utils.py

tests/compat/test_compiler.py fails when this file is no longer needed.
"""

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any

import torch

from isotype.compat.replaced import replaced

_NAME = "torch._dynamo"
# Functions of `torch._dynamo` that mark a function for the compiler and return it.
_MARKS = ("allow_in_graph", "assume_constant_result")


class _Deferred(ModuleType):
    """Replaces the package `torch._dynamo`. Access to anything but a submodule runs the package's code."""

    def __init__(self) -> None:
        super().__init__(_NAME)
        spec = importlib.util.find_spec(_NAME)
        assert spec is not None
        self.__spec__, self.__loader__, self.__file__ = spec, spec.loader, spec.origin
        self.__package__, self.__path__ = _NAME, list(spec.submodule_search_locations or ())
        self.marked: list[tuple[str, Any]] = []
        self.disable, self.graph_break = _disable, _no_break
        for name in _MARKS:
            setattr(self, name, functools.partial(self._mark, name))

    def _mark(self, name: str, function: Any) -> Any:
        self.marked.append((name, function))
        return function

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if importlib.util.find_spec(f"{_NAME}.{name}") is not None:
            return importlib.import_module(f"{_NAME}.{name}")
        self.run()
        return getattr(self, name)

    def run(self) -> None:
        """Execute the real package's code. Then mark the functions that were marked before."""
        attributes = vars(self)
        marked = attributes.pop("marked")
        for name in ("disable", "graph_break", *_MARKS):
            del attributes[name]
        self.__class__ = ModuleType  # type: ignore[assignment]
        assert self.__spec__ is not None
        assert self.__spec__.loader is not None
        self.__spec__.loader.exec_module(self)
        for name, function in marked:
            getattr(self, name)(function)
        if _blocks.open:
            _blocks.set_stance()


def defer_compiler() -> None:
    """Let `import torch._dynamo` run the package's code on first use. Do nothing if the package is already imported."""
    if _NAME not in sys.modules:
        module: Any = _Deferred()
        sys.modules[_NAME] = module
        torch._dynamo = module
        torch.compile = _after_dynamo(torch.compile)


def _after_dynamo(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def called(*args: Any, **options: Any) -> Any:
        if (deferred := _deferred()) is not None:
            deferred.run()
        return function(*args, **options)

    return called


def _deferred() -> _Deferred | None:
    module = sys.modules.get(_NAME)
    return module if isinstance(module, _Deferred) else None


class _Blocks:
    """The open `with` blocks of `uncompiled`, which may end in any order, and the stance that they set."""

    def __init__(self) -> None:
        self.open = 0
        self._ours: Any = None

    def set_stance(self) -> None:
        now: Any = torch.compiler.set_stance("force_eager")
        if self._ours is not None and now.prev is self._ours.stance:
            now.__exit__(None, None, None)
        else:
            self._ours = now

    def restore_stance(self) -> None:
        ours, self._ours = self._ours, None
        if ours is not None:
            now: Any = torch.compiler.set_stance("force_eager")
            (ours if now.prev is ours.stance else now).__exit__(None, None, None)


_blocks = _Blocks()


@contextmanager
def uncompiled() -> Iterator[None]:
    """In the `with` block, compiled functions run without the compiler. A stance that the block's code sets stays set.

    Blocks may overlap: the stance is restored at the end of the last block.
    """
    _blocks.open += 1
    if _deferred() is None:
        _blocks.set_stance()
    try:
        yield
    finally:
        _blocks.open -= 1
        if not _blocks.open:
            _blocks.restore_stance()


def import_uncompiled(name: str) -> None:
    """Import the package `name`, if installed, with `torch.compile` off: bitsandbytes compiles operators at its import."""
    if name not in sys.modules and importlib.util.find_spec(name) is not None:
        with replaced(torch, "compile", _as_written):
            importlib.import_module(name)


def _as_written(function: Any = None, **_: Any) -> Any:
    return _as_written if function is None else function


def _disable(function: Any = None, recursive: bool = True, **options: Any) -> Any:
    """Replaces `torch._dynamo.disable`: the returned function just calls `function` until the compiler is loaded."""
    if function is None:
        return lambda decorated: _disable(decorated, recursive, **options)

    @functools.cache
    def disabled() -> Callable[..., Any]:
        callable_: Callable[..., Any] = torch._dynamo.disable(function, recursive, **options)
        return callable_

    if not isinstance(function, FunctionType):
        deferred = _deferred()
        if deferred is not None:
            deferred.run()
        return disabled()

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        return (function if _deferred() is not None else disabled())(*args, **kwargs)

    return run


def _no_break(*_: Any, **__: Any) -> None:
    """Do nothing, like `torch._dynamo.graph_break` outside of compiled code."""

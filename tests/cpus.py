"""The CPU that a test sees: a pretended one, unless the test is marked `real_cpu`.

isotype asks a CPU what it is (`precision/devices/cpu.py`) and how fast its products are (`precision/devices/probe.py`); bitsandbytes asks for products of bfloat16. `install` answers in their place with a fixed CPU, in this process
and in those that tests start, so that a suite that is green on one kind of machine is green on all. The arithmetic stays the machine's: what a real step does, how fast a product runs
and whether one dtype beats another can only be asked with the mark, and `machine_only` fails a test that asks without it.

`ISOTYPE_TEST_CPU` names the pretended CPU (`cpu-avx2` if it is not set), or `machine`: nothing is pretended.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import ModuleType
from typing import TYPE_CHECKING, Any
from unittest import mock

if TYPE_CHECKING:
    import pytest

MACHINE = "machine"
VARIABLE = "ISOTYPE_TEST_CPU"
CPUS = ("cpu-avx2", "cpu-avx512", "cpu-amx")
_FLAGS = {
    "cpu-avx2": ("AMD EPYC", {"avx2"}, ()),
    "cpu-avx512": ("AMD EPYC", {"avx2", "avx512f", "avx512_bf16"}, ("bfloat16",)),
    "cpu-amx": ("Intel Xeon", {"avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16"}, ("bfloat16", "float16")),
}
_seen = MACHINE  # of a process that pretends nothing, such as a benchmark


def default() -> str:
    """The CPU that tests without a mark see."""
    return os.environ.get(VARIABLE, CPUS[0])


def seen() -> str:
    """The CPU that is seen now."""
    return _seen


@contextmanager
def seeing(name: str) -> Iterator[None]:
    """See this CPU, `machine` for the real one, in this process and those that are forked of it."""
    global _seen
    before, _seen = _seen, name
    variable = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = name
    try:
        yield
    finally:
        _seen = before
        if variable is None:
            os.environ.pop(VARIABLE, None)
        else:
            os.environ[VARIABLE] = variable


def pretend(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `device="cpu"` be such a CPU to the end of the test."""
    monkeypatch.setattr(sys.modules[__name__], "_seen", name)
    monkeypatch.setenv(VARIABLE, name)


def see_as_asked() -> None:
    """Take the CPU that the environment names: a forked process has that of its parent."""
    global _seen
    _seen = default()


def machine_only(what: str) -> None:
    """Fail a test that asks for what only the real CPU can tell, without the mark that allows it."""
    if _seen != MACHINE:
        import pytest

        pytest.fail(f"the test asks the machine for {what}: mark it real_cpu, or name what it expects")


def no_compiler() -> str:
    """Why nothing is compiled on this machine, "" where something is."""
    from isotype.core.compiled import NotCompiledError, find_compilers

    try:
        find_compilers()
    except NotCompiledError as error:
        return str(error)
    return ""


def no_bfloat16_loops() -> str:
    """Why there are no compiled products in bfloat16, "" where there are."""
    from isotype.precision.devices.cpu import compiler_options

    with seeing(MACHINE):
        options = compiler_options()
    return no_compiler() or (
        "" if "-mavx512bf16" in options else "this CPU has no products of bfloat16 that loops are made of"
    )


def _of_cpu(module: Any) -> None:
    """What `precision/devices/cpu.py` says of a CPU."""
    import torch

    cpu, onednn, options = module.this_cpu, module.this_onednn, module.compiler_options

    def this_cpu() -> Any:
        if _seen == MACHINE:
            return cpu()
        title, flags, _ = _FLAGS[_seen]
        return module.CpuFeatures(title, frozenset(flags), "a test")

    def this_onednn() -> Any:
        if _seen == MACHINE:
            return onednn()
        return module.OneDnn(frozenset(getattr(torch, name) for name in _FLAGS[_seen][2]))

    def compiler_options() -> tuple[str, ...]:
        """Never more than the machine has: what is compiled is run."""
        before = _seen
        with seeing(MACHINE):
            really: tuple[str, ...] = options()
        return ("-mavx2", "-mfma") if before == "cpu-avx2" and "-mavx512f" in really else really

    module.this_cpu, module.this_onednn, module.compiler_options = this_cpu, this_onednn, compiler_options


def _of_profile(module: Any) -> None:
    """The answer that `precision/devices/profile.py` keeps is kept for each CPU."""
    emulates = module.this_cpu_emulates.__wrapped__
    kept = functools.cache(lambda name, dtype: emulates(dtype))
    module.this_cpu_emulates = lambda dtype: kept(_seen, dtype)


def _of_bitsandbytes(module: Any) -> None:
    """Its layers for CPUs with products of bfloat16 keep other codes."""
    has = module.has_avx512bf16
    module.has_avx512bf16 = lambda: has() if _seen == MACHINE else _seen != "cpu-avx2"


def _of_loading(module: Any) -> None:
    """Loops are compiled for each CPU."""
    compiled = module.loops_of
    kept = functools.cache(lambda name, *files: compiled(*files))
    module.loops_of = lambda *files: kept(_seen, *files)


def _of_products(module: Any) -> None:
    """What a process has asked for once is asked for again: another CPU may be seen."""
    module.compiled_products = module.compiled_products.__wrapped__
    module._are_fast = module._are_fast.__wrapped__


def _of_probe(module: Any) -> None:
    """Rates are measured on the machine."""
    measure = module.measure_all

    @functools.wraps(measure)
    def measure_all(*arguments: Any, **named: Any) -> Any:
        machine_only("the rates of its products")
        return measure(*arguments, **named)

    module.measure_all = measure_all


def _without_the_compiler() -> Any:
    """Functions for devices without kernels are compiled by no test: importing torch's compiler takes longer than bitsandbytes itself."""
    import torch

    return mock.patch.object(torch, "compile", lambda function, **options: function)


_DOORS: dict[str, Callable[[Any], None]] = {
    "isotype.precision.devices.cpu": _of_cpu,
    "isotype.precision.devices.profile": _of_profile,
    "isotype.precision.devices.probe": _of_probe,
    "isotype.lora.loops.loading": _of_loading,
    "isotype.lora.loops.products": _of_products,
    "bitsandbytes.nn.modules": _of_bitsandbytes,
    "bitsandbytes.backends.default.ops": lambda module: None,
}
_AROUND = {"bitsandbytes.backends.default.ops": _without_the_compiler}


class _Doors(importlib.abc.MetaPathFinder):
    """Changes a module when it has been imported; it imports none."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _DOORS:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        loader: Any = spec.loader if spec else None
        if loader is not None:
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                with _AROUND.get(fullname, nullcontext)():
                    execute(module)
                _DOORS[fullname](module)

            loader.exec_module = exec_module
        return spec


_DOOR = _Doors()


def install() -> None:
    """See pretended CPUs in this process, from the first import of isotype on."""
    see_as_asked()
    late = sorted(_DOORS.keys() & sys.modules.keys())
    if _DOOR in sys.meta_path:
        sys.meta_path.remove(_DOOR)
    elif late:
        raise RuntimeError(f"{', '.join(late)} were imported before tests could pretend a CPU")
    sys.meta_path.insert(0, _DOOR)  # before that of pytest, which comes first in a process of pytest-xdist

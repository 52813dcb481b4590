"""What all tests share: saved tiny models."""

from __future__ import annotations

import functools
import gc
import importlib.metadata
import logging
import os
import signal
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

# Importing makes no garbage worth looking for; it is looked for when the tests have been collected.
gc.disable()
# Tracing makes many objects and few cycles: looking for garbage all the time takes a tenth of the suite.
gc.set_threshold(20_000, 20, 50)
# Every merge and every trainer collects: what is young is enough for its models, all that lives is looked at between files.
_collect = gc.collect
gc.collect = lambda generation=1: _collect(generation)
# Before torch and bitsandbytes are loaded: threads make tiny models ten times slower where tests share the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# What is compiled is kept, whatever the shell says: hundreds of processes would compile the libraries again.
if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):
    sys.dont_write_bytecode = False
# readline, which pytest imports, leaves what it takes for a terminal's width to the processes of pytest-xdist.
os.environ.pop("COLUMNS", None)
# Tests say themselves whether they may ask the hub, and a hub of their own answers.
for _variable in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE"):
    os.environ.pop(_variable, None)
# A shell starts what runs in its background with Ctrl-C ignored, and so would be what the tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

from tests import cpus  # noqa: E402

# Before isotype asks this machine's CPU anything; processes that tests start do so as well.
cpus.install()
_STARTED = [str(Path(__file__).parent / "new_interpreters"), str(Path(__file__).parents[1])]
os.environ["PYTHONPATH"] = os.pathsep.join([*_STARTED, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)

from isotype.compat.torchvision import make_importable  # noqa: E402
from isotype.core.cache import prepare_library_caches  # noqa: E402

# As a command does before it imports the libraries: commands that run in this process come too late.
prepare_library_caches()
make_importable()

import hypothesis  # noqa: E402
import jinja2  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
from _pytest.logging import caplog_handler_key  # noqa: E402

# Devices that are not there keep each seed for later, with the stack of who gave it: writing stacks takes a hundredth of the suite.
for _device in (torch.cuda, torch.xpu, torch.mtia):
    _device.traceback = types.SimpleNamespace(format_stack=list)  # type: ignore[attr-defined]

# What lies on the device meta has no values: drawing them takes as long as all else that makes a layer.
for _layer in (torch.nn.Linear, torch.nn.Embedding):
    _layer.reset_parameters = functools.partialmethod(  # type: ignore[method-assign]
        lambda self, drawn: None if self.weight.is_meta else drawn(self), _layer.reset_parameters
    )

# Where there is no GPU Triton's interpreter runs its kernels; the variable is read when a kernel is defined.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# No test cuts the power: waiting until a disk has what was written shows nothing. What tests start still waits.
os.fsync = lambda descriptor: None

# Every adapter that is saved has its card's template compiled again, the same one.
jinja2.Environment.compile = functools.lru_cache(jinja2.Environment.compile)

# accelerate parses the metadata of PEFT ten times in a training, to know that it is installed.
importlib.metadata.metadata = functools.lru_cache(importlib.metadata.metadata)

# An example takes long on a busy machine, not because it is wrong.
hypothesis.settings.register_profile("many", deadline=None)
hypothesis.settings.register_profile("few", max_examples=30, deadline=None)

from isotype.compat import hub  # noqa: E402
from tests import pairwise, shares  # noqa: E402
from tests.models import save_tiny  # noqa: E402


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`saved(name, dtype)`: a directory with a tiny model, saved once a session."""
    directories: dict[tuple[str, torch.dtype], Path] = {}

    def directory(name: str, dtype: torch.dtype = torch.float32) -> Path:
        key = (name, dtype)
        if key not in directories:
            directories[key] = save_tiny(name, tmp_path_factory.mktemp(name), dtype)
        return directories[key]

    return directory


@pytest.fixture(params=cpus.CPUS)
def any_cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of the CPU that the test pretends to run on; the test runs once on each."""
    cpus.pretend(request.param, monkeypatch)
    return str(request.param)


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test asks the hub whether it is there."""
    monkeypatch.setattr(hub, "_why_unreachable", lambda: "")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """A test sees a pretended CPU, with its fixtures, unless it is marked."""
    marked = item.get_closest_marker("real_cpu") is not None
    with cpus.seeing(cpus.MACHINE if marked else cpus.default()):
        yield


def pytest_configure(config: pytest.Config) -> None:
    """Fewer random examples a run where the exhaustive forms are left out, and no tests made for them."""
    hypothesis.settings.load_profile("few" if config.option.markexpr else "many")
    pairwise.rest_is_made = "not exhaustive" not in config.option.markexpr


def _capture_few_logs(plugin: Any) -> None:
    """Logs are captured for tests that ask for them: to begin and end it pytest visits each of two thousand loggers, six times a test."""
    capture = plugin._runtest_for
    logging.getLogger().addHandler(logging.NullHandler())  # what no test reads is not printed instead

    @contextmanager
    def capture_if_asked(item: pytest.Item, when: str) -> Iterator[None]:
        item.stash[caplog_handler_key] = plugin.caplog_handler
        with capture(item, when) if "caplog" in item.fixturenames else nullcontext():
            yield

    plugin._runtest_for = capture_if_asked


def pytest_collection_finish(session: pytest.Session) -> None:
    """What the imports have made stays to the end: no later collection looks at it again."""
    _capture_few_logs(session.config.pluginmanager.get_plugin("logging-plugin"))
    _freeze()
    gc.enable()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Every trainer looks for garbage in all that lives: what a file's tests have imported and cached is left out for the next."""
    yield
    if history := sys.modules.get("isotype.trace.dtype_history"):
        history.default_dtypes.clear()  # a script sets it once; its lines are no reason in the next test
    if nextitem is None or nextitem.path != item.path or len(sys.modules) > _modules_frozen + _MANY_MODULES:
        _freeze()


_MANY_MODULES = 50
_modules_frozen = 0


def _freeze() -> None:
    """Leave the objects of this moment out of later collections, and out of searches for objects (`model/walk.py`)."""
    global _modules_frozen
    gc.collect(2)
    gc.freeze()
    _modules_frozen = len(sys.modules)


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    shares.rewrite_assertions(session.config)


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Long tests first: at the end one core would wait for them."""
    shares.read_constants(config)
    if _runs_whole_suite(config):
        _leave_out_thorough(config, items)
    yield
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
    _skip_once_a_file(config, items)


def _runs_whole_suite(config: pytest.Config) -> bool:
    """Whether no file or folder is named."""
    named: bool = getattr(config, "workerinput", {}).get(
        "named", config.args_source is not pytest.Config.ArgsSource.TESTPATHS
    )
    return not named


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Workers of pytest-xdist take files from the process that starts them, and do not see whether a user named them."""
    node.workerinput["named"] = not _runs_whole_suite(node.config)


def _leave_out_thorough(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out costly tests that reach few branches of their own; tools/thorough.py finds them."""
    names = frozenset((Path(__file__).parent / "thorough.txt").read_text().splitlines())
    left_out = {item: not names.isdisjoint((item.nodeid, item.nodeid.partition("[")[0])) for item in items}
    config.hook.pytest_deselected(items=[item for item in items if left_out[item]])
    items[:] = [item for item in items if not left_out[item]]


def _skip_once_a_file(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of tests that this machine cannot run, one in a file says so, and how many there are."""
    lacking: dict[tuple[Path, str], list[pytest.Item]] = {}
    for item in items:
        whys = [str(mark.args[0]) for mark in item.iter_markers("lacking") if mark.args[0]]
        if whys:
            lacking.setdefault((item.path, whys[0]), []).append(item)
    for (_, why), (first, *others) in lacking.items():
        first.add_marker(pytest.mark.skip(reason=f"{why} ({1 + len(others)} tests of this file)"))
        config.hook.pytest_deselected(items=others)
    left = {id(item) for _, *others in lacking.values() for item in others}
    items[:] = [item for item in items if id(item) not in left]

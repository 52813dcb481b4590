"""After a check the real step runs on everything that the loss can reach, as if there had been no check."""

from __future__ import annotations

import functools
import random
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from isotype.precision.devices.profile import device_profile
from isotype.preflight.check import check
from isotype.records.request import Setup, StepRequest
from isotype.trace.fake.code import state_reached_by
from isotype.trace.fake.state_snapshot import Untouched, beside_twin
from isotype.trace.fake.step import trace_step
from tests.reality import real_step
from tests.rules.traces import traced
from tests.small import FP32, WIDTH, ids, wide_norms

X = torch.ones(2, WIDTH)
MADE: Any = None
TABLES: dict[str, torch.Tensor] = {}


class Scheduler:
    """Like diffusers' DDPMScheduler: moves its table to the device of what it is given, and counts its steps."""

    def __init__(self) -> None:
        self.alphas_cumprod = torch.linspace(0.9, 0.1, 10)
        self.steps = 0

    def add_noise(self, x: torch.Tensor) -> torch.Tensor:
        self.alphas_cumprod = self.alphas_cumprod.to(dtype=x.dtype) * 1
        self.steps += 1
        return x * self.alphas_cumprod[3]


class Average:
    """An average of weights, in slots."""

    __slots__ = ("shadow", "updates")

    def __init__(self) -> None:
        self.shadow: dict[str, torch.Tensor] = {}

    def update(self, model: nn.Module) -> None:
        self.updates = getattr(self, "updates", 0) + 1
        for name, parameter in model.named_parameters():
            self.shadow[name] = 0.9 * self.shadow.get(name, torch.zeros(())) + 0.1 * parameter.detach()


@dataclass(frozen=True)
class Statistics:
    seen: list[Any] = field(default_factory=list)
    last: deque[Any] = field(default_factory=lambda: deque(maxlen=2))
    kinds: set[Any] = field(default_factory=set)
    by_key: OrderedDict[str, Any] = field(default_factory=OrderedDict)


class Rotary:
    table: torch.Tensor | None = None

    @classmethod
    def of(cls, x: torch.Tensor) -> torch.Tensor:
        if cls.table is None:
            cls.table = torch.arange(x.shape[-1], device=x.device).cos()
        return cls.table


@functools.lru_cache(maxsize=4)
def memoized(width: int) -> torch.Tensor:
    return torch.arange(width).cos()


def cached_globally(x: torch.Tensor) -> torch.Tensor:
    global MADE
    if MADE is None:
        MADE = torch.ones(x.shape[-1])
    return MADE * TABLES.setdefault("sin", torch.ones(x.shape[-1]).sin())


def _scheduler() -> Any:
    scheduler = Scheduler()
    return (lambda m: m(scheduler.add_noise(X)).mean()), lambda: scheduler


def _average() -> Any:
    average = Average()

    def loss(m: nn.Module) -> torch.Tensor:
        average.update(m)
        return m(X).mean() + sum(value.sum() for value in average.shadow.values())

    return loss, lambda: average


def _statistics() -> Any:
    kept = Statistics()

    def loss(m: nn.Module) -> torch.Tensor:
        made = m(X)
        kept.seen.append(made.detach())
        kept.last.append(made)
        kept.kinds.add(made)
        kept.by_key["made"] = made
        return made.mean() + sum(each.sum() for each in kept.seen)

    return loss, lambda: kept


def _counter() -> Any:
    count, total = 0, None

    def loss(m: nn.Module) -> torch.Tensor:
        nonlocal count, total
        count += 1
        total = m(X).detach() if total is None else total + m(X).detach()
        return m(X).mean() + total.mean()

    return loss, lambda: (count, total)


def _partial() -> Any:
    holder = SimpleNamespace()

    def inner(holder: Any, m: nn.Module, into: list[Any]) -> torch.Tensor:
        holder.made = m(X)
        into.append(holder.made)
        return into[0].mean() + holder.made.mean()

    into: list[Any] = []
    return functools.partial(inner, holder, into=into), lambda: (holder, into)


class _Bound:
    def __init__(self) -> None:
        self.teacher = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
        self.numbers = numpy.zeros(2)
        self.drawn = torch.Generator().manual_seed(3)
        self.python = random.Random(3)

    def loss(self, m: nn.Module) -> torch.Tensor:
        self.teacher.eval()
        self.teacher.register_buffer("center", m(X).detach().mean(0), persistent=False)
        self.teacher[0].weight.kept = m(X)
        self.teacher[0].register_forward_hook(lambda *_: None)
        self.numbers += 1
        self.python.random()
        noise = torch.randn(2, WIDTH, generator=self.drawn)
        return (m(X) - self.teacher(X) + noise).mean() + self.teacher.center.mean()


def _bound() -> Any:
    made = _Bound()
    return made.loss, lambda: (
        made,
        made.drawn.get_state().tolist(),
        made.python.getstate(),
        made.numbers.sum(),
    )


def _memoized() -> Any:
    memoized.cache_clear()
    return (lambda m: (m(X) * memoized(WIDTH)).mean()), lambda: memoized.cache_info().currsize


def _class() -> Any:
    Rotary.table = None
    return (lambda m: (m(X) * Rotary.of(X)).mean()), lambda: Rotary.table


def _globals() -> Any:
    global MADE
    MADE = None
    TABLES.clear()
    return (lambda m: (m(X) * cached_globally(X)).mean()), lambda: (MADE, TABLES)


CASES = [_scheduler, _average, _statistics, _counter, _partial, _bound, _memoized, _class, _globals]


def state(value: Any, seen: frozenset[int] = frozenset()) -> Any:
    """What an object holds, tensors by identity; fails on a fake."""
    assert not isinstance(value, FakeTensor)
    if id(value) in seen:
        return "again"
    seen |= {id(value)}
    if isinstance(value, torch.Tensor):
        return (id(value), [(name, state(held, seen)) for name, held in vars(value).items()])
    if isinstance(value, dict):
        return [(key, state(held, seen)) for key, held in value.items()]
    if isinstance(value, (list, tuple, deque)):
        return [state(held, seen) for held in value]
    slots = [name for name in getattr(type(value), "__slots__", ()) if hasattr(value, name)]
    if hasattr(value, "__dict__") or slots:
        held = {**getattr(value, "__dict__", {}), **{name: getattr(value, name) for name in slots}}
        return [(name, state(each, seen)) for name, each in held.items()]
    return repr(value)


@pytest.mark.real_cpu
@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__.strip("_"))
def test_what_the_loss_reaches_is_as_it_was(make: Callable[[], Any]) -> None:
    loss, reached = make()
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    before = state(reached())
    report = check(model, loss, device="cpu", verify=False)
    assert report.complete
    assert state(reached()) == before
    assert not [finding for finding in report.findings if finding.code == "IST198"]
    assert real_step(model, loss).error is None


class Caching(nn.Module):
    """Keeps a table where neither parameters nor buffers are: a class attribute, a global, a hook's closure."""

    table: torch.Tensor | None = None

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.made: list[torch.Tensor] = []
        made = self.made
        self.proj.register_forward_hook(lambda _, given, result: made.append(result))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if Caching.table is None:
            Caching.table = torch.ones(WIDTH, device=x.device)
        return self.proj(x) * Caching.table * memoized(WIDTH) * cached_globally(x)


@pytest.mark.real_cpu
def test_what_the_models_own_code_reaches() -> None:
    memoized.cache_clear()
    model = Caching()
    report = check(model, {"x": X}, device="cpu")
    assert report.complete
    assert Caching.table is None
    assert model.made == []
    assert real_step(model, {"x": X}).error is None


def test_a_cache_among_the_inputs() -> None:
    class Remembering(nn.Linear):
        def forward(self, x: torch.Tensor, cache: Any) -> torch.Tensor:  # type: ignore[override]
            cache.kept.append(super().forward(x))
            return cache.kept[-1]

    cache = SimpleNamespace(kept=[])
    check(Remembering(WIDTH, 2), {"x": X, "cache": cache}, device="cpu", verify=False)
    assert cache.kept == []


def test_a_memo_without_tensors_of_the_trace_is_kept() -> None:
    memoized.cache_clear()
    first = memoized(WIDTH)
    traced(nn.Linear(WIDTH, WIDTH), lambda m: (m(X) * memoized(WIDTH)).mean())
    assert memoized(WIDTH) is first


def test_what_is_saved_once_is_put_back_after_each_of_several_traces() -> None:
    """A memo that was cleared counts from 0 again: by its counters alone the second trace would look like none."""
    memoized.cache_clear()
    memoized(3)
    kept: list[torch.Tensor] = []

    def loss(m: nn.Module) -> torch.Tensor:
        kept.append(m(X))
        return (kept[-1] * memoized(WIDTH)).mean()

    model = nn.Linear(WIDTH, WIDTH)
    setup = Setup(device_profile("cpu"), None, False, "sgd", FP32)
    saved = state_reached_by(StepRequest(model, loss))
    for _ in range(3):
        trace_step(StepRequest(model, loss), setup, untouched=saved)
        assert kept == []
        assert memoized.cache_info().currsize == 0


def test_a_step_and_its_fixes_are_traced_with_what_was_saved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    class Counted(Untouched):
        def __init__(self, roots: Any) -> None:
            made.append(self)
            super().__init__(roots)

    monkeypatch.setattr("isotype.trace.fake.code.Untouched", Counted)
    report = check(wide_norms(), ids(), device="cpu")
    assert sum(fix.verified for finding in report.findings for fix in finding.fixes) > 2
    assert len(made) == 1


def test_numbers_that_modules_hold_do_not_count() -> None:
    with torch.device("meta"):
        many = nn.ModuleList(nn.LayerNorm(1) for _ in range(60))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("isotype.trace.fake.state_snapshot._LIMIT", 50)
        untouched = Untouched(beside_twin(many))
        untouched.restore()
        assert untouched.left == ()


def test_the_few_of_many_modules_that_changed_are_put_back() -> None:
    model = nn.ModuleList(nn.Linear(1, 1) for _ in range(500))
    states = [vars(module).copy() for module in model]
    weights = [module.weight for module in model]
    changed, hooked, moved, emptied = (model[at] for at in (3, 199, 200, 499))
    untouched = Untouched([("model", model)])
    changed.extra, changed.bias.grad, changed._backward_hooks = 1, torch.ones(1), OrderedDict()
    hooked.register_forward_hook(print)
    hooked.weight = moved._parameters.pop("weight")
    emptied._parameters.clear()
    untouched.restore()
    for module, state, weight in zip(model, states, weights, strict=True):
        assert list(vars(module)) == list(state)
        assert all(vars(module)[key] is held for key, held in state.items())
        assert list(module._parameters) == ["weight", "bias"]
        assert module.weight is weight
        assert not module._forward_hooks
    assert changed.bias.grad is None


def test_a_value_that_moves_to_the_next_dict_comes_back() -> None:
    value = object()
    first, second = {"a": value}, dict[str, Any]()
    untouched = Untouched([("first", first), ("second", second)])
    second["b"] = first.pop("a")
    untouched.restore()
    assert (first, second) == ({"a": value}, {})


def test_restoring_takes_no_data() -> None:
    large = torch.zeros(1 << 20)
    trace = traced(nn.Linear(WIDTH, 2), lambda m: m(X).mean() + large.add_(1).mean())
    assert trace.failure is None
    assert large._version == 0
    assert not large.any()


def test_modules_that_name_each_other_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    package, part = ModuleType("graphs"), ModuleType("graphs.typing")
    for module in (package, part):
        module.graphs, module.typing = package, part  # type: ignore[attr-defined]
    part.CACHE = kept = []  # type: ignore[attr-defined]
    monkeypatch.setitem(globals(), "graphs", package)

    def loss(model: nn.Module) -> torch.Tensor:
        graphs.typing.CACHE.append(1)  # type: ignore[name-defined]  # noqa: F821 - set above
        return model(X).sum()

    report = check(nn.Linear(WIDTH, 1), loss, device="cpu", verify=False)
    assert report.complete
    assert kept == []


class Irreps(tuple[int, ...]):
    """Like e3nn's: a tuple that refuses to be asked for its length."""

    def __len__(self) -> int:
        raise NotImplementedError


def test_what_objects_make_of_length_and_truth_is_not_asked() -> None:
    model = nn.Linear(WIDTH, 1)
    model.parts, model.table = Irreps((1, 2)), torch.zeros(3)
    report = check(model, lambda model: model(X + model.table.sum()).sum(), device="cpu", verify=False)
    assert report.complete, report.trace.failure

"""The live recorder and the watch: what they see, and that nothing of them stays."""

from __future__ import annotations

import gc
import itertools
import os
import pickle
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as modules
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from isotype.compat.torch import is_simulated, no_modes, put_under, take_out
from isotype.preflight.check import check
from isotype.ranges.recorder import RangeRecorder
from isotype.records.request import Setup
from isotype.records.trace import Failure
from isotype.trace.live.forward import Averages, Beginning, named_inputs
from isotype.trace.live.recorder import LiveFunctions, LiveRecorder
from isotype.trace.live.watch import Watch
from isotype.trace.nonfinite.again import FirstNonFinite
from tests.measured_step import measure_step


class Block(nn.Module):
    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 16)
        self.outer = nn.Linear(16, 8)
        self.recompute = recompute

    def _run(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.outer(torch.relu(self.inner(hidden)))

    def forward(self, hidden: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        run = checkpoint(self._run, hidden, use_reentrant=False) if self.recompute else self._run(hidden)
        return run * scale


@pytest.fixture
def watches() -> Iterator[list[Watch]]:
    """Watches to be detached after the test, whatever came of it."""
    made: list[Watch] = []
    yield made
    for watch in made:
        watch.detach()
        watch.forget()


def _train(model: nn.Module, steps: int, seed: int = 0, **options: Any) -> list[float]:
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    losses = []
    for _ in range(steps):
        loss = model(torch.randn(4, 8, generator=generator), **options).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _block(seed: int = 0, **options: Any) -> Block:
    torch.manual_seed(seed)
    return Block(**options)


def _is_clean() -> bool:
    stacks = torch._C._len_torch_dispatch_stack() + torch._C._len_torch_function_stack()
    return not stacks and not modules._has_any_global_hook()


def _setup() -> Setup:
    return check(_block(), {"hidden": torch.zeros(4, 8)}, device="cpu", verify=False).trace.setup


# ------------------------------------------------------------------------------------------------------- the watch


def test_a_watched_training_gives_the_same_losses_to_the_last_bit(watches: list[Watch]) -> None:
    plain = _train(_block(), 4)
    watch = Watch()
    watches.append(watch)
    watch.attach()
    assert _train(_block(), 4) == plain
    assert watch.state == "over"
    assert len(watch.seen) == 1
    assert watch.seen[0].operators > 40


def test_nothing_stays_after_the_watched_step(watches: list[Watch]) -> None:
    model = _block()
    optimizer = torch.optim.AdamW(model.parameters())
    signal = torch.randn(4, 8)
    watch = Watch()
    watches.append(watch)
    watch.attach()
    loss = model(signal).square().mean()
    assert not _is_clean()
    loss.backward()
    optimizer.step()
    model(signal)
    assert _is_clean()
    states = [value for state in optimizer.state.values() for value in state.values()]
    tensors = [*model.parameters(), *(p.grad for p in model.parameters()), *states, signal, loss]
    assert not any(getattr(tensor, "__dict__", None) for tensor in tensors)
    assert all(p._post_accumulate_grad_hooks is None for p in model.parameters())
    assert b"isotype" not in pickle.dumps(optimizer.state_dict())
    assert watch.recorder is None


@pytest.fixture
def swapped() -> Iterator[None]:
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


@pytest.mark.parametrize("place", ["forward", "result", "backward", "step", "averages", "later"])
def test_tensors_can_be_swapped_at_any_place_of_a_watched_step(
    place: str, watches: list[Watch], swapped: None
) -> None:
    """`torch.utils.swap_tensors` refuses a tensor with a weak reference of Python or of C++."""
    model = _block().to(torch.bfloat16 if place == "averages" else torch.float32)
    averages = Averages(lambda call: None)
    watches.append(Watch(after=lambda: averages.stepped([model])))
    watches[0].attach()
    optimizer = torch.optim.SGD(model.parameters())
    for step in range(3):
        if place == "forward" and step == 0:
            model(torch.ones(4, 8)).sum().backward()
            model.to(torch.bfloat16)
        dtype = model.inner.weight.dtype
        hidden = model(torch.ones(4, 8, dtype=dtype))
        if place == "result":
            value = hidden.detach()
            torch.utils.swap_tensors(value, torch.zeros_like(value))
            assert value.count_nonzero() == 0
        hidden.sum().backward()
        if place == "backward":
            model.to(torch.bfloat16)
        optimizer.step()
        if place == "step":
            model.to(torch.bfloat16)
        with torch.no_grad():
            mean = model.inner.weight * 0.9
            if place == "averages":
                torch.utils.swap_tensors(mean, model.inner.weight.clone())
        optimizer.zero_grad()
        if place == "later":
            model.to(torch.bfloat16)
    averages.detach()
    assert len(watches[0].seen) == 1
    assert not any("stopped" in note for note in watches[0].notes)


@pytest.mark.parametrize("stance", ["eager_on_recompile", None])
def test_the_compiler_keeps_the_stance_that_a_watched_step_sets(
    stance: str | None, watches: list[Watch]
) -> None:
    model, before = _block(), torch.compiler.set_stance("default")
    watches.append(Watch())
    watches[0].attach()
    optimizer = torch.optim.SGD(model.parameters())
    try:
        loss = model(torch.ones(4, 8)).sum()
        if stance is not None:
            torch.compiler.set_stance(stance)
        loss.backward()
        optimizer.step()
        assert watches[0].state == "over"
        now: Any = torch.compiler.set_stance("default")
        assert now.prev.stance == (stance or "default")
    finally:
        before.__exit__(None, None, None)  # type: ignore[attr-defined]


def test_the_model_can_be_collected_after_the_watched_step(watches: list[Watch]) -> None:
    watch = Watch()
    watches.append(watch)
    watch.attach()
    model = _block()
    reference, parameter = weakref.ref(model), weakref.ref(model.inner.weight)
    _train(model, 2)
    del model
    gc.collect(2)
    assert reference() is None
    assert parameter() is None
    assert watch.model is None


def test_several_steps_are_watched_one_by_one(watches: list[Watch]) -> None:
    seen: list[int] = []
    watch = Watch(2, after=lambda: seen.append(len(watch.recorder.calls if watch.recorder else ())))
    watches.append(watch)
    watch.attach()
    _train(_block(), 4)
    assert [step.operators for step in watch.seen] == seen
    assert len(seen) == 2
    assert _is_clean()


def test_phases_modules_and_memory_are_seen(watches: list[Watch]) -> None:
    places: set[tuple[str, str]] = set()
    watch = Watch(after=lambda: places.update((c.phase, c.module) for c in watch.recorder.calls))  # type: ignore[union-attr]
    watches.append(watch)
    watch.attach()
    model = _block()
    _train(model, 1)
    assert {("forward", "inner"), ("forward", "outer"), ("backward", "inner"), ("optimizer", "")} <= places
    kinds = watch.seen[0].memory.phases["optimizer"]
    weights = sum(p.numel() * 4 for p in model.parameters())
    assert kinds["weights"] == weights
    assert kinds["gradients"] == weights
    assert 2 * weights <= kinds["optimizer"] <= 3 * weights  # two moments, and what the update needs


def test_masters_that_only_the_optimizer_holds_count_in_every_phase(watches: list[Watch]) -> None:
    watches.append(watch := Watch())
    watch.attach()
    model = _block()
    masters = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(masters, lr=0.1)
    model(torch.randn(4, 8)).square().mean().backward()
    for master, parameter in zip(masters, model.parameters(), strict=True):
        master.grad = parameter.grad
    optimizer.step()
    size = sum(master.numel() * 4 for master in masters)
    assert watch.seen[0].memory.phases["forward"]["optimizer"] == size


def test_what_checkpointing_computes_again_is_known_as_such(watches: list[Watch]) -> None:
    again: list[str] = []
    watch = Watch(after=lambda: again.extend(c.module for c in watch.recorder.calls if c.recomputed))  # type: ignore[union-attr]
    watches.append(watch)
    watch.attach()
    _train(_block(recompute=True), 1)
    assert "inner" in again
    assert not [module for module in again if not module]


def test_frozen_and_gradient_free_forwards_are_not_the_beginning(watches: list[Watch]) -> None:
    begun: list[Beginning] = []
    watch = Watch(before=begun.append)
    watches.append(watch)
    watch.attach()
    frozen, model = _block().requires_grad_(False), _block()
    frozen(torch.zeros(4, 8))
    with torch.no_grad():
        model(torch.zeros(4, 8))
    assert not begun
    signal = torch.zeros(4, 8)
    model(signal, scale=2.0)
    assert begun[0].model is model
    assert begun[0].inputs == {"hidden": signal, "scale": 2.0}


def test_accumulation_is_watched_once_and_the_optimizer_with_it(watches: list[Watch]) -> None:
    phases: list[str] = []
    watch = Watch(after=lambda: phases.extend(call.phase for call in watch.recorder.calls))  # type: ignore[union-attr]
    watches.append(watch)
    watch.attach()
    model = _block()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(4, 8)).mean().backward()
    assert watch.state == "watching"
    recorded = set()
    for _ in range(2):
        model(torch.ones(4, 8)).mean().backward()
        assert watch.state == "paused"
        recorded.add(len(watch.recorder.calls))  # type: ignore[union-attr]
    assert len(recorded) == 1
    optimizer.step()
    assert watch.state == "over"
    assert phases.count("optimizer") >= 4
    assert watch.notes == [
        "gradients accumulate: only the first forward and backward of each step was recorded"
    ]


def test_a_mode_of_the_script_around_a_step_survives(watches: list[Watch]) -> None:
    watch = Watch()
    watches.append(watch)
    watch.attach()
    model = _block()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with FlopCounterMode(display=False) as counter, torch.device("cpu"):
        loss = model(torch.ones(4, 8)).mean()
    assert counter.get_total_flops() == 2 * 4 * 8 * 16 * 2
    loss.backward()
    optimizer.step()
    assert watch.state == "over"
    model(torch.ones(4, 8))
    assert _is_clean()


def test_two_models_in_one_step_have_names_of_their_own(watches: list[Watch]) -> None:
    names: set[str] = set()
    watch = Watch(after=lambda: names.update(c.module for c in watch.recorder.calls))  # type: ignore[union-attr]
    watches.append(watch)
    watch.attach()
    body, head = _block(), nn.Sequential(nn.Linear(8, 2))
    optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.1)
    head(body(torch.ones(4, 8))).mean().backward()
    optimizer.step()
    assert {"inner", "outer", "Sequential.0"} <= names


def test_a_compiled_module_runs_plainly_in_the_watched_step(watches: list[Watch]) -> None:
    plain = _train(_block(), 3)
    watch = Watch()
    watches.append(watch)
    watch.attach()
    with warnings.catch_warnings(record=True) as shown:
        assert _train(torch.compile(_block(), backend="eager"), 3) == plain  # type: ignore[arg-type]
    assert not shown
    assert watch.seen[0].operators > 40
    assert watch.notes == [
        "torch.compile is off in the recorded steps: compiled code has no operators to record"
    ]


def test_a_step_inside_compiled_code_is_left_alone_and_said(watches: list[Watch]) -> None:
    watch = Watch()
    watches.append(watch)
    watch.attach()
    model = _block()
    compiled = torch.compile(lambda signal: model(signal).mean(), backend="eager", fullgraph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        compiled(torch.ones(4, 8)).backward()
        optimizer.step()
    assert not watch.seen
    assert watch.notes == ["the optimizer steps, but no module ran a forward: nothing was recorded"]
    model(torch.ones(4, 8))
    assert _is_clean()


def test_a_fake_step_of_the_script_itself_is_not_watched(watches: list[Watch]) -> None:
    watch = Watch()
    watches.append(watch)
    watch.attach()
    report = check(_block(), {"hidden": torch.zeros(4, 8)}, device="cpu", verify=False)
    assert report.complete
    assert watch.state == "waiting"


def test_a_failing_operator_is_kept_with_the_way_of_its_dtypes(watches: list[Watch]) -> None:
    watch = Watch()
    watches.append(watch)
    watch.attach()
    model = _block()
    model.outer.to(torch.bfloat16)
    with pytest.raises(RuntimeError, match="same dtype"):
        model(torch.ones(4, 8))
    watch.detach()
    assert watch.recorder is not None
    call = watch.recorder.calls[-1]
    assert (call.op, call.module, call.phase) == ("aten.addmm.default", "outer", "forward")
    assert call.breach is not None
    assert {operand.origin.cause.name for operand in call.operands} >= {"outer.weight", "outer.bias"}
    trace = watch.trace(_setup(), Failure("forward", "outer", "", "RuntimeError"))
    assert [broken.module for broken in trace.breaches()] == ["outer"]
    assert not list(watch.trace(_setup()).breaches())


def test_a_plain_tensor_that_a_module_holds_is_known_by_name(watches: list[Watch]) -> None:
    class Holding(nn.Linear):
        classes: torch.Tensor

        def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return super().forward(x) @ self.classes

    model = Holding(4, 4).to(torch.bfloat16)
    model.classes = torch.ones(4, 3)
    watch = Watch()
    watches.append(watch)
    watch.attach()
    with pytest.raises(RuntimeError, match="same dtype"):
        model(torch.ones(2, 4, dtype=torch.bfloat16))
    watch.detach()
    assert watch.recorder is not None
    origin = watch.recorder.calls[-1].operands[1].origin
    assert (origin.kind, origin.name, origin.dtype) == ("attribute", "classes", torch.float32)


def test_a_refusal_above_operators_is_kept_too(watches: list[Watch]) -> None:
    watch = Watch()
    watches.append(watch)
    watch.attach()
    model = _block()
    query = model(torch.ones(4, 8)).view(1, 1, 4, 8)
    with pytest.raises(RuntimeError, match="dtype"):
        nn.functional.scaled_dot_product_attention(query, query.bfloat16(), query)
    assert watch.recorder is not None
    assert watch.recorder.calls[-1].breach is not None
    assert "scaled_dot_product" in watch.recorder.calls[-1].op


ADJACENT = torch.eye(4)
CASTS_INSIDE: dict[str, Callable[[torch.Tensor, torch.dtype], torch.Tensor]] = {
    "sparse": lambda x, dtype: torch.sparse.mm(ADJACENT.to(dtype).to_sparse(), x),
    "roll": lambda x, _: x.roll(1, 0),
    "roll of all": lambda x, _: x.roll(1),
    "exponential": lambda x, _: torch.linalg.matrix_exp(x),
    "pseudoinverse": lambda x, _: torch.linalg.pinv(x),
}


def _step(function: Callable[..., torch.Tensor], x: torch.Tensor, other: torch.dtype) -> list[Any]:
    x = x.clone().requires_grad_()
    ends: list[Any] = []
    try:
        with torch.autocast("cpu", torch.bfloat16):
            result = function(x, other)
        ends += [result.dtype, result.detach().clone()]
        result.float().sum().backward()  # type: ignore[no-untyped-call]
        ends += [x.grad]
    except RuntimeError as error:
        ends += [str(error)]
    return ends


def _live() -> ExitStack:
    with ExitStack() as modes:
        modes.enter_context(recorder := LiveRecorder("cpu"))
        modes.enter_context(LiveFunctions(recorder))
        return modes.pop_all()


MODES: dict[str, Callable[[], Any]] = {
    "recorder": _live,
    "search for NaN": lambda: FirstNonFinite(nn.Linear(1, 1), stop=False),
    "averages": lambda: Averages(lambda _: None),
    "ranges": RangeRecorder,
}


@pytest.mark.real_cpu
@pytest.mark.parametrize(
    ("function", "modes"),
    [
        (function, modes)
        for function in CASTS_INSIDE
        for modes in (*((mode,) for mode in MODES), ("averages", "recorder"))
        if (function, *modes) != ("sparse", "ranges")  # the recorder of ranges reads dense tensors only
    ],
)
def test_kernels_that_cast_inside_run_as_without_a_recorder(function: str, modes: tuple[str, ...]) -> None:
    random = torch.Generator().manual_seed(0)
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    for dtype, other in itertools.product(dtypes, dtypes):
        x = torch.randn(4, 4, generator=random).to(dtype)
        expected = _step(CASTS_INSIDE[function], x, other)
        with ExitStack() as active:
            for mode in modes:
                active.enter_context(MODES[mode]())
            ends = _step(CASTS_INSIDE[function], x, other)
        assert repr(ends) == repr(expected), (dtype, other)


def test_a_fault_of_the_bookkeeping_does_not_reach_the_script(
    watches: list[Watch], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise KeyError("a bug of ours")

    plain = _train(_block(), 3)
    monkeypatch.setattr("isotype.trace.ledger.Ledger.count", broken)
    watch = Watch()
    watches.append(watch)
    watch.attach()
    assert _train(_block(), 3) == plain
    assert watch.notes == ["the recording stopped early: KeyError: 'a bug of ours'"]
    assert _is_clean()


def test_a_process_forked_off_is_not_recorded(watches: list[Watch]) -> None:
    watch = Watch()
    watches.append(watch)
    watch.attach()
    _block()(torch.ones(4, 8))
    recorder = watch.recorder
    assert recorder is not None
    before = len(recorder.calls)
    child = os.fork()
    if not child:
        torch.ones(1).add(1)
        os._exit(0 if len(recorder.calls) == before else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    torch.ones(1).add(1)
    assert len(recorder.calls) > before


def test_a_sparse_gradient_is_no_fault_of_the_script(watches: list[Watch]) -> None:
    watch = Watch()
    watches.append(watch)
    watch.attach()
    model = nn.Embedding(8, 4, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.tensor([1, 2])).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert watch.state == "over"
    assert _is_clean()


# ------------------------------------------------------------------------------------------------- small parts


class Seeing(TorchDispatchMode):
    """Counts operators."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_modes_go_under_those_of_the_script_and_come_out_from_anywhere() -> None:
    theirs, ours, one = Seeing(), Seeing(), torch.ones(1)
    with theirs:
        put_under(ours)
        one.add(1)
    assert (theirs.count, ours.count) == (1, 1)
    one.add(1)
    with no_modes():
        one.add(1)
    assert (theirs.count, ours.count) == (1, 2)
    with theirs:
        take_out(ours)
        take_out(ours)
        one.add(1)
    assert (theirs.count, ours.count) == (2, 2)
    assert _is_clean()


def test_the_default_device_can_be_changed_under_our_modes() -> None:
    ours = LiveFunctions(LiveRecorder("cpu"))
    try:
        torch.set_default_device("cpu")
        put_under(ours)
        torch.set_default_device("meta")
        assert torch.ones(1).is_meta
    finally:
        take_out(ours)
        torch.set_default_device(None)
    assert not torch.ones(1).is_meta
    assert _is_clean()


def test_real_tensors_are_not_simulated() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    assert not is_simulated()
    with FakeTensorMode():
        assert is_simulated()


class Unnamed(nn.Module):
    def forward(self, first: int, /, *rest: int, **more: int) -> None: ...


def test_inputs_have_names_where_a_call_by_name_is_the_same() -> None:
    assert named_inputs(_block(), (1,), {"scale": 2}) == {"hidden": 1, "scale": 2}
    assert named_inputs(_block(), (), {"hidden": 1}) == {"hidden": 1}
    assert named_inputs(nn.Sequential(), (1,), {}) == {"input": 1}
    assert named_inputs(Unnamed(), (1,), {}) == {"argument 0": 1}
    assert list(named_inputs(_block(), (1, 2, 3), {})) == ["argument 0", "argument 1", "argument 2"]


# ------------------------------------------------------------------------------------------------- measurement


@pytest.mark.parametrize("recompute", [False, True])
def test_a_measured_peak_is_what_the_preflight_foresees(recompute: bool) -> None:
    model, signal = _block(recompute=recompute), torch.randn(64, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    foreseen = check(model, {"hidden": signal}, device="cpu", verify=False).memory

    def step() -> None:
        loss = model(signal).mean()
        loss.backward()
        del loss
        optimizer.step()
        optimizer.zero_grad()

    with measure_step(model, {"hidden": signal}) as measured:
        step()
        step()  # beside the states of the optimizer
    assert measured.memory.peak == pytest.approx(foreseen.peak, rel=0.05)
    assert measured.memory.peak_phase == foreseen.peak_phase
    assert len(measured.calls) > 40
    assert _is_clean()
    assert not model._forward_hooks
    assert not model.inner._forward_hooks


def test_a_measurement_with_a_fault_is_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _block()

    def step() -> None:
        with measure_step(model):
            monkeypatch.setattr("isotype.trace.ledger.Ledger.count", lambda *_: 1 / 0)
            model(torch.ones(4, 8))

    with pytest.raises(
        RuntimeError, match="could not be measured to its end: ZeroDivisionError: division by zero"
    ):
        step()
    assert _is_clean()


def test_an_input_in_a_tuple_is_named_by_its_position() -> None:
    recorder, state = LiveRecorder("cpu"), torch.ones(2)
    recorder.mark_inputs({"states": (torch.zeros(2), state)})
    assert (recorder.origin(state).kind, recorder.origin(state).name) == ("input", "states[1]")
    recorder.forget()

"""The recorder's records, the callbacks that get them, and the memory meters."""

from __future__ import annotations

import io
import re
import sys
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from rich.console import Console

from isotype.core.errors import SaveError, TrainingError
from isotype.report.run.record import EvalRecord, StepRecord
from isotype.train.callback import PrecisionCallback
from isotype.train.monitor import meter as steps
from isotype.train.monitor.meter import SAMPLING_SECONDS, Step, StepMeter, memory_meter
from isotype.train.monitor.progress import ProgressView
from isotype.train.monitor.recorder import PeriodicReport, RunRecorder
from tests.pairwise import few, pairwise
from tests.train.test_trainer import build
from tests.train.tiny import save_chat_model


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("model"))


def recorded(
    trainer: Any, resume: Path | None = None
) -> tuple[RunRecorder, list[tuple[int, int, int | None]]]:
    told: list[tuple[int, int, int | None]] = []

    def tell(step: int, total: int, record: StepRecord | None) -> None:
        told.append((step, total, record.step if record else None))

    view: Any = SimpleNamespace(update=tell, evaluated=lambda held: None, logged=lambda step: None)
    recorder = RunRecorder(trainer, view)
    trainer.add_callback(recorder)
    trainer.train(resume_from_checkpoint=str(resume) if resume else None)
    return recorder, told


def test_progress_begins_where_the_run_does(path: Path, tmp_path: Path):
    first, told = recorded(build(path, tmp_path, max_steps=2))
    assert told == [(0, 2, None), (1, 2, 1), (2, 2, 2)]
    assert first.resumed_from is None

    trainer = build(path, tmp_path, max_steps=4, eval_strategy="steps", eval_steps=4)
    second, told = recorded(trainer, tmp_path / "checkpoint-2")
    assert told == [(2, 4, None), (3, 4, 3), (4, 4, 4)]
    assert second.resumed_from == 2
    logged = [e for e in trainer.state.log_history if "loss" in e and e["step"] > 2]
    assert [(s.step, s.loss, s.grad_norm, s.learning_rate) for s in second.steps] == [
        (e["step"], e["loss"], e["grad_norm"], e["learning_rate"]) for e in logged
    ]
    assert all(step.seconds > 0 and step.memory_bytes > 2**20 for step in second.steps)
    held = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    assert [(e.step, e.loss) for e in second.evals] == [(e["step"], e["eval_loss"]) for e in held]


class Alone:
    """A trainer with the members that meter and recorder use; every micro-batch has a loss of 1 and eight tokens."""

    def __init__(self, state: Any = None, scale: float | None = None, norm: float = 1.0, **args: Any) -> None:
        scaler = (
            None if scale is None else SimpleNamespace(is_enabled=lambda: True, _scale=torch.tensor(scale))
        )
        self.accelerator: Any = SimpleNamespace(
            num_processes=1, optimizer_step_was_skipped=False, scaler=scaler
        )
        self.args = SimpleNamespace(device=torch.device("cpu"), **args)
        self.model = SimpleNamespace(training=True)
        self.state, self.norm, self.train_dataset = state, norm, ()
        self.steps = StepMeter(self, True, SimpleNamespace(restart=lambda: None, peak=lambda: 5))

    def training_step(self, inputs: Any) -> torch.Tensor:
        return self.compute_loss(self.model, inputs)

    def compute_loss(self, model: Any, inputs: Any) -> torch.Tensor:
        return torch.tensor(1.0)

    def _get_grad_norm(self) -> float:
        return self.norm

    def last_checkpoint(self) -> None:
        return None

    def step(self) -> None:
        """Run one micro-batch, and compute the norm of its gradients."""
        self.steps.attach()
        self.training_step({"input_ids": torch.zeros(2, 4)})
        self._get_grad_norm()
        self.steps.detach()


def test_only_the_first_process_shows_progress_but_every_one_measures():
    state = transformers.TrainerState(global_step=0, max_steps=3, is_world_process_zero=False)
    trainer: Any = Alone(state)
    told: list[tuple[Any, ...]] = []
    view: Any = SimpleNamespace(update=lambda *progress: told.append(progress))
    recorder = RunRecorder(trainer, view)
    recorder.on_train_begin(None, state, None)
    recorder.on_step_begin(None, state, None, lr_scheduler=SimpleNamespace(get_last_lr=lambda: [0.5]))
    trainer.step()
    state.global_step = 1
    recorder.on_step_end(None, state, None)
    assert told == []
    assert [(s.step, s.tokens, s.loss, s.learning_rate, s.memory_bytes) for s in recorder.steps] == [
        (1, 8, 1.0, 0.5, 5)
    ]


def test_the_peak_of_the_process_is_seen_after_it_has_passed():
    size = 200 * 2**20
    with memory_meter(torch.device("cpu")) as meter:
        meter.restart()
        before = meter.peak()
        held = bytearray(b"\1") * size
        time.sleep(5 * SAMPLING_SECONDS)
        del held
        assert meter.peak() - before > 0.9 * size
        meter.restart()
        assert meter.peak() - before < 0.5 * size
    assert "isotype-memory" not in {thread.name for thread in threading.enumerate()}


def test_a_run_that_fails_leaves_no_thread(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def broken(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no gradients today")

    trainer = build(path, tmp_path, max_steps=1)
    monkeypatch.setattr(trainer.accelerator, "backward", broken)
    with pytest.raises(RuntimeError, match="no gradients today"):
        trainer.train()
    assert "isotype-memory" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_peak_of_a_gpu_is_torchs_own():
    size = 64 * 2**20
    with memory_meter(torch.device("cuda")) as meter:
        before = torch.cuda.memory_allocated()
        meter.restart()
        held = torch.empty(size, dtype=torch.uint8, device="cuda")
        del held
        assert meter.peak() == before + size
        meter.restart()
        assert meter.peak() == before


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_bar_starts_where_the_run_does_and_messages_go_above_it(width: int):
    terminal = io.StringIO()
    console = Console(file=terminal, force_terminal=True, width=width, color_system=None)
    record = StepRecord(41, 2.5, 1e-3, 1.0, 1200, 0.5, 1, None, False)
    with ProgressView(console) as view:
        view.update(40, 300, None)
        view._bar.refresh()
        view.update(41, 300, record)
        view.logged(record)  # of a run without rewards
        console.print("a message")
        view._bar.refresh()
    lines = re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", terminal.getvalue()))
    shown = [line for line in lines if line.startswith("step")]
    assert shown[0].startswith("step  40/300 ")
    assert "/?" not in terminal.getvalue()
    assert re.fullmatch(r"step  41/300 .*loss 2\.5000 +2,400 tokens/s (0:00:00 )?left [-:0-9]+ *", shown[-1])
    assert max(map(len, lines)) <= width - 3
    assert "a message" in [line.strip() for line in lines]


@pytest.mark.parametrize(
    ("width", "shown"), [(60, ""), (80, r"  reward 0\.250"), (100, r"  reward 0\.250 ± 0\.433")]
)
def test_the_bar_shows_the_last_rewards(width: int, shown: str):
    terminal = io.StringIO()
    console = Console(file=terminal, force_terminal=True, width=width, color_system=None)
    metrics = (("reward", 0.25), ("reward_std", 0.433), ("frac_reward_zero_std", 0.5))
    record = StepRecord(41, 0.0, 1e-3, 1.0, 1200, 0.5, 1, None, False, metrics)
    with ProgressView(console) as view:
        view.update(40, 300, None)
        view.logged(record)
        view.update(41, 300, record)
        view._bar.refresh()
    last = re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", terminal.getvalue()))[-2]
    assert re.fullmatch(
        rf"step  41/300 .*loss 0\.0000{shown} +2,400 tokens/s (0:00:00 )?left [-:0-9]+ *", last
    )


def test_without_a_terminal_it_is_a_line_every_few_steps_with_everything_in_it():
    text = io.StringIO()
    with ProgressView(Console(file=text, width=80), every=2) as view:
        for step in range(1, 6):
            seconds = 9.0 if step == 1 else 1.0  # the first one builds what the others use
            view.update(step, 5, StepRecord(step, 2.5, 1e-3, 1.25, 1200, seconds, 1, None, step == 4))
        view.evaluated(EvalRecord(5, 1.5))
    assert text.getvalue().splitlines() == [
        "step 2/5  loss 2.5000  lr 1.00e-03  grad norm 1.25  1,200 tokens/s  3 s left",
        "step 4/5  loss 2.5000 (skipped: overflow)  lr 1.00e-03  grad norm 1.25  1,200 tokens/s  1 s left",
        "step 5/5  loss 2.5000  lr 1.00e-03  grad norm 1.25  1,200 tokens/s",
        "step 5  held-back loss 1.5000",
    ]


def test_the_report_is_kept_now_and_then_at_little_cost(monkeypatch: pytest.MonkeyPatch):
    clock, written = [0.0], []
    monkeypatch.setattr("isotype.train.monitor.recorder.time.perf_counter", lambda: clock[0])

    def write() -> None:
        written.append(clock[0])
        clock[0] += 0.5
        if len(written) == 2:
            raise SaveError("the run report could not be written")

    keep, state = PeriodicReport(write), SimpleNamespace(is_world_process_zero=True)
    for second in range(300):
        clock[0] = max(clock[0], float(second))
        keep.on_step_end(None, state, None)
    # After half a second of writing come fifty without.
    assert written == [10.0, 60.0, 110.0, 160.0, 210.0, 260.0]


@pytest.mark.parametrize(("scaled", "stops"), [(True, False), (False, True)])
def test_a_gradient_that_is_not_finite_is_ordinary_under_a_scaler_alone(scaled, stops):
    scale = 65536.0 if scaled else None
    given = {"fp16": scaled, "learning_rate": 1e-3, "warmup_steps": 0, "max_grad_norm": 1.0}
    trainer = Alone(scale=scale, norm=float("inf"), **given)
    recorder = RunRecorder(trainer)
    trainer.steps.begin(5)
    trainer.step()
    if not stops:
        recorder.on_pre_optimizer_step(trainer.args, None, None, optimizer=None)
        return
    with pytest.raises(TrainingError, match="step 5: loss 1, learning rate 0, gradient norm inf") as caught:
        recorder.on_pre_optimizer_step(trainer.args, None, None, optimizer=None)
    assert "the gradient is not finite" in str(caught.value)
    assert "--save_steps N" in str(caught.value)


class Reads:
    """Record by file the calls of isotype's code in which the host waits for a tensor's values."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.by_file: Counter[str] = Counter()
        for name in ("item", "tolist", "cpu", "numpy", "__float__", "__int__", "__bool__"):
            method = getattr(torch.Tensor, name)
            monkeypatch.setattr(torch.Tensor, name, self._counted(method))

    def _counted(self, method: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            frame = sys._getframe(1)
            while "/torch/" in frame.f_code.co_filename and frame.f_back is not None:
                frame = frame.f_back
            if "/isotype/" in frame.f_code.co_filename:
                self.by_file[Path(frame.f_code.co_filename).stem] += 1
            return method(*args, **kwargs)

        return counted


@few("scaled, deferred", [(False, False), (True, False), (False, True)], (True, False), (False, True))
def test_the_host_waits_once_a_step(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scaled: bool, deferred: bool
) -> None:
    """The host waits at most once; if the optimizer skips updates itself, it waits for the values of the previous step."""
    monkeypatch.setattr(steps, "DEFERRED_ON", ("cpu",) if deferred else ("cuda",))
    trainer = build(path, tmp_path, max_steps=3, save_strategy="no", logging_steps=50)
    if scaled:
        trainer.accelerator.scaler = torch.amp.GradScaler("cpu")
        trainer.accelerator.native_amp = True
    reads: list[Counter[str]] = []

    class Steps(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            reads.append(Counter())
            counted.by_file = reads[-1]

    policy = trainer.model.precision_policy
    policy = replace(policy, compute=torch.float16, loss_scaling=True) if scaled else policy
    keeper = PrecisionCallback(policy, check=None)
    monkeypatch.setattr(keeper, "on_train_begin", lambda *_, **__: setattr(keeper, "_meter", trainer.steps))
    for name in ("on_train_end", "on_save", "on_step_end"):
        setattr(keeper, name, lambda *_, **__: None)
    trainer.add_callback(Steps())
    trainer.add_callback(keeper)
    counted = Reads(monkeypatch)
    recorder, _ = recorded(trainer)
    assert [step.loss_scale for step in recorder.steps] == ([65536.0] * 3 if scaled else [None] * 3)
    # What is read of the last step's end and of the training's is not counted: saving and looking at weights.
    assert [step["meter"] for step in reads[:-1]] == ([0, 1] if deferred else [1, 1])
    assert all(set(step) <= {"meter"} for step in reads[:-1])


class Poison(transformers.TrainerCallback):  # type: ignore[misc]
    """Make the loss of one step infinite, and store the weights and the optimizer's state before each step."""

    def __init__(self, trainer: Any, step: int) -> None:
        self.before: list[list[torch.Tensor]] = []
        self._trainer, self._step, self._loss = trainer, step, trainer.compute_loss

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.before.append(held(self._trainer))
        bad = state.global_step + 1 == self._step
        self._trainer.compute_loss = self._infinite if bad else self._loss

    def _infinite(self, *args: Any, **kwargs: Any) -> Any:
        return self._loss(*args, **kwargs) / 0.0


def held(trainer: Any) -> list[torch.Tensor]:
    """Return copies of the trained weights and the optimizer's state."""
    optimizer = trainer.optimizer.optimizer
    state = [value for each in optimizer.state.values() for value in each.values()]
    return [
        value.detach().clone() for group in optimizer.param_groups for value in (*group["params"], *state)
    ]


@pairwise("kind, last", ["adamw_torch_fused", "adamw_torch"], [2, 4], strength=1)
def test_an_update_that_is_not_finite_is_left_out_where_the_read_comes_later(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, last: int
) -> None:
    """Step 2 of 4, after which step 3 has run, and step 2 of 2: weights and moments stay as before the step."""
    monkeypatch.setattr(steps, "DEFERRED_ON", ("cpu",))
    trainer = build(path, tmp_path, max_steps=last, save_strategy="no", logging_steps=50, optim=kind)
    recorder = RunRecorder(trainer)
    trainer.add_callback(recorder)
    poison = Poison(trainer, 2)
    trainer.add_callback(poison)
    with pytest.raises(TrainingError, match="step 2: loss inf") as caught:
        trainer.train()
    assert "the loss is not finite: stopped before the update" in str(caught.value)
    assert [(step.step, step.loss == float("inf")) for step in recorder.steps] == [(1, False), (2, True)]
    deferred = kind == "adamw_torch_fused" and last == 4
    assert len(poison.before) == (3 if deferred else 2)
    for before, after in zip(poison.before[1], held(trainer), strict=True):
        assert torch.equal(before, after)
    assert not hasattr(trainer.optimizer.optimizer, "found_inf")


def test_nothing_of_the_last_batch_is_kept_when_the_training_is_over(path: Path, tmp_path: Path) -> None:
    trainer = build(path, tmp_path, max_steps=1, save_strategy="no")
    recorded(trainer)
    assert trainer.steps.now.batches == []
    assert not {"training_step", "compute_loss", "_get_grad_norm"} & set(vars(trainer))


def test_steps_are_recorded_alike_whenever_they_are_read(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records, weights, shown = [], [], []
    for place, kinds in enumerate((("cuda",), ("cpu",))):
        monkeypatch.setattr(steps, "DEFERRED_ON", kinds)
        trainer = build(
            path,
            tmp_path / str(place),
            max_steps=4,
            save_steps=3,
            logging_steps=2,
            eval_strategy="steps",
            eval_steps=3,
        )
        recorder, told = recorded(trainer)
        records.append([replace(step, seconds=0, memory_bytes=0) for step in recorder.steps])
        weights.append(held(trainer))
        shown.append(told)
        assert [record.step for record in recorder.evals] == [3, 4]
    assert records[0] == records[1]
    assert [record.step for record in records[0]] == [1, 2, 3, 4]
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))
    assert shown[0] == shown[1] == [(0, 4, None), (1, 4, 1), (2, 4, 2), (3, 4, 3), (4, 4, 4)]


@pytest.mark.parametrize("kind", ["adamw_torch_fused", "adamw_torch", "sgd"])
def test_whose_update_is_left_out_on_the_device(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    cpu, weight = torch.device("cpu"), torch.nn.Parameter(torch.ones(3))
    optimizer = {
        "adamw_torch_fused": lambda: torch.optim.AdamW([weight], fused=True),
        "adamw_torch": lambda: torch.optim.AdamW([weight]),
        "sgd": lambda: torch.optim.SGD([weight], fused=True),
    }[kind]()
    wrapped = SimpleNamespace(optimizer=optimizer)
    alone = SimpleNamespace(scaler=None, num_processes=1)
    assert steps.skipping_optimizer(wrapped, alone, cpu) is None
    monkeypatch.setattr(steps, "DEFERRED_ON", ("cpu",))
    able = kind == "adamw_torch_fused"
    assert steps.skipping_optimizer(wrapped, alone, cpu) is (optimizer if able else None)
    several, scaled = (
        SimpleNamespace(**{**vars(alone), **more}) for more in ({"num_processes": 2}, {"scaler": 1})
    )
    assert steps.skipping_optimizer(wrapped, several, cpu) is None
    assert steps.skipping_optimizer(wrapped, scaled, cpu) is None


def test_processes_bring_their_wish_to_stop_with_the_values_of_a_step() -> None:
    reduced: list[list[float]] = []

    def reduce(values: torch.Tensor, reduction: str) -> torch.Tensor:
        assert reduction == "sum"
        reduced.append(values.tolist())
        return values + torch.tensor([30.0, 3.0, 1.0])  # the other process: 30 tokens, a loss of 3, a signal

    asked: list[int] = []
    trainer = Alone(norm=3.0)
    trainer.accelerator = SimpleNamespace(num_processes=2, reduce=reduce, scaler=None)
    trainer.steps = StepMeter(trainer, True, signals=asked)
    trainer.step()
    step = trainer.steps.read()
    assert (step.tokens, step.loss, step.grad_norm, step.scale, step.stops) == (38, 2.0, 3.0, None, 1)
    assert trainer.steps.read() is step
    assert reduced == [[8.0, 1.0, 0.0]]
    asked.append(2)
    trainer.steps.begin(2)
    trainer.step()
    assert trainer.steps.read().stops == 2
    assert reduced[-1] == [8.0, 1.0, 1.0]


@pytest.mark.parametrize("norm", [2.0, float("nan")])
def test_processes_of_a_script_wait_for_each_other_only_where_the_norm_is_not_finite(norm: float) -> None:
    reduced: list[float] = []

    def reduce(loss: torch.Tensor, reduction: str) -> torch.Tensor:
        assert reduction == "mean"
        reduced.append(loss.item())
        return loss + 4.0

    trainer = Alone(norm=norm)
    trainer.accelerator = SimpleNamespace(num_processes=2, reduce=reduce, scaler=None)
    trainer.steps = StepMeter(trainer)
    trainer.step()
    finite = norm == 2.0
    assert trainer.steps.read().loss == (0.0 if finite else 5.0)
    assert reduced == ([] if finite else [1.0])


@pytest.mark.parametrize("readable", [True, False])
def test_a_step_that_waits_to_be_read_when_a_run_fails_is_in_the_report_or_said_to_be_missing(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, readable: bool
) -> None:
    monkeypatch.setattr(steps, "DEFERRED_ON", ("cpu",))
    trainer = build(path, tmp_path, max_steps=3, save_strategy="no", logging_steps=50)
    recorder = RunRecorder(trainer)

    class Fails(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 2:
                raise RuntimeError("CUDA error: unspecified launch failure\nCompile with …")

    trainer.add_callback(recorder)
    trainer.add_callback(Fails())
    with pytest.raises(RuntimeError, match="launch failure") as caught:
        trainer.train()
    assert [step.step for step in recorder.steps] == [1]
    if not readable:

        def lost(_: Any) -> None:
            raise caught.value

        monkeypatch.setattr(Step, "read", lost)
    missing = recorder.record_unread()
    assert recorder.record_unread() == ""
    if readable:
        assert (missing, [step.step for step in recorder.steps]) == ("", [1, 2])
        assert 0 < recorder.steps[1].loss < 100
    else:
        assert [step.step for step in recorder.steps] == [1]
        assert missing == (
            "step 2 is not in the report: its loss cannot be read from the device (CUDA error: unspecified launch failure)"
        )

"""Ctrl-C, SIGTERM and SIGHUP, once and twice, while training, saving and loading: real signals to real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from isotype.compat.interrupt import stop_signals, terminate
from isotype.train import training
from isotype.train.command.command import Command
from isotype.train.command.parse import parse_command
from isotype.train.output.resume import resume_command
from isotype.train.output.saving import Hooks
from isotype.train.signals import graceful_stop
from tests.pairwise import few
from tests.processes import run_module
from tests.train.tiny import arguments, rows, save_chat_model, save_rows

ROOT = Path(__file__).parents[2]
STOPPING = "\nstopping after this step and saving a checkpoint; a second signal stops at once\n"


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("interrupts")
    save_chat_model(root / "model")
    items = [item for item in request.session.items if item.path == request.path]
    short = not any(item.get_closest_marker("exhaustive") for item in items)
    done = run_module("tests.train.interrupts", root, *["few"] * short)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout) | {"root": str(root)}


@pytest.mark.slow
@few("name", ["once", "terminated", "hangup"], "once")
def test_one_signal_ends_the_step_and_saves(found: dict[str, Any], name: str):
    run = found[name]
    assert run["status"] == {"once": 130, "terminated": 143, "hangup": 129}[name]
    assert run["printed"].count(STOPPING) == 1  # the data loader's worker says nothing
    assert "Traceback" not in run["printed"]
    (checkpoint,) = run["whole"]
    assert int(checkpoint.removeprefix("checkpoint-")) >= 6
    path = f"{found['root']}/{name}/{checkpoint}"
    assert (
        f"\nstopped; the checkpoint {path} is complete. Resume with:\n    isotype sft --model"
        in run["printed"]
    )
    assert run["printed"].endswith(f" --resume_from_checkpoint {path}\n")
    assert (run["hidden"], run["adapter"], run["report"]) == ([], False, True)


@pytest.mark.slow
@pytest.mark.lacking(None if Path("/dev/full").exists() else "there is no /dev/full")
def test_a_log_on_a_full_disk_ends_no_training(found: dict[str, Any]):
    run = found["full"]
    assert (run["status"], run["adapter"], run["report"]) == (0, True, True)
    record = json.loads((Path(found["root"]) / "full" / "run_report.json").read_text())
    assert (record["status"], len(record["steps"])) == ("finished", 4)
    streams = ("standard output", "standard error")
    assert set(record["notes"]) & {
        f"{name} could not be written: No space left on device" for name in streams
    }


@pytest.mark.slow
def test_the_command_that_is_printed_goes_on(found: dict[str, Any]):
    run, before = found["command"], found["once"]
    (checkpoint,) = before["whole"]
    step = int(checkpoint.removeprefix("checkpoint-"))
    printed = run["printed"].removeprefix(before["printed"])
    assert run["status"] == 0, printed
    assert f"resuming from {found['root']}/once/{checkpoint}\n" in printed
    note = f"note: --max_steps {step + 5} instead of 400: the linear schedule continues with the new length"
    assert f"{note} step {step + 1}/{step + 5} " in " ".join(printed.split())  # however wide the terminal is
    assert run["whole"] == [checkpoint, f"checkpoint-{step + 5}"]
    assert run["adapter"]


@pytest.mark.slow
@few("name, every", {"twice": ("twice", 3), "while-saving": ("while-saving", 1)}, "while-saving")
def test_two_signals_stop_at_once_and_the_last_checkpoint_is_whole(
    found: dict[str, Any], name: str, every: int
):
    run = found[name]
    assert run["status"] == 130, run["printed"][-2000:]
    assert "Traceback" not in run["printed"]
    last = run["whole"][-1]
    assert max(run["before"], run["steps"] - every) <= int(last.removeprefix("checkpoint-")) <= run["steps"]
    assert 0 < run["steps"] < 400
    assert (
        f"\nstopped; the checkpoint {found['root']}/{name}/{last} is complete. Resume with:\n"
        in run["printed"]
    )
    assert (run["hidden"], run["adapter"], run["report"]) == ([], False, True)


@pytest.mark.slow
@few("name", ["loading-int", "loading-term"], "loading-term")
def test_a_signal_before_the_training_says_so_and_nothing_else(found: dict[str, Any], name: str):
    run = found[name]
    assert run["status"] == (143 if name == "loading-term" else 130)
    assert run["printed"].endswith("\ninterrupted\n")
    assert "Traceback" not in run["printed"]
    assert (run["whole"], run["hidden"], run["report"]) == ([], [], False)


@pytest.mark.parametrize("ignored", [False, True])
def test_nohup_lets_a_terminal_hang_up(ignored: bool):
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, signal.SIG_DFL) for number in numbers}
    if ignored:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert stop_signals() == (signal.SIGINT, signal.SIGTERM, *([] if ignored else [signal.SIGHUP]))
        with graceful_stop(Trainer(), Console(quiet=True)) as stopped:
            os.kill(os.getpid(), signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGHUP)  # a second one stops nothing at once
        assert stopped == ([] if ignored else [signal.SIGHUP])
        assert (signal.getsignal(signal.SIGHUP) is signal.SIG_IGN) == ignored
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Trainer:
    def __init__(self) -> None:
        self.callbacks: list[Any] = []
        self.accelerator = SimpleNamespace(num_processes=1)

    def add_callback(self, callback: Any) -> None:
        self.callbacks.append(callback())


def test_handlers_are_put_back_and_other_threads_and_processes_are_left_alone(
    capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
):
    # A command that ran in this process before has left its own, with which signals are ignored after a stop.
    request.addfinalizer(
        partial(signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, signal.SIG_DFL))
    )
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    trainer = Trainer()
    with graceful_stop(trainer, Console()) as stopped:
        handler = signal.getsignal(signal.SIGINT)
        assert callable(handler)
        owner = os.getpid()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "getpid", lambda: owner + 1)
            handler(signal.SIGINT, None)
        assert stopped == []
        handler(signal.SIGINT, None)
        assert stopped == [signal.SIGINT]
        with pytest.raises(KeyboardInterrupt):
            handler(signal.SIGTERM, None)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    assert capsys.readouterr().out == STOPPING

    yielded: list[object] = []

    def elsewhere() -> None:
        with graceful_stop(trainer, Console()) as stopped:
            yielded.append(stopped)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert yielded == [[]]
    assert len(trainer.callbacks) == 1


def test_a_command_that_was_stopped_says_so_whatever_comes():
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGTERM, terminate)  # as the command does
    try:
        with graceful_stop(Trainer(), Console(quiet=True)):
            pass
        assert signal.getsignal(signal.SIGTERM) is terminate
        with graceful_stop(Trainer(), Console(quiet=True)) as stopped:
            os.kill(os.getpid(), signal.SIGTERM)
        assert stopped == [signal.SIGTERM]
        os.kill(os.getpid(), signal.SIGINT)  # would raise KeyboardInterrupt here
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_an_error_that_the_second_signal_has_caused_is_that_signal(
    tmp_path: Path, request: pytest.FixtureRequest
):
    """A library may catch the exception of the signal and raise its own: the run ended as failed, with status 1."""
    for number in (
        signal.SIGINT,
        signal.SIGTERM,
    ):  # a stop leaves both ignored, also in processes that start later
        request.addfinalizer(partial(signal.signal, number, signal.getsignal(number)))

    class Raises(Trainer):
        args = SimpleNamespace(should_save=False)

        def train(self, *arguments: Any, **more: Any) -> None:
            os.kill(os.getpid(), signal.SIGINT)
            try:
                os.kill(os.getpid(), signal.SIGINT)
            except KeyboardInterrupt as interrupt:
                raise RuntimeError("a value without a shape") from interrupt

    assert training._train_and_save(Raises(), tmp_path, None, Hooks(), Console(quiet=True)) == signal.SIGINT


def test_a_signal_during_an_evaluation_or_a_save_needs_no_further_step():
    trainer = Trainer()
    with graceful_stop(trainer, Console(quiet=True)) as stopped:
        (callback,) = trainer.callbacks
        for event, saves in (("on_step_end", True), ("on_evaluate", True), ("on_save", False)):
            control = SimpleNamespace(should_save=False, should_training_stop=False)
            getattr(callback, event)(None, None, control)
            assert control == SimpleNamespace(should_save=False, should_training_stop=False)
            stopped.append(signal.SIGINT)
            getattr(callback, event)(None, None, control)
            assert control == SimpleNamespace(should_save=saves, should_training_stop=True)
            stopped.clear()


@pytest.mark.parametrize(
    ("argv", "command"),
    [
        (
            ["--max_steps", "4", "--output_dir", "my runs"],
            "isotype sft --max_steps 4 --output_dir 'my runs' --resume_from_checkpoint 'my runs/checkpoint-2'",
        ),
        (
            ["--resume_from_checkpoint", "true", "--bf16"],
            "isotype sft --bf16 --output_dir 'my runs' --resume_from_checkpoint 'my runs/checkpoint-2'",
        ),
        (
            ["--resume-from-checkpoint=true", "--bf16", "--resume_from_checkpoint", "old"],
            "isotype sft --bf16 --output_dir 'my runs' --resume_from_checkpoint 'my runs/checkpoint-2'",
        ),
    ],
)
def test_the_resume_command(argv: list[str], command: str):
    assert resume_command(given(argv), "my runs", Path("my runs/checkpoint-2")) == command


def test_the_resume_command_of_several_processes(monkeypatch: pytest.MonkeyPatch):
    command, checkpoint = given(["--bf16"]), Path("out/checkpoint-2")
    alone = resume_command(command, "my runs", checkpoint)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert (
        resume_command(command, "my runs", checkpoint)
        == f"torchrun --standalone --nproc_per_node 2 -m {alone}"
    )
    monkeypatch.setenv("FSDP_VERSION", "2")  # accelerate launch has stood for the flag
    assert "--fsdp full_shard" in resume_command(command, "my runs", checkpoint)
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert resume_command(command, "my runs", checkpoint).startswith(
        "torchrun --nnodes 2 --rdzv_backend c10d "
    )


def given(argv: list[str]) -> Command:
    return parse_command("sft", argv)[0]


_AT_IMPORT = """
import os, signal, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == moment:
            os.kill(os.getpid(), signal.SIGINT)
moment = sys.argv.pop(1)
sys.meta_path.insert(0, Finder())
from isotype.__main__ import start
sys.exit(start())
"""


@pytest.mark.parametrize(
    "module",
    [
        "isotype.cli.main",
        *(pytest.param(each, marks=pytest.mark.exhaustive) for each in ("trl", "trl.trainer.sft_trainer")),
    ],
)
def test_ctrl_c_before_the_first_step_is_one_line_and_leaves_nothing(tmp_path: Path, module: str):
    """The signal comes during the import of isotype, of the libraries, and of the trainer (while the lock is held)."""
    save_chat_model(tmp_path / "model")
    save_rows(tmp_path / "train.jsonl", rows("sft"))
    out = tmp_path / "runs" / "out"
    argv = arguments(tmp_path, "runs/out", 2) if module != "isotype.cli.main" else ["sft"]
    done = subprocess.run(
        [sys.executable, "-c", _AT_IMPORT, module, *argv],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    # CPython ends by the signal itself where code in C ran into it: shells call both 130.
    assert done.returncode in (130, -signal.SIGINT), done.stderr
    assert done.stderr.splitlines()[-1] == "interrupted"
    assert "Traceback" not in done.stderr
    assert not out.parent.exists()

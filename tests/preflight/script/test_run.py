"""`isotype run`: the script's own output and status, and what is said before, after and under a traceback."""

from __future__ import annotations

import gc
import io
import math
import os
import re
import runpy
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import isotype
from isotype.cli.run import parse, run
from isotype.core.errors import UsageError
from isotype.model.walk import living
from isotype.preflight.script.ahead import autocast_of
from isotype.preflight.script.diagnosis import Diagnosis
from isotype.preflight.script.family import Family, Options
from isotype.preflight.script.session import cleaned
from tests.processes import run_code
from tests.train.tiny import save_chat_model

SCRIPTS = Path(__file__).parents[2] / "scripts"
_NOTHING_SEEN = (
    "isotype: no training step was recorded: no module with parameters that require a gradient was called\n"
)


@pytest.fixture(autouse=True)
def _as_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lines of one width; warnings as a script has them; accelerate's state goes with the script."""
    monkeypatch.setenv("COLUMNS", "120")
    # Caches by class (`model/walk.py`) keep the classes of earlier scripts alive, and with them the scripts' variables.
    for scaler in living(torch.amp.GradScaler):
        monkeypatch.setattr(scaler, "_enabled", False)
    _forget_accelerate()  # of tests in other files
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    _forget_accelerate()


def _forget_accelerate() -> None:
    state = sys.modules.get("accelerate.state")
    if state is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()  # a script that crashes may leave it between two accumulated batches


def _run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Status, standard output and standard error of a script in this process."""
    capsys.readouterr()
    try:
        status = run(arguments, Console())
    except SystemExit as leaving:
        status = int(leaving.code or 0)
    out, err = capsys.readouterr()
    return status, out, err


def _run_source(
    capsys: pytest.CaptureFixture[str], script: Path, source: str, *arguments: str
) -> tuple[int, str, str]:
    """Write a script, and run it as `_run` does."""
    script.write_text(source)
    return _run(capsys, *arguments, str(script))


def _script(name: str, *arguments: str) -> tuple[str, ...]:
    return (str(SCRIPTS / f"{name}.py"), *arguments)


def _plain(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)


# ------------------------------------------------------------------------------------------- as python would run it


def test_output_status_and_traceback_are_those_of_python(capsys: pytest.CaptureFixture[str]) -> None:
    script = _script("raw_loop", "late")
    code = "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"
    plain, (status, out, err) = run_code(code, *script), _run(capsys, *script)
    assert status == plain.returncode == 1
    assert out == plain.stdout
    begins = f'  File "{script[0]}"'  # below it is what started the script
    assert begins + plain.stderr.partition(begins)[2] in err


def test_a_script_without_torch_runs_and_that_is_said(tmp_path: Path) -> None:
    script = tmp_path / "plain.py"
    script.write_text(
        "import sys, os\n"
        "print(__name__, sys.argv[1:], sys.path[0], 'torch' in sys.modules)\n"
        "sys.exit('a reason')\n"
    )
    done = _plain("-m", "isotype.cli.run", str(script), "--steps", "-m")
    assert done.returncode == 1
    assert done.stdout == f"__main__ ['--steps', '-m'] {tmp_path} False\n"
    assert (
        done.stderr == "isotype: no training step was recorded: the script never imported torch\na reason\n"
    )


def test_a_script_that_fails_before_it_imports_torch_names_the_error(tmp_path: Path) -> None:
    script = tmp_path / "absent.py"
    script.write_text("from unsloth import FastLanguageModel\nimport torch\n")
    done = _plain("-m", "isotype.cli.run", str(script))
    assert done.returncode == 1
    *_, error, line = done.stderr.splitlines()
    assert error == "ModuleNotFoundError: No module named 'unsloth'"
    reason = "ModuleNotFoundError ended the script before it imported torch"
    assert line == f"isotype: no training step was recorded: {reason}"


def test_an_interrupt_ends_with_130(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "stopped.py"
    script.write_text("print('begun')\nraise KeyboardInterrupt\n")
    status, out, err = _run(capsys, str(script))
    assert (status, out) == (130, "begun\n")
    assert err == (
        f'Traceback (most recent call last):\n  File "{script}", line 2, in <module>\n'
        "    raise KeyboardInterrupt\nKeyboardInterrupt\n"
    )


def test_an_error_of_another_kind_is_shown_and_not_explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "failing.py"
    script.write_text("def work():\n    return {}['absent']\n\nwork()\n")
    status, _, err = _run(capsys, str(script))
    assert status == 1
    assert err.startswith(f'Traceback (most recent call last):\n  File "{script}", line 4, in <module>\n')
    _, traceback, after = _around(err)
    assert traceback.endswith("KeyError: 'absent'")
    assert after.startswith("isotype: no training step was recorded: KeyError at ")
    assert after.endswith("/failing.py:2 ended the script first\n")


def test_a_module_runs_as_with_dash_m(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__main__.py").write_text("import sys\nprint(__spec__.name, sys.argv[1:])\n")
    monkeypatch.chdir(tmp_path)
    status, out, err = _run(capsys, "-m", "package", "--device", "x")
    assert (status, out) == (0, "package.__main__ ['--device', 'x']\n")
    assert err == _NOTHING_SEEN
    assert str(tmp_path) not in sys.path
    status, _, err = _run(capsys, "-m", "absent_module")
    assert status == 1
    assert "No module named absent_module\n" in err
    assert "Traceback" not in err


def test_a_user_s_own_excepthook_is_called(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    script = tmp_path / "hooked.py"
    script.write_text(
        "import sys\nsys.excepthook = lambda kind, error, trace: print('hook:', kind.__name__)\n1 / 0\n"
    )
    assert _run(capsys, str(script))[:2] == (1, "hook: ZeroDivisionError\n")


# ------------------------------------------------------------------------------------------------------- arguments


def test_arguments_after_the_script_are_the_script_s(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.undo()  # the time limits are those of a user
    script = tmp_path / "train.py"
    script.touch()
    path = str(script)
    defaults = Options(path, False, (), 1, None, 10.0, False)
    assert parse([path, "--steps", "3"]) == replace(defaults, arguments=("--steps", "3"))
    assert parse(["--steps", "3", "--device", "t4", "--no-preflight", path, "x"]) == Options(
        path, False, ("x",), 3, "t4", 0.0, False
    )
    assert parse(["--preflight-seconds", "2.5", path]) == replace(defaults, seconds=2.5)
    options = Options(path, False, ("x",), 2, "t4", 0.5, True)
    assert parse([*options.flags(), path, "x"]) == options
    module = replace(defaults, target="package.train", module=True, arguments=("-m",), steps=2)
    assert parse(["--steps", "2", "-m", "package.train", "-m"]) == module
    assert parse(["--", path]) == defaults


@pytest.mark.parametrize(
    ("argv", "given"),
    [
        ([], "no script"),
        (["absent.py"], "absent.py"),
        (["--steps", "0", __file__], "--steps 0"),
        (["--preflight-seconds", "-1", __file__], "--preflight-seconds -1"),
    ],
)
def test_what_cannot_be_run_is_said(argv: list[str], given: str) -> None:
    with pytest.raises(UsageError, match="nothing to run") as raised:
        parse(argv)
    assert given in str(raised.value)


@pytest.mark.parametrize(
    ("name", "command"), [("rows.jsonl", "isotype sft "), ("lora.yaml", "isotype check ")]
)
def test_a_file_of_another_command_is_not_run(tmp_path: Path, name: str, command: str) -> None:
    (tmp_path / name).write_text('{"text": "a"}\n')
    with pytest.raises(UsageError, match="a Python script") as raised:
        parse([str(tmp_path / name)])
    assert command in str(raised.value)
    assert name in str(raised.value)


# ----------------------------------------------------------------------------------------------------- the diagnosis


def test_a_healthy_raw_loop_is_watched_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = _run(capsys, *_script("raw_loop", "healthy"))
    assert status == 0
    assert out.count("loss") == 3
    assert "error[" not in err
    assert "isotype: the model returns no loss, so the loss that the script computes was not traced\n" in err
    last = err.rpartition("isotype: ")[2]  # wrapped at the width that the test sets
    assert last.startswith("step 1 watched: ")
    assert "operators" in last
    assert "; peak " in last
    assert last.replace("\n", " ").endswith("; later steps and evaluations are not included ")


def test_notes_are_in_the_last_lines(capsys: pytest.CaptureFixture[str], loop: Loop) -> None:
    """pytorch/torchtitan #3667, #2389: a router whose bfloat16 scores choose experts is a note, not a warning."""
    router = (
        "class Router(torch.nn.Linear):\n"
        "    def forward(self, x): return super().forward(x).float().softmax(-1).topk(2).values\n"
        "model = Router(8, 8).bfloat16()\noptimizer = torch.optim.SGD(model.parameters(), lr=1.0)"
    )
    script = loop(router, "model(x.bfloat16()).sum().backward(); optimizer.step()")
    status, _, err = _run(capsys, "--device", "a100", script)
    assert status == 0
    words = " ".join(err.split())
    assert "operators, no findings and 1 note; peak" in words
    assert words.endswith("isotype: note[IST806]: experts are chosen from bfloat16 scores")


@pytest.mark.parametrize("loss", ["of_script", "Loss()"], ids=["a function", "a module"])
def test_a_loss_of_the_script_is_judged_after_the_first_step(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, loss: str
) -> None:
    """The trace before the step lacks the loss, because the model returns none; the real step shows it."""
    script = tmp_path / "loop.py"
    script.write_text(
        "import torch\n"
        "class Loss(torch.nn.Module):\n"
        "    def forward(self, h): return of_script(h)\n"
        "of_script = lambda h: -torch.log(h + 1e-10).mean()\n"
        "model = torch.nn.Linear(8, 8).half()\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)\n"
        "for step in range(2):\n"
        f"    {loss}(model(torch.ones(2, 8).half()).relu()).backward()\n"
        "    optimizer.step()\n",
        encoding="utf-8",
    )
    status, _, err = _run(capsys, str(script))
    before, _, after = err.partition("isotype: after the first step:")
    assert status == 0
    assert "error" not in err
    assert "IST811" not in before
    assert after.count("warning[IST811]: an epsilon of 1e-10 is zero in float16") == 1
    assert "loop.py:4" in after


@pytest.mark.parametrize(
    ("method", "body", "traced"),
    [
        ("training_step", "return self.down(self.up(x)).mean()", True),
        ("losses", "return {'loss': self.down(self.up(x)).mean(), 'mean': x.mean()}", True),
        # Without a loss, only the part that runs first is traced before the step.
        ("forward_features", "return self.down(self.up(x))", False),
        # These calls cannot be repeated.
        ("training_step", "x = self.up(x); return self.down(x).mean()", False),
        ("train_on", "loss = self.down(self.up(x)).mean(); loss.backward(); return loss", False),
        ("train_on", "loss = self.down(self.up(x)).mean(); self.update(loss); return loss", False),
    ],
)
def test_a_method_that_computes_the_loss_is_traced_before_the_step(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, method: str, body: str, traced: bool
) -> None:
    """Lightning calls `training_step`, and other loops call a similar method."""
    status, _, err = _run_source(
        capsys,
        tmp_path / "loop.py",
        "import torch\n"
        "class Model(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.up, self.down, self.steps = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8), 0\n"
        f"    def {method}(self, x):\n"
        "        self.steps += 1\n"
        f"        {body}\n"
        "    def update(self, loss): loss.backward()\n"
        "model = Model().bfloat16()\n"
        "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)\n"
        f"loss = model.{method}(torch.ones(2, 8).bfloat16())\n"
        "loss = loss['loss'] if isinstance(loss, dict) else loss.mean()\n"
        "if model.up.weight.grad is None: loss.backward()\n"
        "optimizer.step()\n"
        "assert model.steps == 1\n",
    )
    assert status == 0, err
    assert ("the model returns no loss" not in err) == traced
    assert f"are lost in {'4 of 4' if traced else '2 of 2'} trainable parameters" in err


@pytest.mark.parametrize(
    ("unscale", "factors", "expected"),
    [
        ("", [1.0], 1),
        ("scaler.unscale_(optimizer)", [1.0], 0),
        ("", [math.inf, 1.0], 1),  # the GradScaler skips the first step
        ("", [[1.0, 1.0]], 1),  # two micro-batches
    ],
)
def test_gradients_that_are_clipped_before_they_are_unscaled(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, unscale: str, factors: list[Any], expected: int
) -> None:
    script = tmp_path / "loop.py"
    script.write_text(
        "import torch\n"
        "class Net(torch.nn.Linear):\n"
        "    def forward(self, x, labels=None):\n"
        "        return {'loss': super().forward(x).square().mean()}\n"
        "model = Net(8, 8)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)\n"
        "scaler = torch.amp.GradScaler('cpu', init_scale=8.0)\n"
        "inf = float('inf')\n"
        f"for factors in {factors}:\n"
        "    for factor in factors if isinstance(factors, list) else [factors]:\n"
        "        with torch.autocast('cpu', torch.float16):\n"
        "            loss = model(torch.ones(2, 8), torch.ones(2))['loss']\n"
        "        scaler.scale(loss * factor).backward()\n"
        f"    {unscale}\n"
        "    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
        "    scaler.step(optimizer)\n"
        "    scaler.update()\n"
        "    optimizer.zero_grad()\n",
        encoding="utf-8",
    )
    status, _, err = _run(capsys, str(script))
    assert status == 0
    assert "no step was checked" not in err
    assert (
        err.count("warning[IST308]: gradients are clipped while they are still multiplied by the loss scale")
        == expected
    )
    assert err.count("loop.py:15 runs before the gradients are unscaled") == expected


def test_a_script_whose_steps_are_all_skipped_is_told_so(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    script = tmp_path / "loop.py"
    script.write_text(
        "import torch\n"
        "model = torch.nn.Linear(8, 8)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)\n"
        "scaler = torch.amp.GradScaler('cpu')\n"
        "scaler.scale(model(torch.ones(2, 8)).mean() * float('inf')).backward()\n"
        "scaler.step(optimizer)\n",
        encoding="utf-8",
    )
    status, _, err = _run(capsys, "--no-preflight", str(script))
    assert status == 0
    assert "isotype: no real step was checked, because the optimizer took no step" in err


_LOOP = """
import copy
import torch
from torch.nn.functional import mse_loss
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
x, y, scaler = torch.ones(4, 8), torch.zeros(4, 1), torch.amp.GradScaler("cpu", init_scale=1024.0)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
BEFORE
for step in range(3):
    STEP
"""
_PLAIN_STEP = "loss = mse_loss(model(x), y); optimizer.zero_grad(); loss.backward(); optimizer.step()"
_SCALED_STEP = (
    "loss = mse_loss(model(x), y); scaler.scale(loss).backward(); scaler.step(optimizer); scaler.update()"
)


Loop = Callable[[str, str], str]


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Loop:
    """Return a function that writes the training loop with the code before it and of its step, and returns the path."""
    monkeypatch.setenv("COLUMNS", "400")

    def write(before: str, step: str) -> str:
        script = tmp_path / "loop.py"
        script.write_text(_LOOP.replace("BEFORE", before).replace("STEP", step), encoding="utf-8")
        return str(script)

    return write


@pytest.mark.parametrize(
    ("before", "step", "message", "cause"),
    [
        ("", _PLAIN_STEP, "", ""),
        (
            "from torch.optim.optimizer import register_optimizer_step_post_hook as after; hook = after(lambda *_: None)",
            f"{_PLAIN_STEP}; step < 2 or hook.remove()",
            "",
            "",
        ),
        (
            "",
            "loss = mse_loss(model(x), y); loss.backward(); optimizer.zero_grad(); optimizer.step()",
            "IST307]: the optimizer's step gets no gradient of 4 of 4 trainable parameters",
            "zero_grad() or `grad = None` runs between",
        ),
        (
            "",
            _PLAIN_STEP.replace("model(x)", "model[1](model[0](x).data)"),
            "IST307]: no gradient reaches 2 of 4 trainable parameters",
            "values that are computed with weight and others are detached at loop.py:11",
        ),
        (
            "",
            _PLAIN_STEP.replace("mse_loss(model(x), y)", "torch.tensor(mse_loss(model(x), y).item(), requires_grad=True)"),
            "IST307]: no gradient reaches 4 of 4 trainable parameters",
            "the loss is computed from detached values at loop.py:11",
        ),
        (
            "",
            _PLAIN_STEP.replace("optimizer.zero", "model[0].requires_grad_(False); optimizer.zero")
            + "; model.requires_grad_(True)",
            "IST307]: 2 parameters get no gradient: frozen before the backward",
            "the code at loop.py:11 sets requires_grad of 0.weight and others to False after the forward has used them",
        ),
        ("", f"model[0].requires_grad_(False); {_PLAIN_STEP}", "", ""),
        ("", _PLAIN_STEP.replace("optimizer.step", "model[0].requires_grad_(False); optimizer.step"), "", ""),
        (
            "model[1] = torch.nn.Linear(8, 1)",
            _PLAIN_STEP,
            "IST309]: no optimizer updates 2 of 4 trainable parameters",
            "SGD holds 2 parameters of modules that did not run with gradients",
        ),
        (
            "optimizer = torch.optim.SGD(model[0].parameters(), lr=1e-3)",
            _PLAIN_STEP,
            "IST309]: no optimizer updates 2 of 4 trainable parameters",
            "no optimizer holds 1.weight and others",
        ),
        (
            "model.gradient_checkpointing = True; model.eval()",
            _PLAIN_STEP,
            "IST309]: gradient checkpointing has no effect: the model is in eval mode",
            "the model: gradient_checkpointing is True, but training is False",
        ),
        ("model.gradient_checkpointing = True", _PLAIN_STEP, "", ""),
        (
            "optimizer = torch.optim.SGD(model[0].parameters(), 1e-3); other = torch.optim.SGD(model[1].parameters(), 1e-3)",
            f"{_PLAIN_STEP}; other.step()",
            "",
            "",
        ),
        (
            "masters = [p.detach().clone() for p in model.parameters()]; optimizer = torch.optim.SGD(masters, lr=1e-3)",
            "loss = mse_loss(model(x), y); loss.backward()\n"
            "    for master, p in zip(masters, model.parameters()): master.grad = p.grad\n"
            "    optimizer.step()",
            "",
            "",
        ),
        (
            "",
            "loss = mse_loss(model(x), y); optimizer.zero_grad(); scaler.scale(loss).backward(); optimizer.step()",
            "IST308]: SGD steps with gradients that are still multiplied by the loss scale",
            "optimizer.step() runs without scaler.unscale_(optimizer)",
        ),
        (
            "",
            "with torch.autocast('cpu', torch.float16): loss = mse_loss(model(x), y)\n"
            "    optimizer.zero_grad(); scaler.scale(loss).backward(); scaler.step(optimizer); scaler.update()",
            "",
            "",
        ),
        (
            "",
            "loss = mse_loss(model(x), y); optimizer.zero_grad(); scaler.scale(loss); loss.backward(); scaler.step(optimizer); scaler.update()",
            "IST308]: SGD steps with gradients that are divided by the loss scale, but the loss was not multiplied by it",
            "loss.backward() runs on a loss that is not the result of scaler.scale(loss)",
        ),
        (
            "",
            "out = model(x); loss = mse_loss(out, y) + torch.mean(torch.tensor([out.norm(), out.std()])) * 1000\n"
            "    optimizer.zero_grad(); (loss / 2).backward(); optimizer.step()",
            "IST307]: a term of the loss has no gradient: it changes the value of the loss, but trains nothing",
            "the term's value is detached at loop.py:11, and added to the loss at loop.py:11",
        ),
        (
            "",
            "out = model(x); extra = out.norm().detach().item()\n"
            "    loss = mse_loss(out, y) + 0.05 * extra; optimizer.zero_grad(); loss.backward(); optimizer.step()",
            "IST307]: a term of the loss has no gradient: it changes the value of the loss, but trains nothing",
            "the term's value is detached at loop.py:11, and added to the loss at loop.py:12",
        ),
        (
            "",
            "out = model(x); a, b = mse_loss(out, y), out.norm(); shown = a + b.item(); loss = a * b.detach() + (b + a.detach()).log() + 0.5\n"
            "    optimizer.zero_grad(); loss.backward(); optimizer.step()",
            "",
            "",
        ),
        (
            "",
            "out = model(x); soft = out.norm(); loss = out.round().norm().detach() + (soft - soft.detach())\n"
            "    optimizer.zero_grad(); loss.backward(); optimizer.step()",
            "",
            "",
        ),
        (
            "model.bfloat16(); x, y = x.bfloat16(), y.bfloat16(); optimizer = torch.optim.RMSprop(model[0].parameters(), 1e-7, alpha=0.0)\n"
            "model[1].requires_grad_(False)",
            _PLAIN_STEP,
            "IST801]: the step of RMSprop changes no value of 2 of 2 trainable parameters, although their gradients are not zero",
            "each update is less than half of the distance to the next number of the dtype",
        ),
        (
            "model.bfloat16(); x, y = x.bfloat16(), y.bfloat16(); optimizer = torch.optim.SGD(model.parameters(), lr=1e-7)\n"
            "warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 9)",
            f"{_PLAIN_STEP}; warmup.step()",
            "",
            "",
        ),
        (
            "scaler.scale(x.sum())",
            "loss = mse_loss(model(x), y) * scaler.get_scale(); optimizer.zero_grad(); loss.backward(); scaler.step(optimizer); scaler.update()",
            "",
            "",
        ),
        (
            "other = torch.optim.SGD(model[1].parameters(), lr=1e-3); optimizer = torch.optim.SGD(model[0].parameters(), lr=1e-3)",
            "scaler.scale(mse_loss(model(x), y)).backward(); scaler.unscale_(optimizer); scaler.unscale_(other)\n"
            "    scaler.step(optimizer); scaler.step(other); scaler.update()",
            "",
            "",
        ),
        (
            "",
            "with torch.autocast('cpu', torch.bfloat16, enabled=step == 0): loss = mse_loss(model(x), y)\n"
            "    optimizer.zero_grad(); loss.backward(); optimizer.step()",
            "IST306]: the step runs without autocast",
            "earlier steps ran under autocast to bfloat16",
        ),
        (
            "from accelerate import Accelerator; acc = Accelerator(mixed_precision='bf16', cpu=True)  # one of two nets is prepared\n"
            "critic = torch.nn.Linear(8, 1); other = torch.optim.SGD(critic.parameters(), lr=1e-3)\n"
            "model[1] = torch.nn.Linear(8, 8); optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)\n"
            "model, optimizer = acc.prepare(model, optimizer)",
            "fake = model(x); critic(fake.detach()).mean().backward(); other.step(); other.zero_grad()\n"
            "    critic(fake).mean().backward(); optimizer.step(); optimizer.zero_grad(); other.zero_grad()",
            "",
            "",
        ),
        (
            "from accelerate import Accelerator; acc = Accelerator(mixed_precision='bf16', cpu=True)\n"
            "optimizer = acc.prepare(optimizer)",
            _PLAIN_STEP,
            "IST306]: the step runs without autocast",
            "accelerate's mixed precision is bf16",
        ),
        (
            "from accelerate import Accelerator; acc = Accelerator(mixed_precision='bf16', cpu=True)\n"
            "optimizer = acc.prepare(optimizer)",
            "with acc.autocast(): loss = mse_loss(model(x), y)\n"
            "    optimizer.zero_grad(); acc.backward(loss); optimizer.step()",
            "",
            "",
        ),
        (
            "from accelerate import Accelerator; acc = Accelerator(mixed_precision='bf16', cpu=True)\n"
            "model, optimizer = acc.prepare(model, optimizer); model = acc.unwrap_model(model, keep_fp32_wrapper=False)",
            _PLAIN_STEP,
            "IST306]: the step runs without autocast",
            "accelerate's mixed precision is bf16",
        ),
        (
            "critic = torch.nn.Linear(8, 1); other = torch.optim.SGD(critic.parameters(), lr=1e-3)",
            "with torch.autocast('cpu', torch.bfloat16): loss = mse_loss(model(x), y)\n"
            "    optimizer.zero_grad(); loss.backward(); optimizer.step()\n"
            "    other.zero_grad(); mse_loss(critic(x), y).backward(); other.step()",
            "",
            "",
        ),
        (
            "critic = torch.nn.Linear(8, 1); other = torch.optim.SGD(critic.parameters(), lr=1e-3)",
            "loss, scaled = mse_loss(critic(x), y), scaler.scale(mse_loss(model(x), y)); loss.backward(); scaled.backward()\n"
            "    other.step(); other.step(); scaler.step(optimizer); scaler.update()",
            "IST308]: SGD steps twice with the same gradients",
            "no backward runs between the step at loop.py:12 and the step at loop.py:12",
        ),
        (
            "",
            f"{_SCALED_STEP}; optimizer.step()",
            "IST308]: SGD steps twice with the same gradients",
            "no backward runs between the step at loop.py:11 and the step at loop.py:11",
        ),
        (
            "optimizer = torch.optim.LBFGS(model.parameters(), max_iter=1)",
            "optimizer.step(lambda: (loss := mse_loss(model(x), y), optimizer.zero_grad(), loss.backward())[0])",
            "",
            "",
        ),
        (
            "",
            "loss = mse_loss(model(x), y); optimizer.zero_grad(); loss.backward()\n"
            "    for weight in model[1].parameters(): weight.grad = None\n"
            "    optimizer.step()",
            "",
            "",
        ),
        (
            "head = torch.nn.Linear(8, 1); optimizer.add_param_group({'params': head.parameters()})",
            "loss = mse_loss(model(x), y); print(mse_loss(head(x), y).item()); optimizer.zero_grad(); loss.backward(); optimizer.step()",
            "",
            "",
        ),
        (
            "",
            "with torch.autocast('cpu', torch.float16): loss = (model(x) * 0 + 1e-12).log().mean()\n"
            "    optimizer.zero_grad(); scaler.scale(loss).backward(); scaler.step(optimizer); scaler.update()",
            "IST811]: an epsilon of 1e-12 is zero in float16",
            "add of a float16 tensor and 1e-12 at loop.py:11",
        ),
        (
            "optimizer = torch.optim.Adam(model.parameters())  # vllm-project/speculators #899\n"
            "for p in model.parameters(): optimizer.state[p] = {'step': torch.zeros((), dtype=torch.bfloat16),"
            " 'exp_avg': torch.zeros_like(p), 'exp_avg_sq': torch.zeros_like(p)}",
            _PLAIN_STEP,
            "IST808]: a count in bfloat16 stops at 256",
            "the optimizer's step is bfloat16",
        ),
        (
            "model.bfloat16(); x, y = x.bfloat16(), y.bfloat16(); optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
            "saved = optimizer.state_dict()  # pytorch/pytorch #43706\n"
            "saved['state'] = {0: {'momentum_buffer': torch.ones(8, 8)}}; optimizer.load_state_dict(saved)",
            _PLAIN_STEP,
            "IST305]: load_state_dict has cast momentum_buffer of 1 parameter from float32 to bfloat16: their digits are lost",
            "Optimizer.load_state_dict casts the loaded states to their parameter's dtype at loop.py:11",
        ),
        (
            "saved = optimizer.state_dict(); saved['state'] = {0: {'momentum_buffer': torch.ones(8, 8)}}; optimizer.load_state_dict(saved)",
            _PLAIN_STEP,
            "",
            "",
        ),
        (
            "model.bfloat16(); x, y = x.bfloat16(), y.bfloat16(); other = torch.optim.Muon([model[0].weight], lr=0.1)\n"
            "optimizer = torch.optim.SGD([model[0].bias, *model[1].parameters()], lr=0.1)",
            f"{_PLAIN_STEP}; other.step(); other.zero_grad()  # its momentum is a bfloat16 average",
            "",
            "",
        ),
    ],
)  # fmt: skip
def test_weights_that_do_not_move(
    capsys: pytest.CaptureFixture[str], loop: Loop, before: str, step: str, message: str, cause: str
) -> None:
    status, _, err = _run(capsys, "--no-preflight", "--steps", "2", loop(before, step))
    assert status == 0
    printed = re.findall(r"(IST30[5-9].*|IST503.*|IST80[18].*|IST811.*)\n  -->.*\n   = cause  (.*)", err)
    assert [(text.startswith(message), why.startswith(cause)) for text, why in printed] == [
        (True, True)
    ] * bool(message)


@pytest.mark.parametrize("total", ["a + (b + c)", "torch.stack([a, b, c]).sum()"])
def test_every_term_without_a_gradient_is_named(
    capsys: pytest.CaptureFixture[str], loop: Loop, total: str
) -> None:
    terms = "out = model(x); a = mse_loss(out, y)\n    b = out.norm().detach()\n    c = out.std().detach()\n"
    step = f"{terms}    ({total}).backward(); optimizer.step()"
    _, _, err = _run(capsys, "--no-preflight", loop("", step))
    assert [
        f"detached at loop.py:{line}, and added to the loss at loop.py:14" in err for line in (12, 13)
    ] == [
        True,
        True,
    ]


def test_an_evaluation_with_gradients_names_what_it_holds(
    capsys: pytest.CaptureFixture[str], loop: Loop
) -> None:
    _, _, err = _run(capsys, "--no-preflight", loop("kept = []", "kept.append(model.eval()(x))"))
    assert "isotype: forwards with gradients, but no backward: peak " in err
    assert "activations" in err.partition("no backward: peak ")[2]


@pytest.mark.parametrize("around", ["", "with torch.no_grad(): "])
def test_the_forward_that_creates_lazy_parameters_is_no_step(
    capsys: pytest.CaptureFixture[str], loop: Loop, around: str
) -> None:
    lines = (
        "model[0] = torch.nn.LazyLinear(8)",
        f"{around}model(x)",
        "optimizer = torch.optim.SGD(model.parameters())",
    )
    script = loop("\n".join(lines), _PLAIN_STEP)
    status, _, err = _run(capsys, "--no-preflight", script)
    assert status == 0
    assert "steps 1-2 watched" in err  # the loop's optimizer and this one
    assert "stopped early" not in err


def test_the_step_after_an_attack_by_grad_is_recorded(capsys: pytest.CaptureFixture[str], loop: Loop) -> None:
    attack = "x.requires_grad_(); torch.autograd.grad(mse_loss(model(x), y), x); "
    _, _, err = _run(capsys, "--no-preflight", loop("", attack + _PLAIN_STEP))
    assert "gradients accumulate" not in err
    assert "gradients " in err


def test_a_script_without_an_optimizer_accumulates_no_gradients(
    capsys: pytest.CaptureFixture[str], loop: Loop
) -> None:
    _, _, err = _run(capsys, "--no-preflight", loop("del optimizer", "mse_loss(model(x), y).backward()"))
    assert "isotype: no optimizer of torch updates this model: only the first forward and backward" in err


@pytest.mark.parametrize(
    ("before", "step", "message", "cause"),
    [
        (
            "model = torch.nn.Linear(8, 1)",  # huggingface/diffusers #4733
            _SCALED_STEP,
            "IST309]: no optimizer updates 2 of 2 trainable parameters",
            "SGD holds 4 parameters of modules that did not run with gradients",
        ),
        (
            "",
            _SCALED_STEP.replace("scaler.step", "optimizer.zero_grad(); scaler.step"),
            "IST307]: the optimizer's step gets no gradient of 4 of 4 trainable parameters",
            "zero_grad() or `grad = None` runs between",
        ),
    ],
)  # fmt: skip
def test_a_scaler_that_finds_no_gradient_says_why(
    capsys: pytest.CaptureFixture[str], loop: Loop, before: str, step: str, message: str, cause: str
) -> None:
    status, _, err = _run(capsys, "--no-preflight", loop(before, step))
    assert status == 1
    assert "no parameter of this optimizer (" in err
    ((text, why),) = re.findall(r"(IST30[79].*)\n  -->.*\n   = cause  (.*)", err)
    assert text.startswith(message)
    assert why.startswith(cause)


def test_warnings_of_a_watched_step_name_the_lines_of_an_unwatched_one(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    script = tmp_path / "loop.py"
    loss = "mse_loss(model(x), y[:1]) + torch.nn.MSELoss()(model(x), y[:1]) + torch.softmax(y, 1).sum()"
    step = _PLAIN_STEP.replace("mse_loss(model(x), y)", loss).replace("torch.softmax(y, 1)", "softmax(y)")
    text = "from torch.nn.functional import softmax\n" + _LOOP.replace("BEFORE", "").replace("STEP", step)
    script.write_text(text, encoding="utf-8")

    def places(run: Callable[[], Any]) -> list[tuple[str, int]]:
        with warnings.catch_warnings(record=True) as raised:
            warnings.simplefilter("default")
            run()
        return [(warning.filename, warning.lineno) for warning in raised]

    plain = places(lambda: runpy.run_path(str(script)))
    assert len(plain) == 3
    assert places(lambda: _run(capsys, "--no-preflight", str(script))) == plain


@pytest.mark.exhaustive  # the import of transformers' kernels takes seconds
def test_layers_that_the_device_has_no_kernel_for_are_named_before_the_step(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    source = (
        "import torch\nfrom transformers.integrations.finegrained_fp8 import FP8Linear\n"
        "model = torch.nn.Sequential(torch.nn.Linear(32, 32).bfloat16(), FP8Linear(32, 16, (16, 16)).requires_grad_(False))\n"
        "model(torch.ones(4, 32, dtype=torch.bfloat16))\n"
    )
    status, _, err = _run_source(capsys, tmp_path / "fp8.py", source)
    assert status == 1
    assert "has no kernel for transformers' FP8Linear" in _around(err)[0]
    assert "FineGrainedFP8Config(dequantize=True)" in " ".join(_around(err)[0].split())


@pytest.mark.parametrize(
    ("device", "code", "sentence", "dtype"),
    [
        ("t4", "model.cuda(); x = x.to('cuda:0')", True, "float16"),
        ("t4", "x = x.to('cuda' if torch.cuda.is_available() else 'cpu')", True, "float16"),
        ("t4", "assert torch.cuda.is_available(); torch.cuda.set_device(0)", True, "float16"),
        ("t4", "GradScaler = torch.amp.GradScaler('cuda', enabled=False)", False, "float16"),  # torch asks
        ("cpu", "print(torch.cuda.is_available())", False, "float32"),
    ],
)
def test_code_for_a_gpu_runs_on_the_cpu_if_the_device_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, device: str, code: str, sentence: bool, dtype: str
) -> None:
    script = tmp_path / "loop.py"
    script.write_text(
        "import torch\nmodel, x = torch.nn.Linear(4, 4), torch.ones(2, 4)\n"
        f"{code}\noptimizer = torch.optim.SGD(model.parameters())\n"
        "with torch.autocast('cuda'): y = model(x)\ny.float().sum().backward()\noptimizer.step()\nprint(y.dtype)\n"
    )
    before = torch.cuda.is_available, torch.load, torch.get_autocast_dtype("cpu")
    status, out, err = _run(capsys, "--device", device, str(script))
    assert (status, out.splitlines()[-1]) == (0, f"torch.{dtype}")
    note = "this machine has no NVIDIA T4, so the script's GPU code runs on the CPU"
    assert (note in " ".join(err.split())) == sentence
    assert (torch.cuda.is_available, torch.load, torch.get_autocast_dtype("cpu")) == before


@pytest.mark.parametrize(
    ("code", "status", "sentence"),
    [
        (
            "model = torch.nn.Linear(4, 4).to('cuda')",
            1,
            "loop.py:2 needs a GPU, but this machine has none; with",
        ),
        (
            # Without the check, a build for CUDA answers with its device on a machine without one, too.
            "device = torch.accelerator.current_accelerator(check_available=True).type",
            1,
            "loop.py:2 needs a GPU, but this machine has none; with",
        ),
        (
            "assert torch.cuda.is_available(), 'not here'",
            1,
            "loop.py:2 needs a GPU, but this machine has none; with",
        ),
        (
            "if not torch.cuda.is_available(): raise SystemExit(2)",
            2,
            "loop.py:2 asks whether a GPU is available",
        ),
    ],
)
def test_a_script_that_needs_a_gpu_is_told_what_to_do(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, code: str, status: int, sentence: str
) -> None:
    script = tmp_path / "loop.py"
    script.write_text(f"import torch\n{code}\n")
    ended, _, err = _run(capsys, str(script))
    assert (ended, sentence in " ".join(err.split())) == (status, True)
    assert "with --device NAME (t4, h100, …), isotype runs the script's code" in " ".join(err.split())


def test_an_error_about_a_name_needs_no_gpu(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    script = tmp_path / "loop.py"
    script.write_text("import torch\nopen('/nowhere/gpu/rows.jsonl')\n")
    status, _, err = _run(capsys, str(script))
    assert (status, "rows.jsonl" in err, "needs a GPU" in err) == (1, True, False)


_F16 = "with torch.autocast('cpu', torch.float16):"


@pytest.mark.parametrize(
    ("step", "codes"),
    [
        (
            f"{_F16} z = F.normalize(model(x), eps=1e-8); loss = (z * z.roll(1, 0) / (z.max() + 1e-8)).sum()",
            [],
        ),
        (f"{_F16} z = model(x).softmax(-1); q = z @ z.T; loss = (q / (q.max() + 1e-8)).mean()", ["IST811"]),
        (f"{_F16} loss = F.binary_cross_entropy(model(x).sigmoid(), x.sigmoid())", ["IST109"]),
        (f"{_F16} z = model(x)\nloss = F.binary_cross_entropy(z.float().sigmoid(), x.sigmoid())", []),
        ("with torch.autocast(device_type='cpu'): loss = F.mse_loss(model(x), x)", ["IST303"]),
        ("with torch.autocast('cpu', dtype=torch.bfloat16): loss = F.mse_loss(model(x), x)", ["IST601"]),
        # timm's norms switch autocast off without naming a dtype.
        (
            "with torch.autocast('cpu', torch.bfloat16):\n with torch.autocast('cpu', enabled=False): y = x * 2\n"
            " loss = F.mse_loss(model(y), y)",
            ["IST601"],
        ),
        # chemprop/chemprop #780: a GPU's autocast computes `exp` in float32.
        (
            "with torch.autocast('cpu', torch.bfloat16): y = model(x); rows = torch.arange(4)[:, None].expand(4, 8)\n"
            "loss = torch.zeros(4, 8, dtype=y.dtype).scatter_reduce_(0, rows, y, 'sum').float().sum()",
            ["IST601"],
        ),
        (
            "with torch.autocast('cpu', torch.bfloat16): y = model(x); rows = torch.arange(4)[:, None].expand(4, 8); "
            "loss = torch.zeros(4, 8, dtype=y.dtype).scatter_reduce_(0, rows, y.exp(), 'sum').sum()",
            ["IST103", "IST601"],
        ),
    ],
)
def test_a_step_on_a_cpu_is_judged_by_the_autocast_of_the_device_that_is_asked_for(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, step: str, codes: list[str]
) -> None:
    script = tmp_path / "loop.py"
    script.write_text(
        "import torch\nfrom torch.nn import functional as F\nmodel, x = torch.nn.Linear(8, 8), torch.ones(4, 8)\n"
        f"optimizer = torch.optim.SGD(model.parameters())\n{step}\nloss.backward()\noptimizer.step()\n"
    )
    cycle: list[Any] = [
        torch.amp.GradScaler("cpu")
    ]  # of another script, in a reference cycle that is not collected yet
    cycle.append(cycle)
    del cycle
    status, _, err = _run(capsys, "--device", "t4", str(script))
    assert status == 0
    known = {"IST303"} if _F16 in step else set()
    assert set(re.findall(r"IST\d+", err)) == {*codes, *known}


@pytest.mark.parametrize(
    ("keeps", "says"),
    [
        ("total = total + loss", "graphs in total: memory"),
        ("losses.append(loss)", "graphs in losses: memory"),
        (
            "losses.append(loss * torch.ones(2))",
            "outputs of earlier steps are kept with their graphs in losses: memory",
        ),
        ("total = total + loss.item(); losses.append(loss.detach())", ""),
        ("total = (total + loss).detach()", ""),
        ("losses = [loss, *losses[:1]]", ""),
        ("import gc; gc.disable(); cycle = [loss]; cycle.append(cycle)", ""),
    ],
)
def test_losses_that_are_kept_with_their_graphs(
    capsys: pytest.CaptureFixture[str], loop: Loop, keeps: str, says: str
) -> None:
    script = loop("total, losses = 0, []", f"{_PLAIN_STEP}; {keeps}")
    text = Path(script).read_text()
    Path(script).write_text(re.sub(r"range\(\d+\)", "range(5)", text))
    status, _, err = _run(capsys, "--no-preflight", script)
    gc.enable()
    assert (status, "range(5)" in Path(script).read_text()) == (0, True)
    assert (says in err) if says else ("kept with their graphs" not in err)


@pytest.mark.parametrize(
    "copies",
    [
        "copy.deepcopy(model)(x)",
        "pickle.loads(pickle.dumps(model))(x)",
        "torch.compile(model, backend='eager', fullgraph=True)(x)",
        "torch.jit.script(model)(x)",
    ],
)
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_the_model_can_be_copied_and_compiled_after_a_step(
    capsys: pytest.CaptureFixture[str], loop: Loop, copies: str
) -> None:
    script = loop("import pickle", f"{_PLAIN_STEP}; {copies}")
    assert _run(capsys, "--no-preflight", script)[0] == 0


def test_a_function_between_the_steps_is_compiled_later(
    capsys: pytest.CaptureFixture[str], loop: Loop
) -> None:
    before = "graphs = []; f = torch.compile(lambda t: t + 1, backend=lambda graph, _: graphs.append(graph) or graph)"
    script = loop(before, f"{_PLAIN_STEP}; f(x); print(len(graphs))")
    status, out, err = _run(capsys, "--no-preflight", script)
    assert (status, out.split()) == (0, ["0", "1", "1"])
    assert "Dynamo" not in err


@pytest.mark.parametrize(
    ("before", "verb"),
    [
        ("model.to(torch.bfloat16)", "cast"),
        ("for p in model.parameters(): p.data = p.data.bfloat16()", "cast"),
        ("model = torch.nn.Linear(8, 1, dtype=torch.bfloat16)", "created"),
    ],
)
def test_the_line_that_set_a_weight_s_dtype_is_named(
    capsys: pytest.CaptureFixture[str], loop: Loop, before: str, verb: str
) -> None:
    script = loop(before, _PLAIN_STEP)
    line = Path(script).read_text(encoding="utf-8").splitlines().index(before) + 1
    _, _, err = _run(capsys, script)
    assert re.search(rf"note   (0\.)?bias is bfloat16, {verb} at loop\.py:{line}\n", err)


@pytest.mark.parametrize(
    ("backward", "word"),
    [
        ("(out - 9).log().mean().backward()", "NaN"),
        ("(out.sum() / 0).backward()", "infinite"),
        ("torch.autograd.backward([(out - 9).log().mean(), out.sum()])", "NaN"),
        ("torch.autograd.grad(outputs=(out - 9).log().mean(), inputs=list(model.parameters()))", "NaN"),
        ("out.mean().backward(); torch.autograd.backward((out2 - 9).log().mean())", "NaN"),
        ("scaler.scale(out.sum() / 0).backward(); scaler.step(optimizer); scaler.update()", ""),
        ("out.exp().mean().backward()", ""),
    ],
)
def test_a_first_loss_that_is_not_finite(
    capsys: pytest.CaptureFixture[str], loop: Loop, backward: str, word: str
) -> None:
    step = f"out, out2 = model(x), model(x); {backward}; optimizer.step()"
    before = torch.autograd.backward
    status, _, err = _run(capsys, "--no-preflight", loop("", step))
    assert status == 0
    assert re.findall(r"the loss of the first step is (\w+)", err) == [word] * bool(word)
    assert torch.autograd.backward is before


def test_a_broken_raw_loop_is_warned_of_and_explained(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = _run(capsys, *_script("raw_loop", "broken"))
    assert (status, out) == (1, "")
    before, traceback, after = _around(err)
    assert "error[IST101]" in before
    assert "  --> head   aten.addmm.default   forward   scripts/raw_loop.py:24" in before
    assert traceback.endswith(
        "RuntimeError: mat1 and mat2 must have the same dtype, but got Float and BFloat16"
    )
    assert str(Path(isotype.__file__).parent) not in traceback
    assert "isotype: predicted before the step:" in after
    assert "   = cause  norm.weight is float32" in after
    assert "   = note   the script stopped here" in after
    assert "verified: " in after


def test_without_a_look_ahead_the_live_recorder_explains(capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = _run(capsys, "--no-preflight", *_script("raw_loop", "broken"))
    before, _, after = _around(err)
    assert (status, before) == (1, "")
    assert "error[IST101]" in after
    assert "   = cause  norm.weight is float32" in after
    assert "embed.weight is bfloat16" in after
    assert "isotype: a trace of the step explains the error:" in after
    assert "verified: " in after
    assert "not verified" not in after
    assert "IST199" not in after


def test_the_larger_of_two_models_says_what_the_step_computes_in(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A small float32 projection runs first and feeds a bfloat16 model: the projection is mismatched, not the model."""
    source = (
        "import torch\nfrom torch import nn\n"
        "first, model = nn.Sequential(nn.Linear(4, 8)), nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 8)).bfloat16()\n"
        "model(first(torch.ones(2, 4))).sum().backward()\n"
    )
    status, _, err = _run_source(capsys, tmp_path / "two.py", source)
    assert status == 1
    assert "   = cause  0.bias is float32" in err
    assert "to float32" not in _around(err)[2]


def test_a_script_that_catches_its_crash_and_leaves_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = _run(capsys, *_script("raw_loop", "caught"))
    assert (status, out) == (7, "gave up\n")
    assert "the script stopped here" in err


def test_a_healthy_script_keeps_its_own_status(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = _run(capsys, "--no-preflight", "--steps", "2", *_script("raw_loop", "exit"))
    assert status == 3
    assert out.count("loss") == 3
    assert "isotype: steps 1-2 watched: " in err


def test_a_crash_after_the_watch_is_explained_by_a_second_look(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = _run(capsys, *_script("raw_loop", "late"))
    assert status == 1
    assert out.count("loss") == 2
    before, _, after = _around(err)
    assert "error[" not in before
    assert "isotype: a trace of the script's last known step explains the error:" in after
    assert "error[IST101]" in after


def test_a_crash_after_a_step_that_a_later_cast_broke_for_another_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The trace of the step finds float32 with bfloat16, but the script stopped at float32 with float16."""
    source = (
        "import torch\nmodel = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)).bfloat16()\n"
        "optimizer, x = torch.optim.SGD(model.parameters()), torch.ones(2, 4, dtype=torch.bfloat16)\n"
        "model(x).sum().backward(); optimizer.step(); model[1].float()\n"
        "input, weight = torch.ones(2, 4, dtype=torch.float16), torch.ones(4, 4)\n"
        "torch.nn.functional.linear(input, weight)\n"
    )
    status, _, err = _run_source(capsys, tmp_path / "other.py", source)
    assert status == 1
    _, _, after = _around(err)
    assert "isotype: a trace of the script's last known step shows other errors, but not this one:" in after
    assert after.index("   |   input  float16  [2, 4]") < after.index("error[IST101]")
    assert "explains the error" not in after


@pytest.mark.parametrize("look", [(), ("--no-preflight",)])
def test_a_gradscaler_that_refuses_is_explained(
    capsys: pytest.CaptureFixture[str], look: tuple[str, ...]
) -> None:
    status, _, err = _run(capsys, *look, *_script("custom", "broken"))
    assert status == 1
    before, traceback, after = _around(err)
    assert ("error[IST301]" in before) is (not look)
    assert traceback.endswith("ValueError: Attempting to unscale FP16 gradients.")
    assert "error[IST301]: GradScaler does not accept the float16 gradients" in after
    assert "inward is float16" in after


@pytest.mark.parametrize("look", [(), ("--no-preflight",)])
def test_a_backward_of_the_user_s_own_is_explained(
    capsys: pytest.CaptureFixture[str], look: tuple[str, ...]
) -> None:
    status, _, err = _run(capsys, *look, *_script("custom", "backward"))
    assert status == 1
    _, _, after = _around(err)
    assert "error[IST105]" in after
    assert "scripts/custom.py:20" in after


def test_a_healthy_custom_module_has_no_errors(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = _run(capsys, *_script("custom", "healthy"))
    assert status == 0
    assert out.count("loss") == 3
    assert "error[" not in err


def test_a_crash_that_dtypes_did_not_cause_gets_its_place_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = (
        "import torch\nmodel = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(5, 4))\n"
        "model(torch.ones(2, 4))\n"
    )
    status, _, err = _run_source(capsys, tmp_path / "shapes.py", source)
    assert status == 1
    assert "isotype: aten.addmm.default in 1 (forward) raised this error; dtypes are not the cause:\n" in err
    assert "   |   mat2  float32  [5, 4]   1.weight is float32\n" in err
    assert "error[" not in err


def test_a_predicted_crash_that_dtypes_did_not_cause(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = (
        "import torch\nmodel = torch.nn.Sequential(torch.nn.Embedding(4, 4), torch.nn.Linear(4, 4))\n"
        "model(torch.tensor([3, 4]))\n"
    )
    _, _, err = _run_source(capsys, tmp_path / "ids.py", source)
    assert "dtypes are not the cause" not in err
    _, _, predicted = err.partition("isotype: predicted before the step:\n")
    assert "error[IST111]: index 4 is out of range for 4 rows" in predicted
    assert "   = note   the script stopped here\n" in predicted


def test_a_script_with_accelerate(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = _run(capsys, "--no-preflight", *_script("accelerated", "healthy"))
    assert status == 0
    assert out.count("loss") == 4
    assert "gradients accumulate" in err
    status, _, err = _run(capsys, *_script("accelerated", "broken"))
    before, _, after = _around(err)
    assert status == 1
    assert "  --> model.norm.1   aten.mm.default   forward   scripts/accelerated.py:25" in before
    assert "   = cause  model.norm.1.weight is bfloat16" in after


@pytest.mark.exhaustive  # TRL's trainer is one
def test_a_script_with_the_trainer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = _run(capsys, *_script("trained", "healthy", str(tmp_path)))
    assert status == 0
    assert "trained 3 steps" in out
    assert "error[" not in err
    status, _, err = _run(capsys, *_script("trained", "broken", str(tmp_path)))
    assert status == 1
    _, _, after = _around(err)
    assert "   = cause  base_model.model.lm_head.weight is float32" in after


@pytest.mark.slow
def test_a_script_with_trl(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(save_chat_model(tmp_path / "model"))
    status, out, err = _run(capsys, *_script("tuned", "healthy", model, str(tmp_path)))
    assert status == 0
    assert "trained 2 steps" in out
    assert "isotype: step 1 watched: " in err
    status, _, err = _run(capsys, *_script("tuned", "broken", model, str(tmp_path)))
    assert status == 1
    _, _, after = _around(err)
    assert "error[IST102]" in after
    assert "lora_B.default.weight is float16" in after


def _around(err: str) -> tuple[str, str, str]:
    """What was said before the traceback, the traceback, and what was said under it."""
    before, marker, rest = err.partition("Traceback (most recent call last):\n")
    assert marker
    lines = rest.splitlines(keepends=True)
    end = next(i for i, line in enumerate(lines) if not line.startswith(" "))
    return before, "".join(lines[: end + 1]).rstrip(), "".join(lines[end + 1 :])


# ------------------------------------------------------------------------------------------------------ small parts


def test_the_autocast_that_accelerate_hides_in_the_forward_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    import accelerate.state

    model: Any = torch.nn.Linear(1, 1)
    monkeypatch.setattr(accelerate.state.AcceleratorState, "_shared_state", {"_mixed_precision": "fp16"})
    assert autocast_of(model, "cuda") is None
    model._original_forward = model.forward
    assert autocast_of(model, "cuda") == torch.float16
    assert autocast_of(model, "cpu") == torch.float16  # of a GPU for which the CPU stands
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert autocast_of(model, "cpu") == torch.bfloat16


def test_a_look_ahead_that_fails_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def run(*_: Any, **__: Any) -> None:
        raise RuntimeError("no such thing\nwith details")

    monkeypatch.setattr("isotype.preflight.script.ahead.run", run)
    console = Console(record=True, width=100, file=io.StringIO())
    diagnosis = Diagnosis(
        Options("train.py", False, (), 1, None, 10.0, False), console, Family(tmp_path, os.getpid())
    )
    diagnosis.begin()
    model = torch.nn.Linear(2, 2)
    model(torch.ones(1, 2))
    diagnosis.stop()
    diagnosis.watch.forget()
    assert console.export_text() == (
        "isotype: the first step could not be traced: RuntimeError: no such thing\n"
    )


def test_a_chain_of_exceptions_is_cleaned_and_may_be_a_ring() -> None:
    first, second = ValueError("first"), ValueError("second")
    with pytest.raises(ValueError, match="first"):
        raise first
    first.__context__, second.__cause__ = second, first
    assert cleaned(first) is first
    assert first.__traceback__ is not None
    first.__context__ = None


def test_packed_rows_that_see_each_other_are_named_before_the_first_step(
    capsys: pytest.CaptureFixture[str],
) -> None:
    status, _, err = _run(capsys, *_script("packed_loop"))
    assert status == 0
    assert "error[IST901]: the sequences of a packed row attend to each other" in err
    assert "remove attention_mask from the batch" in err


def test_peft_s_own_experts_are_said_to_form_their_deltas(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = _run(capsys, *_script("peft_experts"))
    assert status == 0
    assert out.count("loss") == 2
    assert "error[" not in err
    assert (
        "warning[IST503]: adapters are multiplied out (B times A) and added to 4 bfloat16 stacked weights"
        in err
    )


def test_casts_that_outlive_the_first_step_are_named_at_the_second(
    capsys: pytest.CaptureFixture[str],
) -> None:
    status, _, err = _run(capsys, *_script("autocast_around_the_loop"))
    assert status == 0
    assert "error[IST909]: a forward computes with the weights from before the optimizer's step" in err


def test_an_error_before_the_first_step_is_explained(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    source = "import torch\nmodel = torch.nn.Linear(2, 2, device='meta')\nmodel.to('cpu')\n"
    status, _, err = _run_source(capsys, tmp_path / "meta.py", source)
    assert status == 1
    assert "isotype: this set-up cannot train:\n  --> " in err
    assert "   = cause  2 parameters are on the meta device, without values (first: weight)" in err
    assert "no training step was recorded" not in err

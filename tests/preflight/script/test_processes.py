"""The processes that a script starts are watched, or it is said that they were not."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import isotype
from isotype.cli.run import run
from isotype.preflight.script import session
from isotype.preflight.script.family import VARIABLE, Family, Options, family, watched_command

PYTHON = sys.executable
FLAGS = ("--steps", "2")
RUN = f"-m isotype.cli.run {shlex.join(FLAGS)}"


@pytest.mark.parametrize(
    ("command", "watched"),
    [
        ("PYTHON train.py --lr 1", f"PYTHON {RUN} -- train.py --lr 1"),
        ("PYTHON -u -W ignore -Xutf8 train.py -m", f"PYTHON -u -W ignore -Xutf8 {RUN} -- train.py -m"),
        ("PYTHON -m package.train -c", f"PYTHON {RUN} -m package.train -c"),
        ("PYTHON -um package.train", f"PYTHON -u {RUN} -m package.train"),
        ("PYTHON -mpackage.train x", f"PYTHON {RUN} -m package.train x"),
        ("PYTHON -c pass", None),
        ("PYTHON -uc pass", None),
        ("PYTHON -I train.py", None),
        ("PYTHON -", None),
        ("PYTHON --version", None),
        ("PYTHON", None),
        ("PYTHON -m isotype run train.py", None),
        ("git status", None),
        ("no-such-program train.py", None),
    ],
)
def test_a_command_that_runs_a_script_is_run_under_isotype(command: str, watched: str | None) -> None:
    def words(text: str) -> list[str]:
        return [PYTHON if word == "PYTHON" else word for word in shlex.split(text)]

    assert watched_command(words(command), FLAGS) == (None if watched is None else words(watched))


def test_an_installed_command_is_a_script_where_this_python_runs_it(tmp_path: Path) -> None:
    ours, others = tmp_path / "ours", tmp_path / "others"
    ours.write_text(f"#!{PYTHON}\nprint()\n")
    others.write_text("#!/another/python\nprint()\n")
    ours.chmod(0o755)
    others.chmod(0o755)
    assert watched_command([str(ours), "x"], FLAGS) == [PYTHON, *shlex.split(RUN), "--", str(ours), "x"]
    assert watched_command([str(others), "x"], FLAGS) is None


def test_one_of_a_family_speaks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    top = family()
    assert top.is_top
    started = family()
    assert not started.is_top
    assert started.claim("speaks")
    assert not top.claim("speaks")
    assert top.knows("speaks")
    assert not top.knows("seen")
    top.leave()
    assert VARIABLE not in os.environ
    assert started.claim("seen")  # the top has gone; nobody else would say it


def test_a_spawned_process_joins_when_it_unpickles_what_it_is_given(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    joined: list[Options] = []
    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", lambda process: None)
    monkeypatch.setattr(session, "family", lambda: Family(tmp_path, None))
    monkeypatch.setattr(session, "when_imported", lambda name, act: lambda: None)
    options = Options("train.py", False, ("x",), 2, "t4", 10.0, False)
    started = session.Session(options)
    started.watch()
    try:
        process: Any = multiprocessing.get_context("spawn").Process(target=print)
        process.start()
    finally:
        started.leave()
    assert started.watched == 1
    monkeypatch.setattr(session.Session, "watch", lambda self: joined.append(self.options))
    pickle.loads(pickle.dumps(process._isotype))
    assert joined == [options]


TRAINING = """
import multiprocessing, subprocess, sys

def train():
    import torch
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4).bfloat16())
    model(torch.ones(2, 4)).sum().backward()

if __name__ == "__main__":
    how = sys.argv[1]
    if how == "here":
        train()
    elif how == "launched":
        sys.exit(subprocess.run([sys.executable, __file__, "here"]).returncode)
    elif how == "shell":
        sys.exit(subprocess.run("exit 3", shell=True).returncode)
    else:
        process = multiprocessing.get_context(how).Process(target=train)
        process.start()
        process.join()
        sys.exit(process.exitcode)
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "training.py"
    path.write_text(TRAINING)
    return str(path)


@pytest.mark.parametrize(
    "how",
    [
        "fork",
        pytest.param("spawn", marks=pytest.mark.exhaustive),
        pytest.param("launched", marks=pytest.mark.exhaustive),
    ],
)
def test_a_training_in_a_child_process_is_explained_there(
    script: str, how: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as leaving:
        run(["--no-preflight", script, how], Console())
    out, err = capfd.readouterr()
    assert (leaving.value.code, out) == (1, "")
    assert err.count("error[IST101]") == 1
    assert "RuntimeError: mat1 and mat2 must have the same dtype" in err
    assert str(Path(isotype.__file__).parent) not in err
    assert "no training step was recorded" not in err


def test_a_shell_is_not_looked_into_and_that_is_said(script: str, capfd: pytest.CaptureFixture[str]) -> None:
    started = subprocess.Popen.__init__
    with pytest.raises(SystemExit) as leaving:
        run([script, "shell"], Console())
    assert leaving.value.code == 3
    assert subprocess.Popen.__init__ is started
    assert capfd.readouterr().err == (
        "isotype: no training step was recorded: the script started other programs (sh), which isotype does not record; if one "
        "of them trains, write `isotype run` instead of `python` in its command\n"
    )

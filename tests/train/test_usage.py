"""The short help, and the amount of output with `-q` and `-v`."""

from __future__ import annotations

import io
import subprocess
import sys

import pytest
import torch
from rich.console import Console

from isotype.cli.main import main
from isotype.data.methods import METHODS
from isotype.precision.policy import PrecisionPolicy
from isotype.train.command.arguments import common_arguments, short_help
from isotype.train.command.parse import training_parser
from isotype.train.describe import show_policy


@pytest.mark.parametrize("method", METHODS)
def test_the_short_help_is_one_screen_of_real_arguments(method):
    known = {"--config"} | {
        name for action in training_parser(method)._actions for name in action.option_strings
    }
    named = {f"--{each.name}" for group in common_arguments(method).values() for each in group}
    assert named <= known
    lines = short_help(method).splitlines()
    assert len(lines) <= 46
    assert max(map(len, lines)) <= 80


def test_the_short_help_loads_neither_torch_nor_trl():
    code = (
        "import sys; from isotype.cli.main import main; status = main(['sft', '--help']); "
        "print(status, sorted({'torch', 'trl', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 []"
    assert done.stdout.startswith("usage: isotype sft")


def test_help_all_is_the_whole_list(capsys):
    assert main(["sft", "--help-all"]) == 0
    text = capsys.readouterr().out
    assert "--adam_beta1" in text
    assert "--eval_split" in text


POLICY = PrecisionPolicy(compute=torch.bfloat16, storage="nf4")


def shown(width: int, **extra: bool) -> list[str]:
    text = io.StringIO()
    show_policy(Console(file=text, width=width), POLICY, **extra)
    return text.getvalue().rstrip().splitlines()


def test_the_policy_is_a_line_a_role_at_80_columns():
    lines = shown(80)
    assert len(lines) == 2 + len(POLICY.rows())
    assert max(map(len, lines)) <= 80


def test_quiet_is_three_lines_and_verbose_has_every_word():
    quiet = shown(80, quiet=True)
    assert len(quiet) == 3
    assert max(map(len, quiet)) <= 80
    assert "base nf4, matmuls bfloat16, residual bfloat16, masters float32" in quiet[0]
    full = " ".join(" ".join(shown(80, verbose=True)).split())
    assert all(role in full and dtype in full for role, dtype, _ in POLICY.rows())
    assert not any("…" in line for line in shown(80, verbose=True))

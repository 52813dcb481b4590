"""Random wrong values in flags, rows, configs and files: every command ends in time with one message, and leaves nothing behind."""

from __future__ import annotations

import random

import pytest
from benchmarks.fuzz import changed

from tests.processes import run_module


@pytest.mark.real_cpu  # plan measures rates
@pytest.mark.parametrize("count", [6, pytest.param(3000, marks=pytest.mark.exhaustive)])
def test_commands_end_with_a_message(count):
    ended = run_module(
        "benchmarks.fuzz", "--count", count, "--seed", 3, *["--cold"] * (count < 100), timeout=3600
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert f"{count} inputs, 0 ended badly" in ended.stdout


def test_a_change_is_of_one_place_and_the_same_for_a_seed():
    value = {"a": [1, 2, {"b": "c"}], "d": 5}
    changes = [changed(random.Random(seed), value) for seed in range(50)]
    assert changes == [changed(random.Random(seed), value) for seed in range(50)]
    assert value == {"a": [1, 2, {"b": "c"}], "d": 5}
    assert sum(change != value for change in changes) > 40

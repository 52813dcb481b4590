"""Rewards in a run and its report: their values, a warning if all are equal, and the line of a function that raises."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from isotype.cli.main import main
from isotype.core.errors import TrainingError
from isotype.train.rewards import reward_functions
from tests.pairwise import few
from tests.refusals import refused
from tests.train.tiny import rows, save_chat_model, save_rows

pytestmark = pytest.mark.usefixtures("unchecked")
CODE = """\
import json

def scores(completions, **columns):
    return [json.loads(each[0]["content"]) for each in completions]

def none(completions, **columns):
    return [0.0] * len(completions)

def turns(completions, **columns):
    return [float(at % 2) for at, _ in enumerate(completions)]

async def later(completions, **columns):
    raise KeyError("answer")
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"rewards_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path)
    return name


def test_the_users_line_is_named_whoever_raised(module: str, tmp_path: Path) -> None:
    scores, later = reward_functions([f"{module}.scores", f"{module}.later"], None)
    assert scores.__name__ == "scores"
    assert scores([[{"content": "1.5"}]]) == [1.5]
    assert refused(TrainingError, scores, [[{"content": "w1"}]]) == (
        "a reward function failed\n"
        f"  - scores: JSONDecodeError: Expecting value: line 1 column 1 (char 0)   at {tmp_path}/{module}.py:4\n"
        "    expected  a list with a float for each completion\n"
        "    fix       correct the function; a chat's completions are lists of messages, whose text is "
        'completion[0]["content"]'
    )
    with pytest.raises(TrainingError, match=f"later: KeyError: 'answer'   at .*{module}.py:13"):
        asyncio.run(later([]))


def test_a_run_whose_reward_fails_ends_with_the_users_line(
    module: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, data = save_chat_model(tmp_path / "model"), save_rows(tmp_path / "d.jsonl", rows("grpo"))
    out = tmp_path / "out"
    status = main(
        ["grpo", "--model_name_or_path", str(model), "--dataset_name", str(data), "--output_dir", str(out),
         "--reward_funcs", f"{module}.scores", "--max_steps", "1", "--num_generations", "2",
         "--per_device_train_batch_size", "2", "--max_completion_length", "4"]
    )  # fmt: skip
    assert status == 1
    assert f"{module}.py:4" in capsys.readouterr().err
    record = json.loads((out / "run_report.json").read_text())
    assert record["status"] == "failed"
    assert f"{module}.py:4" in record["error"]


def trained(
    method: str, reward: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> tuple[str, dict[str, Any]]:
    """Return (output of a run of two steps, its report)."""
    model, data = save_chat_model(tmp_path / "model"), save_rows(tmp_path / "d.jsonl", rows("grpo"))
    out = tmp_path / "out"
    status = main(
        [method, "--model_name_or_path", str(model), "--dataset_name", str(data), "--output_dir", str(out),
         "--reward_funcs", reward, "--max_steps", "2", "--num_generations", "2", "--logging_steps", "1",
         "--per_device_train_batch_size", "2", "--max_completion_length", "4", "--save_strategy", "no"]
    )  # fmt: skip
    assert status == 0
    return capsys.readouterr().out, json.loads((out / "run_report.json").read_text())


@few("method", ["grpo", "rloo"], "grpo")
def test_a_run_says_that_no_group_differs(
    method: str, module: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    printed, record = trained(method, f"{module}.none", tmp_path, capsys)
    assert "step 2  reward 0.000 ± 0.000, all equal in 100 % of groups\n" in printed
    assert "\nMean reward stayed at 0.000, standard deviation 0.000; " in printed
    warning = "in every group all rewards are equal, so the model learns nothing"
    assert f"\nwarning: {warning}" in printed
    assert any(each.startswith(warning) for each in record["warnings"])
    assert warning in (tmp_path / "out" / "run_report.html").read_text()


def test_rewards_that_differ_are_shown(
    module: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    printed, record = trained("grpo", f"{module}.turns", tmp_path, capsys)
    assert "step 1  reward 0.500 ± 0.707, all equal in 0 % of groups\n" in printed
    assert "warning: all rewards" not in printed
    assert not any("rewards" in each for each in record["warnings"])
    (reward,) = [value for name, value in record["steps"][0]["metrics"] if name == "reward"]
    assert reward == 0.5

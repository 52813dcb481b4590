"""Rewards in a run and its report: their values, a warning if all are equal, and the line of a function that raises."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from isotype.cli.main import main
from isotype.core.errors import DataError, TrainingError, UsageError
from isotype.data.methods import METHODS
from isotype.train.rewards import check_rewards, reward_functions, rewards_here, rewards_of
from tests.pairwise import few
from tests.parsed import parse_settings
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


def importable(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, code: str) -> str:
    """Write a module that can be imported, and return its name."""
    (folder / f"{name}_{folder.name}.py").write_text(code)
    monkeypatch.syspath_prepend(folder)
    return f"{name}_{folder.name}"


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    return importable(tmp_path, monkeypatch, "rewards", CODE)


def test_the_users_line_is_named_whoever_raised(module: str, tmp_path: Path) -> None:
    scores, later = reward_functions([f"{module}.scores", f"{module}.later"], None)
    assert scores.__name__ == "scores"
    assert scores([[{"content": "1.5"}]]) == [1.5]
    assert refused(TrainingError, scores, [[{"content": "w1"}]]) == (
        "a reward function failed\n"
        f"  - scores: JSONDecodeError: Expecting value: line 1 column 1 (char 0)   at {tmp_path}/{module}.py:4\n"
        "    expected  a list with a float for each completion\n"
        "    fix       correct the function; completions of a chat are lists of messages, whose text is "
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
         "--per_device_train_batch_size", "2", "--max_completion_length", "4",
         "--lora_target_modules", "q_proj"]
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
         "--per_device_train_batch_size", "2", "--max_completion_length", "4", "--save_strategy", "no",
         "--lora_target_modules", "q_proj"]
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
    warning = "in every group, all rewards are equal, so the model learns nothing"
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


FITTING = """\
def by_column(completions, answer, weight=1.0, **columns):
    return [0.0] * len(completions)

def only_completions(completions):
    return [0.0] * len(completions)

def singular(prompt, **columns):
    return [0.0]

def every(prompts, completions, completion_ids, trainer_state, log_extra, log_metric, answer=None):
    return [0.0] * len(completions)

class Scorer:
    def __call__(self, completions, *, gold, **columns):
        return [0.0] * len(completions)

scorer = Scorer()
"""
VALUES = "prompts, completions, completion_ids, trainer_state, log_extra, log_metric"


@pytest.fixture
def fitting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    return importable(tmp_path, monkeypatch, "fitting", FITTING)


def command(folder: Path, data: list[dict[str, Any]], *rewards: str, method: str = "grpo") -> list[str]:
    (folder / "model").exists() or save_chat_model(folder / "model")
    return [
        method, "--model_name_or_path", str(folder / "model"), "--dataset_name", str(save_rows(folder / "d.jsonl", data)),
        "--output_dir", str(folder / "out"), "--device", "cpu", "--max_steps", "1", "--num_generations", "2",
        "--per_device_train_batch_size", "2", "--max_completion_length", "4", "--reward_funcs", *rewards,
    ]  # fmt: skip


CHAT = [{"prompt": [{"role": "user", "content": "w1"}], "answer": "w2"}] * 2


def unfit(reward: str, row: dict[str, Any], *more: str) -> list[tuple[str, str]]:
    """Return what is wrong with a reward function for such rows, and the fixes."""
    argv = ["--model_name_or_path", "m", "--dataset_name", "d", "--reward_funcs", reward, *more]
    settings = parse_settings(METHODS["grpo"], argv)
    try:
        check_rewards(settings, rewards_of(settings), {"train": [row], "test": [row]})
    except DataError as error:
        return [
            (problem.given.removeprefix(f"--reward_funcs {reward}"), problem.fix)
            for problem in error.problems
        ]
    return []


CHAT = {"prompt": [{"role": "user", "content": "w1"}], "answer": "w2"}


@pytest.mark.parametrize(
    ("reward", "more", "given", "fix"),
    [
        (
            "accuracy_reward", "--eval_strategy steps",
            " needs a column 'solution'; the columns for rewards are 'answer'",
            "--columns solution=answer, or give the parameter a default value",
        ),
        (
            "{}.by_column", "--remove_unused_columns True",
            " needs a column 'answer'; the columns for rewards are none",
            "--columns answer=COLUMN, or give the parameter a default value",
        ),
        (
            "{}.scorer", "",
            " needs a column 'gold'; the columns for rewards are 'answer'",
            "--columns gold=COLUMN, or give the parameter a default value",
        ),
        (
            "{}.scorer", "--columns prompt=q",
            " needs a column 'gold'; the columns for rewards are 'answer'",
            "--columns prompt=q,gold=COLUMN, or give the parameter a default value",
        ),
        (
            "{}.singular", "",
            " needs a column 'prompt'; the columns for rewards are 'answer'",
            "name the parameter prompts",
        ),
    ],
)  # fmt: skip
def test_a_reward_without_its_column_is_named(
    reward: str, more: str, given: str, fix: str, fitting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("isotype.train.rewards.find_spec", lambda _: True)
    assert unfit(reward.format(fitting), CHAT, *more.split()) == [(given, fix)]


def test_a_reward_without_further_arguments_is_named(fitting: str) -> None:
    ((given, fix),) = unfit(f"{fitting}.only_completions", CHAT)
    assert given.startswith(": got an unexpected keyword argument")
    assert fix == "add **kwargs to the parameters of the function"


def test_a_reward_of_conversations_refuses_plain_text() -> None:
    ((given, fix),) = unfit("think_format_reward", {"prompt": "w1"})
    assert given == " with prompts of plain text"
    assert fix == "--apply_chat_template True, which turns prompts into user messages"
    assert unfit("get_soft_overlong_punishment", {"prompt": "w1"}) == []


@pytest.mark.parametrize("reward", ["{}.by_column", "{}.every", "think_format_reward", "builtins.max"])
def test_a_reward_that_fits_is_accepted(reward: str, fitting: str) -> None:
    assert unfit(reward.format(fitting), CHAT, "--eval_strategy", "steps") == []


def test_check_and_run_refuse_the_same_reward(
    fitting: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # No weight is looked for.
    monkeypatch.setattr("isotype.checkpoint.checkpoint.Checkpoint.require_weights", pytest.fail)
    argv = command(tmp_path, [CHAT], f"{fitting}.scorer")
    for words in (argv, ["check", *argv]):
        assert main(words) == 2
        assert (
            f"error: a reward function does not fit the data\n  - --reward_funcs {fitting}.scorer needs a column 'gold'; "
            f"the columns for rewards are 'answer'\n    expected  a column for each parameter except {VALUES}\n"
            "    fix       --columns gold=COLUMN, or give the parameter a default value\n"
        ) in capsys.readouterr().err


def test_what_cannot_be_known_about_rewards_is_said(tmp_path: Path) -> None:
    _, *argv = command(tmp_path, [CHAT], "no_such_module.length")
    with pytest.raises(UsageError, match=r"no_such_module\.length: No module named"):
        rewards_here(parse_settings(METHODS["grpo"], argv))
    far = [word if word != "cpu" else "t4" for word in argv]
    rewards, (note,) = rewards_here(parse_settings(METHODS["grpo"], far))
    assert rewards == {}
    assert note.startswith("the reward functions were not checked: --reward_funcs no_such_module.length")
    settings = parse_settings(METHODS["rloo"], argv[:-2])
    rewards, notes = rewards_here(settings)
    assert check_rewards(settings, rewards, {"train": [CHAT]}) is None
    assert notes == ["no reward is named yet: isotype rloo needs --reward_funcs"]


def test_rewards_have_a_weight_each_and_their_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, *argv = command(tmp_path, [CHAT], "think_format_reward")
    two = parse_settings(METHODS["grpo"], [*argv, "--reward_weights", "1", "2"])
    assert "--reward_weights with 2 values\n    expected  1, one for each reward" in refused(
        UsageError, rewards_of, two
    )
    monkeypatch.setattr("isotype.train.rewards.find_spec", lambda _: None)
    for name in ("accuracy_reward", "trl.rewards.reasoning_accuracy_reward"):
        assert "pip install math-verify" in refused(UsageError, reward_functions, [name], None)

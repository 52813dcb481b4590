"""A reward function that raises is shown with the user's line, in the run and in its report."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from isotype.cli.main import main
from isotype.core.errors import TrainingError
from isotype.train.rewards import reward_functions
from tests.refusals import refused
from tests.train.tiny import rows, save_chat_model, save_rows

CODE = """\
import json

def scores(completions, **columns):
    return [json.loads(each[0]["content"]) for each in completions]

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
    with pytest.raises(TrainingError, match=f"later: KeyError: 'answer'   at .*{module}.py:7"):
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

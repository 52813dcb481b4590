"""Runs that are killed with SIGKILL while they save are resumed without a difference."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.processes import run_module
from tests.train.tiny import save_chat_model


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kills", "in_the_middle", "steps", "flags"),
    [
        pytest.param(1, 1, 4, [], marks=pytest.mark.exhaustive),
        (1, 1, 4, ["--quantization", "nf4"]),
        pytest.param(20, 12, 14, ["--quantization", "nf4"], marks=pytest.mark.exhaustive),
        # Scale, growth counter and skipped steps of the GradScaler are part of what goes on.
        pytest.param(
            *(
                2,
                1,
                14,
                ["--quantization", "nf4", "--dtype", "float16", "--gradient_accumulation_steps", "2"],
            ),
            marks=pytest.mark.exhaustive,
        ),
    ],
    ids=["once", "experts", "float32", "float16"],
)
def test_killed_in_saves_and_resumed_equals_uninterrupted(
    kills: int,
    in_the_middle: int,
    steps: int,
    flags: list[str],
    tmp_path: Path,
    request: pytest.FixtureRequest,
):
    experts = 4 if request.node.callspec.id == "experts" else 0
    save_chat_model(tmp_path / "model", layers=2 if experts else 1, experts=experts)
    done = run_module("tests.train.kill_chain", tmp_path, kills, 0, steps, *flags, timeout=600)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)

    assert [each["status"] for each in result["tries"]] == [-signal.SIGKILL] * kills
    begun = [each for each in result["tries"] if any(name.startswith(".") for name in each["left"])]
    assert len(begun) >= in_the_middle, result["tries"]
    assert "Traceback" not in result["log"]
    assert result["last"] == 0, result["log"]

    assert len(result["uninterrupted"]["history"]) == steps
    assert result["killed"]["history"] == result["uninterrupted"]["history"]  # every float, bit for bit
    assert result["killed"]["digests"] == result["uninterrupted"]["digests"]
    assert result["killed"]["reported"] == list(range(1, steps + 1))  # the report goes on over every kill
    assert ("the experts of 2 layers" in result["log"]) == bool(experts)
    assert (f"checkpoint-{steps}/scaler.pt" in result["killed"]["digests"]) == ("float16" in flags)
    assert result["killed"]["entries"] == [f"checkpoint-{steps - 1}", f"checkpoint-{steps}"]
    out = tmp_path / "killed"
    assert f"no complete checkpoint in {out}: starting at step 0" in result["log"]
    assert f"resuming from {out / 'checkpoint-'}" in result["log"]

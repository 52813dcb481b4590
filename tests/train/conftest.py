"""Fixtures of all tests of training."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch import distributed

from isotype.model.recompute import checkpointing
from isotype.train.chat import answer
from isotype.train.run import Choice, Run


@pytest.fixture(autouse=True)
def _short_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answer the sample questions of a training in 4 tokens instead of 64: a tiny model seldom stops before the limit."""
    monkeypatch.setattr(answer, "__defaults__", (4,))


@pytest.fixture
def process_group() -> Iterator[None]:
    """A process group of this process alone."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run trainings without the check before their first step, for tests of other parts.

    The check costs as much as ten steps of a tiny model. Runs with the check are those of test_methods.py (each
    method in each dtype), test_callback.py, tests/preflight/test_from_trainer.py and tests/cli/test_main.py.
    """
    monkeypatch.setattr("isotype.train.callback.before_first_step", lambda *_: None)
    # Neither is the step traced to choose which layers are computed again: all are, as TRL has it.
    monkeypatch.setattr("isotype.train.training.choice_of_run", _as_asked)


def _as_asked(run: Run, *_: object) -> Choice:
    return Choice(checkpointing(run.settings.training), "as requested")

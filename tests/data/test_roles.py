"""Roles that do not exist, and chats in which nobody answers."""

from __future__ import annotations

import pytest

from isotype.data.columns import Survey
from isotype.data.methods import METHODS
from isotype.data.reading import Reading


def chat(*roles: str) -> list[dict[str, str]]:
    return [{"role": role, "content": "a"} for role in roles]


def shared(*roles: str) -> list[dict[str, str]]:
    return [{"from": role, "value": "a"} for role in roles]


def problems(row: dict[str, object], method: str = "sft") -> list[tuple[str, str]]:
    survey = Survey(METHODS[method])
    survey.add("t.jsonl", 1, Reading(method).apply(row))
    return [(problem.given, problem.fix) for problem in survey.problems()]


@pytest.mark.parametrize(
    ("role", "meant"),
    [("usr", "user"), ("User", "user"), ("assitant", "assistant"), ("human", "user"), ("gpt", "assistant")],
)
def test_a_role_that_does_not_exist(role, meant):
    given = f"t.jsonl, line 1: column 'messages' holds a message of the role '{role}'"
    assert problems({"messages": [*chat(role), *chat("assistant")]}) == [(given, f"did you mean '{meant}'?")]


def test_no_answer_to_learn():
    fix = "add the answer, or remove the example"
    said = "t.jsonl, line 1: column '{}' holds no message of the assistant"
    assert problems({"messages": chat("user")}) == [(said.format("messages"), fix)]
    assert problems({"prompt": chat("user"), "completion": chat("user")}) == [
        (said.format("completion"), fix)
    ]
    row = {"prompt": chat("user"), "chosen": chat("user"), "rejected": chat("assistant")}
    assert problems(row, "dpo") == [(said.format("chosen"), fix)]
    assert problems({"conversations": shared("human")}) == [(said.format("conversations"), fix)]


@pytest.mark.parametrize(
    ("method", "row"),
    [
        ("sft", {"messages": chat("system", "developer", "user", "assistant", "tool")}),
        ("sft", {"messages": chat("user", "critic")}),
        ("sft", {"conversations": shared("human", "gpt")}),
        ("sft", {"prompt": "usr", "completion": "a"}),
        ("grpo", {"prompt": chat("system", "user")}),
    ],
)
def test_roles_that_templates_know_or_may_know(method, row):
    assert problems(row, method) == []

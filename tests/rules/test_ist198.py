from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import torch
from torch import nn

from isotype.preflight.check import check
from tests.small import WIDTH

X = torch.ones(2, WIDTH)


def test_a_generator_that_has_moved_on_is_said() -> None:
    def batches() -> Iterator[torch.Tensor]:
        while True:
            yield X

    drawn = batches()
    report = check(nn.Linear(WIDTH, 2), lambda m: m(next(drawn)).mean(), device="cpu", verify=False)
    (note,) = [finding for finding in report.notes if finding.code == "IST198"]
    assert note.cause == "the generator drawn cannot be rewound: items that the trace has read are lost"


def test_a_tensor_where_python_cannot_look_is_said() -> None:
    kept: Future[Any] = Future()

    def loss(m: nn.Module) -> torch.Tensor:
        made: torch.Tensor = m(X)
        kept.set_result(made.detach())
        return made.mean()

    report = check(nn.Linear(WIDTH, 2), loss, device="cpu", verify=False)
    (note,) = [finding for finding in report.notes if finding.code == "IST198"]
    assert note.cause == "kept (Future) still holds a tensor of the trace: create it again"


def test_nothing_left_is_silent() -> None:
    report = check(nn.Linear(WIDTH, 2), lambda m: m(X).mean(), device="cpu", verify=False)
    assert not [finding for finding in report.findings if finding.code == "IST198"]

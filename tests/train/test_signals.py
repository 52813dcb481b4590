"""Notes of a run on the parts of its loss."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from isotype.train.signals import balancing_note
from tests.models import tiny_config


@pytest.mark.parametrize(("asked", "said"), [(True, "times 0.02"), (False, None)])
def test_the_balance_loss_is_said_with_its_coefficient(asked: bool, said: str | None) -> None:
    config = tiny_config("Qwen3MoeConfig", output_router_logits=asked, router_aux_loss_coef=0.02)
    note = balancing_note(SimpleNamespace(model=SimpleNamespace(config=config)))
    assert note is None if said is None else said in str(note)

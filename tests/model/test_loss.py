"""Which tensor of a model's output is its loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from isotype.model.loss import find_loss, loss_of


@dataclass
class Returned:
    """An output that is neither a mapping nor a tuple."""

    logits: torch.Tensor
    extra: tuple[torch.Tensor, ...]


def _parts() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits [2, 3], their loss [], and a temperature [] that is a parameter of its own."""
    weight, temperature = torch.ones(3, requires_grad=True), torch.ones((), requires_grad=True)
    logits = torch.ones(2, 3) * weight
    return logits, logits.square().sum(), temperature.exp()


@pytest.mark.parametrize(
    "pack",
    [
        lambda logits, loss: loss,
        lambda logits, loss: (logits, loss),
        lambda logits, loss: (loss, logits),
        lambda logits, loss: {"logits": logits, "objective": loss},
        lambda logits, loss: {"loss": loss, "logits": logits},
        lambda logits, loss: (logits, {"parts": [loss.detach(), loss]}),
        lambda logits, loss: Returned(logits, (loss,)),
        lambda logits, loss: (logits, loss, None),
    ],
)
def test_the_loss_is_found(pack: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
    logits, loss, _ = _parts()
    assert find_loss(pack(logits, loss)) is loss


def test_the_losses_of_a_detector_are_summed() -> None:
    _, loss, temperature = _parts()
    found = find_loss({"boxes": loss, "scale": temperature})
    assert found is not None
    assert found.item() == pytest.approx((loss + temperature).item())


def test_a_temperature_is_no_loss() -> None:
    logits, _, temperature = _parts()
    assert find_loss((logits, temperature)) is None
    assert loss_of((logits, temperature)).item() == pytest.approx(1.0)
    assert find_loss(logits) is None
    assert find_loss((logits.detach(), logits.detach().sum())) is None

"""Kinds of dtype faults, injected into a training step: what the preflight must predict."""

from __future__ import annotations

from tests.faults import adapters, inputs, weights, wrappers
from tests.faults.setup import Fault, Setup

FAULTS: dict[str, Fault] = {
    fault.name: fault for room in (weights, wrappers, adapters, inputs) for fault in room.FAULTS
}
HEALTHY: Fault = inputs.HEALTHY

__all__ = ["FAULTS", "HEALTHY", "Fault", "Setup"]

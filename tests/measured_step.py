"""A real step, recorded in the ledger that a preflight uses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import optimizer as optimizers

from isotype.compat.torch import put_under, take_out
from isotype.records.memory import Memory
from isotype.records.trace import Call
from isotype.trace.live.recorder import LiveFunctions, LiveRecorder, device_of


@dataclass(frozen=True)
class Measured:
    """A real step that is being, or was, measured.

    Attributes:
        recorder: what wrote it down; its calls stay, its hold on tensors ends with the measurement.
    """

    recorder: LiveRecorder

    @property
    def memory(self) -> Memory:
        """Bytes of live tensors at the worst moment of each phase so far, by kind."""
        return self.recorder.ledger.record()

    @property
    def calls(self) -> tuple[Call, ...]:
        """The operators so far."""
        return tuple(self.recorder.calls)


@contextmanager
def measure_step(model: nn.Module, inputs: Mapping[str, Any] | None = None) -> Iterator[Measured]:
    """Record a real step of `model`, run inside the `with`, in the ledger that a preflight uses.

    Args:
        model: the model that is trained; its weights count from the start.
        inputs: tensors by name that are there before the step.

    Raises:
        RuntimeError: the bookkeeping failed, so that the figures would be wrong.
    """
    recorder = LiveRecorder(device_of(model))
    modes = (recorder, LiveFunctions(recorder))
    with ExitStack() as hooks:
        hooks.callback(recorder.forget)
        hooks.enter_context(recorder.watch(model))
        for hook in _optimizer_hooks(recorder):
            hooks.enter_context(hook)
        recorder.names.clear()
        hooks.enter_context(recorder.weigh(model))
        recorder.mark_inputs(inputs or {})
        recorder.turn_to("forward")
        put_under(*modes)
        hooks.callback(take_out, *modes)
        yield Measured(recorder)
    if recorder.fault:
        raise RuntimeError(f"the step could not be measured to its end: {recorder.fault}")


def _optimizer_hooks(recorder: LiveRecorder) -> list[Any]:
    return [
        optimizers.register_optimizer_step_pre_hook(lambda *_: recorder.turn_to("optimizer")),
        optimizers.register_optimizer_step_post_hook(lambda *_: recorder.turn_to("forward")),
    ]

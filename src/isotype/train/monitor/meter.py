"""Measures and checks the optimizer steps of a trainer, and runs a step again if a value is not finite.

A step whose loss or gradient is not finite must not change the weights. PyTorch's fused Adam and AdamW on CUDA skip an
update if `found_inf` is set (a flag on the device, which GradScaler also uses). With these optimizers, the host reads the
values one step later, so it does not wait for the device. With other optimizers and devices, the host reads the values
before the update.
"""

import copy
import math
import shlex
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers.trainer_utils import get_last_checkpoint

from isotype.compat.replaced import Replacements
from isotype.compat.torch import PLAIN, loss_scale
from isotype.compat.transformers import batches_as_they_are, steps_seen
from isotype.core.errors import Problem, TrainingError, error_line
from isotype.core.optimizers import parameters_of
from isotype.core.random_states import RandomStates
from isotype.data.pictures import picture_columns
from isotype.records.nonfinite import NonFinite
from isotype.report.nonfinite import problem_of
from isotype.report.run.record import StepRecord
from isotype.report.text import chat_command
from isotype.trace.nonfinite.again import StopReason, first_nonfinite

SAMPLING_SECONDS = 0.02


class _Allocated:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._backend = torch.get_device_module(device)

    def restart(self) -> None:
        self._backend.reset_peak_memory_stats(self._device)

    def peak(self) -> int:
        return int(self._backend.max_memory_allocated(self._device))


class _Resident:
    def __init__(self) -> None:
        self._process = psutil.Process()
        self._peak = 0
        self._lock = threading.Lock()

    def restart(self) -> None:
        with self._lock:
            self._peak = self._process.memory_info().rss

    def peak(self) -> int:
        with self._lock:
            self._peak = max(self._peak, self._process.memory_info().rss)
            return self._peak

    def sample(self, stop: threading.Event) -> None:
        while not stop.wait(SAMPLING_SECONDS):
            self.peak()


MemoryMeter = _Allocated | _Resident
"""The method `peak` of a meter returns the largest memory in use, in bytes, since the last call of `restart`."""


@contextmanager
def memory_meter(device: torch.device) -> Iterator[MemoryMeter]:
    """Yield a meter of the memory of `device` during a run.

    On CUDA, ROCm and XPU, the meter reads PyTorch's peak of allocated bytes. On other devices, the meter samples the
    resident memory of this process every `SAMPLING_SECONDS`, and can miss short peaks. The kernel's peak (`ru_maxrss`)
    is not used, because it includes the peak of loading and cannot be reset.
    """
    if device.type in ("cuda", "xpu"):
        yield _Allocated(device)
        return
    meter, stop = _Resident(), threading.Event()
    thread = threading.Thread(target=meter.sample, args=(stop,), name="isotype-memory", daemon=True)
    thread.start()
    try:
        yield meter
    finally:
        stop.set()
        thread.join()


DEFERRED_ON = ("cuda",)
"""Device types on which fused optimizers read `found_inf`. ROCm also has the device type `cuda`."""

_LOSS, _NORM = 1, 3
"""Indices of loss and norm in the tensor of five values that `launch` creates."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Inputs of one call of `compute_loss`. Tensors are not copied."""

    model: Any
    inputs: Any
    items: Any
    states: RandomStates


@dataclass
class Step:
    """An optimizer step. The method `read` converts loss, norm and scale from scalars on the device to Python
    numbers.

    Attributes:
        tokens: number of tokens in the batches of all processes, without padding (set by `read`).
        loss: sum of the losses of this process's micro-batches. The method `read` averages this sum over all processes.
        grad_norm: norm of the unscaled gradients before clipping, or None if it was not measured.
        scale: the loss scale in the backward, or None without loss scaling.
        stops: number of processes that have received a stop signal (set by `read`).
        began: time at the start of the step (`time.perf_counter`), in seconds.
        memory_bytes: peak memory of this process, or 0 if it was not measured.
    """

    number: int
    learning_rate: float = 0.0
    batches: list[MicroBatch] = field(default_factory=list)
    tokens: int = 0
    loss: Any = 0.0
    grad_norm: Any = None
    scale: Any = None
    stops: int = 0
    is_read: bool = False
    began: float = field(default_factory=time.perf_counter)
    seconds: float = 0.0
    memory_bytes: int = 0
    skipped: bool = False
    _values: torch.Tensor | None = None
    _processes: int = 1
    _arrived: Any = None

    @property
    def waits(self) -> bool:
        """True between `launch` and `read`, when the values are on the device."""
        return self._values is not None and not self.is_read

    def launch(self, device: torch.device, accelerator: Any = None, stops: bool = False) -> None:
        """Collect the values in one tensor on the device, without waiting for the device.

        Args:
            accelerator: sums tokens, losses and stop signals over all processes (a collective operation). If `accelerator` is
                None, only the loss of this process is collected, and tokens are not counted.
            stops: True if this process has received a stop signal.
        """
        # MPS and some XPUs have no float64. In float32, numbers of tokens above 2^24 would be rounded.
        wide = torch.float64 if device.type in ("cpu", "cuda") else torch.float32
        tokens = sum(count_tokens(batch.inputs) for batch in self.batches) if accelerator is not None else 0
        values = torch.stack(
            [
                torch.as_tensor(part, dtype=wide, device=device)
                if isinstance(part, torch.Tensor)
                # `full` writes the number on the device; a copy from the host would wait for the device.
                else torch.full((), math.nan if part is None else float(part), dtype=wide, device=device)
                for part in (tokens, self.loss, stops, self.grad_norm, self.scale)
            ]
        )
        if accelerator is not None and accelerator.num_processes > 1:
            self._processes = accelerator.num_processes
            values[:_NORM] = accelerator.reduce(values[:_NORM], reduction="sum")
        self._values = values

    def broken(self) -> torch.Tensor:
        """Return a float32 scalar on the device: 1 if the step's loss or norm is not finite, and 0 otherwise."""
        assert self._values is not None
        finite = self._values[_LOSS].isfinite()
        if self.grad_norm is not None:
            finite = finite & self._values[_NORM].isfinite()
        return finite.logical_not().to(torch.float32)

    def send(self) -> None:
        """Begin to copy the values from the device to the host, without waiting for the copy."""
        assert self._values is not None
        if self._values.device.type != "cpu":
            host = torch.empty(self._values.shape, dtype=self._values.dtype, pin_memory=True)
            host.copy_(self._values, non_blocking=True)
            self._arrived = torch.get_device_module(self._values.device).Event()
            self._arrived.record()
            self._values = host

    def read(self) -> None:
        assert self._values is not None
        if self._arrived is not None:
            self._arrived.synchronize()
        tokens, loss, stops, norm, scale = self._values.tolist()
        self.tokens, self.loss, self.stops = int(tokens), loss / self._processes, int(stops)
        self.grad_norm = None if self.grad_norm is None else norm
        self.scale = None if self.scale is None else scale
        self.is_read = True

    def record(self) -> StepRecord:
        return StepRecord(
            step=self.number,
            loss=self.loss,
            learning_rate=self.learning_rate,
            grad_norm=self.grad_norm,
            tokens=self.tokens,
            seconds=self.seconds,
            memory_bytes=self.memory_bytes,
            loss_scale=self.scale,
            skipped=self.skipped,
        )


_MASKS = {"input_ids": "attention_mask", "prompt_ids": "prompt_mask", "completion_ids": "completion_mask"}


def count_tokens(batch: Mapping[str, Any]) -> torch.Tensor | int:
    """Count the tokens in the attention masks of a batch, without the extra sequences for KTO's KL estimate."""
    total: torch.Tensor | int = 0
    for ids, mask in _MASKS.items():
        if batch.get(ids) is not None:
            # The sum stays on the device: reading it would make every micro-batch wait for the GPU.
            total = total + (batch[ids].numel() if batch.get(mask) is None else batch[mask].sum())
    return total


def skipping_optimizer(optimizer: Any, accelerator: Any, device: torch.device) -> Any | None:
    """Return the optimizer inside accelerate's wrapper if it skips an update when `found_inf` is set, else None.

    A GradScaler sets `found_inf` itself. With several processes, the host reads their stop signals before the update. In
    both cases, the function returns None.
    """
    scaler = getattr(accelerator, "scaler", None)
    if device.type not in DEFERRED_ON or accelerator.num_processes > 1 or scaler is not None:
        return None
    inner = getattr(optimizer, "optimizer", optimizer)
    if type(inner) not in (torch.optim.Adam, torch.optim.AdamW):
        return None
    fused = all(group.get("fused") for group in inner.param_groups)
    plain = all(type(p) in PLAIN and p.device.type == device.type for p in parameters_of(inner))
    return inner if fused and plain else None


Replay = NonFinite | str
"""Result of running a step again: the first value that is not finite, or the reason why it is unknown; "" if all values are finite."""


@dataclass
class StepMeter:
    """Measures the steps of a trainer. `attach` replaces trainer methods, because callbacks get no batch and no loss.

    Args:
        together: True if all processes combine their values in every step (a collective operation). It is False in a script.
            Tokens are then not counted, and losses are combined only after a non-finite gradient norm, which is equal in all
            processes.
        signals: the stop signals (SIGINT, SIGTERM) that this process has received so far.

    Attributes:
        now: the current or last step.
    """

    trainer: Any
    together: bool = False
    memory: MemoryMeter | None = None
    signals: Sequence[int] = ()
    now: Step = field(default_factory=lambda: Step(0))
    _stop_reason: StopReason = field(default_factory=StopReason)
    _methods: Replacements = field(default_factory=Replacements)

    def attach(self) -> None:
        self._methods = steps_seen(self.trainer, self._around_step, self._around_loss, self._around_norm)

    def detach(self) -> None:
        self._methods.close()

    def begin(self, number: int, learning_rate: float = 0.0) -> None:
        self.now = Step(number, learning_rate)
        if self.memory is not None:
            self.memory.restart()

    def end(self) -> Step:
        step = self.now
        step.seconds = time.perf_counter() - step.began
        step.memory_bytes = 0 if self.memory is None else self.memory.peak()
        step.skipped = bool(self.trainer.accelerator.optimizer_step_was_skipped)
        return step

    def launch(self) -> Step:
        """After the backward of a step, collect the step's values on the device, without waiting for the device."""
        accelerator = self.trainer.accelerator
        self.now.scale = loss_scale(getattr(accelerator, "scaler", None))
        self.now.launch(self.trainer.args.device, accelerator if self.together else None, bool(self.signals))
        return self.now

    def read(self) -> Step:
        """Return the step with its values as numbers. Only this method makes the host wait for the device, once per step."""
        step, accelerator = self.now, self.trainer.accelerator
        if step.is_read:
            return step
        self.launch().read()
        if not self.together and accelerator.num_processes > 1:
            broken = step.grad_norm is not None and not math.isfinite(step.grad_norm)
            loss = torch.tensor(step.loss, device=self.trainer.args.device)
            step.loss = float(accelerator.reduce(loss, reduction="mean")) if broken else 0.0
        return step

    def ends(self, step: Step) -> str | None:
        """Return the reason why a step ends the training (see `StopReason`), or None if the training continues."""
        scale = None if step.scale is None else lambda: step.scale
        return self._stop_reason.of(step.loss, step.grad_norm, scale)

    def replay(self, step: Step) -> Replay:
        """Run a step again with the random states of each micro-batch. Return the first result that is not finite."""
        trainer = self.trainer
        if not step.batches:
            return "no batch of the step was recorded"
        if str(getattr(trainer.accelerator, "distributed_type", "")).endswith("DEEPSPEED"):
            return "DeepSpeed runs the backward in its engine, not in the trainer"
        self.detach()

        def losses() -> Iterator[torch.Tensor]:
            for batch in step.batches:
                batch.states.restore()
                yield trainer.training_step(batch.model, copy.copy(batch.inputs), batch.items)

        named = [dict(batch.inputs) for batch in step.batches]
        alone = trainer.accelerator.num_processes == 1
        try:
            with batches_as_they_are(trainer):
                return first_nonfinite(trainer.model, losses, named, step.scale, stop=alone) or ""
        except Exception as error:  # noqa: BLE001 - reported beside the error that ends the run
            return error_line(error)

    def stopped(self, what: str, step: Step) -> TrainingError:
        """Return the error that ends a run before the update of `step`. `what` is the reason ("the loss is not finite")."""
        parts = {
            "loss": step.loss,
            "learning rate": step.learning_rate,
            "gradient norm": step.grad_norm,
            "loss scale": step.scale,
        }
        measured = ", ".join(f"{name} {value:g}" for name, value in parts.items() if value is not None)
        headline, script = f"{what}: stopped before the update", not self.together
        return not_finite(self.trainer, headline, step.number, measured, self.replay(step), script=script)

    def _around_step(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        loss = method(*args, **kwargs)
        self.now.loss = self.now.loss + loss.detach()
        return loss

    def _around_loss(
        self, method: Callable[..., Any], model: Any, inputs: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if model.training:
            states = RandomStates.current(self.trainer.args.device)
            items = kwargs.get("num_items_in_batch")
            self.now.batches.append(MicroBatch(model, copy.copy(inputs), items, states))
        return method(model, inputs, *args, **kwargs)

    def _around_norm(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # The Trainer calls this once per step, with unscaled gradients, for the norm before clipping.
        self.now.grad_norm = method(*args, **kwargs)
        return self.now.grad_norm


_OF_THE_DATA = ("input", "labels", "row", "empty", "constant", "outside")


def not_finite(
    trainer: Any,
    headline: str,
    step: int,
    measured: str = "",
    replay: Replay | None = None,
    *,
    script: bool = False,
) -> TrainingError:
    """Return the error that ends a run whose loss, gradients or weights are not finite.

    Args:
        replay: result of running the step again, or None if the step was not run again.
        script: True in a user's script. The error then shows arguments as Python code.
    """
    what = f"step {step}{': ' if measured else ''}{measured}"
    first = replay if isinstance(replay, NonFinite) else None
    if isinstance(replay, str):
        why = replay and f"could not be run again ({replay})"
        what += f"\n    this step {why or 'was run again, and all of its values were finite'}"
    of_data = first is not None and (first.cause in _OF_THE_DATA or first.entries == (0.0, 0.0))
    tries = [] if of_data else _tries(trainer.args, step, script)
    problems = [Problem(what, "finite numbers", "; or ".join(tries) or "see the operator below")]
    if first is not None:
        problems.append(problem_of(first))
    return TrainingError(headline, problems, _hint_of_script(trainer.args) if script else _hint(trainer))


def _hint(trainer: Any) -> str:
    checkpoint = trainer.last_checkpoint()
    if checkpoint is None:
        return "no checkpoint has been saved yet; --save_steps N saves one every N steps"
    command = shlex.join(chat_command(checkpoint, pictures=bool(picture_columns(trainer.train_dataset))))
    return f"{checkpoint} is a complete checkpoint; to use it: {command}"


def _hint_of_script(arguments: Any) -> str:
    last = get_last_checkpoint(arguments.output_dir) if Path(arguments.output_dir).is_dir() else None
    if last is None:
        return "no checkpoint has been saved yet; save_steps=N saves one every N steps"
    return f"{last} is a complete checkpoint; resume with trainer.train(resume_from_checkpoint={last!r})"


def _tries(arguments: Any, step: int, script: bool) -> list[str]:
    def flag(name: str, value: str) -> str:
        return f"{name}={value}" if script else f"--{name} {value}"

    tries = []
    if arguments.fp16:
        wider = "bf16=True, or neither bf16 nor fp16" if script else "--dtype bfloat16 or float32"
        tries.append(f"{wider}: float16's largest number is 65504")
    if step > 1:
        tries.append(flag("learning_rate", f"{arguments.learning_rate / 10:g}"))
        if not arguments.warmup_steps:
            tries.append(f"{flag('warmup_steps', '0.05')} (a share of all steps)")
        if arguments.max_grad_norm <= 0:
            tries.append(flag("max_grad_norm", "1"))
    elif not arguments.fp16:
        tries.append("check the first rows (a row without labels has no loss), and the model's config")
    return tries

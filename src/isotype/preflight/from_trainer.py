"""The preflight of a transformers or TRL trainer: its own model, first batch, loss and arguments."""

from __future__ import annotations

import contextlib
import copy
import logging
import random
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from isotype.core.errors import Problem, UsageError
from isotype.report.check.record import Report
from isotype.rules.finding import Finding
from isotype.trace.fake.step import LossOf
from isotype.trace.loss import loss_of
from isotype.trace.record import Trace
from isotype.trace.source import first_line, line_of

logger = logging.getLogger("isotype")


def check_trainer(trainer: Any, verify: bool = True) -> Report:
    """`isotype.check` of a trainer before `train()`: the loss it computes on its own first batch.

    The trainer, its data loader's order and the random states come out untouched. Of trainers whose batches are
    prompts (GRPO, RLOO) the forward and backward over prompt and completion are followed, not the generation and the
    rewards.

    Raises:
        UsageError: it is no trainer, or it has no training data.
    """
    from isotype.preflight.check import check

    if not hasattr(trainer, "get_train_dataloader") or not hasattr(trainer, "model"):
        raise UsageError(
            "nothing to check",
            [
                Problem(
                    f"a {type(trainer).__name__}",
                    "an nn.Module with its inputs, or a transformers or TRL trainer",
                    "isotype.check(model, inputs)",
                )
            ],
        )
    batch = _first_batch(trainer)
    arguments = trainer.args
    return check(
        trainer.model,
        _loss_of_trainer(trainer, batch),
        device=arguments.device,
        autocast=_autocast(arguments),
        scaler=_has_scaler(trainer),
        optimizer=getattr(arguments.optim, "value", arguments.optim),
        learning_rate=arguments.learning_rate,
        gradient_checkpointing=checkpointing(arguments),
        fsdp=_fsdp(arguments),
        verify=verify,
    )


def checkpointing(arguments: Any) -> dict[str, Any] | None:
    """The arguments that the trainer gives to `gradient_checkpointing_enable`, None where it is off."""
    if not arguments.gradient_checkpointing:
        return None
    return {
        "gradient_checkpointing_kwargs": arguments.gradient_checkpointing_kwargs or {"use_reentrant": False}
    }


def _autocast(arguments: Any) -> torch.dtype | bool:
    return torch.float16 if arguments.fp16 else torch.bfloat16 if arguments.bf16 else False


def _has_scaler(trainer: Any) -> bool:
    scaler = getattr(trainer.accelerator, "scaler", None)
    return bool(trainer.args.fp16) or (scaler is not None and scaler.is_enabled())


def _fsdp(arguments: Any) -> int:
    plugin = getattr(arguments, "fsdp_config", None) or {}
    return int(plugin.get("version", 1)) if getattr(arguments, "fsdp", None) else 0


def _loss_of_trainer(trainer: Any, batch: Any) -> LossOf:
    if not isinstance(batch, Mapping):
        return _over_completions(trainer)

    def loss(twin: nn.Module, inputs: Any) -> torch.Tensor:
        shadow = _shadow(trainer, twin)
        found = shadow.compute_loss(twin, inputs)
        return found if isinstance(found, torch.Tensor) else found[0]

    return LossOf(loss, dict(batch))


def _over_completions(trainer: Any) -> LossOf:
    """Prompts come without completions: a batch of token ids of the longest completion's length stands for them."""
    arguments = trainer.args
    rows = arguments.per_device_train_batch_size
    length = arguments.max_completion_length or 128
    ids = torch.zeros((rows, length), dtype=torch.long)

    def loss(twin: nn.Module, inputs: Any) -> torch.Tensor:
        logits = twin(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
        return -torch.log_softmax(logits.float(), -1)[..., 0].mean()

    return LossOf(loss, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})


def _shadow(trainer: Any, twin: nn.Module) -> Any:
    """The trainer with the twin in place of its model and metrics of its own."""
    shadow = copy.copy(trainer)
    shadow.model = shadow.model_wrapped = twin
    for name in ("_metrics", "_stored_metrics", "state"):
        if name in vars(shadow):
            setattr(shadow, name, copy.deepcopy(getattr(trainer, name)))
    return shadow


# What accelerate says of a stream without a batch, and torch of a data set without a row.
_NO_DATA = ("does not contain any data", "num_samples should be a positive integer")


def _first_batch(trainer: Any) -> Any:
    with _order_kept():
        try:
            batch = next(iter(trainer.get_train_dataloader()), None)
        except ValueError as error:
            if not any(said in str(error) for said in _NO_DATA):
                raise
            batch = None
    if batch is None:
        raise UsageError(
            "nothing to check",
            [Problem("an empty train_dataset", "at least one batch", "give the trainer data")],
        )
    return batch


def before_first_step(
    model: nn.Module, arguments: Any, optimizer: Any, tell: Callable[[Report], None]
) -> None:
    """Check the step of a trainer that is already running, when its first batch for training reaches the model.

    Args:
        model: the trainer's.
        arguments: its TrainingArguments.
        optimizer: accelerate's, with its GradScaler.
        tell: hears of the report, before the forward of that batch runs; may raise.
    """
    from isotype.preflight.check import check

    def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
        if not (module.training and torch.is_grad_enabled()):
            return
        handle.remove()
        scaler = getattr(optimizer, "scaler", None)
        try:
            report = check(
                module,
                LossOf(partial(_call, len(args)), {**{str(i): arg for i, arg in enumerate(args)}, **kwargs}),
                device=arguments.device,
                autocast=_autocast(arguments),
                scaler=scaler is not None and scaler.is_enabled(),
                optimizer=getattr(arguments.optim, "value", arguments.optim),
                learning_rate=arguments.learning_rate,
                fsdp=_fsdp(arguments),
                verify=False,
                fold=True,
            )
        except Exception as error:  # noqa: BLE001 - a check never ends a training: the log says what it failed on
            said = f"{type(error).__name__}: {first_line(error)}"
            logger.warning("the step was not checked, because %s (%s)", said, line_of(error))
            return
        tell(report)

    handle = model.register_forward_pre_hook(hook, with_kwargs=True)


def _call(positional: int, model: nn.Module, given: Any) -> torch.Tensor:
    """The model on inputs whose first ones come by position."""
    values = list(given.values())[:positional]
    return loss_of(model(*values, **dict(list(given.items())[positional:])))


def is_assumed(finding: Finding, trace: Trace) -> bool:
    """Whether a finding rests on contracts that were not measured on the device."""
    broken = [call for call in trace.breaches() if call.module in finding.places and call.op == finding.op]
    return any(call.breach is not None and call.breach.assumed for call in broken)


@contextlib.contextmanager
def _order_kept() -> Iterator[None]:
    """The data loader is asked for its first batch; what it draws must not move the order of training."""
    import numpy

    python, arrays, tensors = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python)
        numpy.random.set_state(arrays)
        torch.set_rng_state(tensors)

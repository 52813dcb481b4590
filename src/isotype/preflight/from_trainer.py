"""Requests for the steps of transformers and TRL trainers: their model, first batch, loss and arguments."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from itertools import islice
from typing import Any

import torch
from torch import nn

from isotype.core.errors import UsageError
from isotype.core.random_states import random_states_kept
from isotype.model.loss import loss_of
from isotype.model.recompute import checkpointing
from isotype.model.shard import is_sharded
from isotype.records.request import LossOf, StepRequest, batches_ahead


def request_of_trainer(trainer: Any, inputs: Any = None) -> StepRequest:
    """Return the step of a trainer before `train()`: its loss on its first batch with its arguments.

    The trainer, its data order and the random states stay unchanged. For trainers with prompts only (GRPO,
    RLOO) the forward and backward over prompt and completion are traced, without generation and rewards.

    Args:
        trainer: of transformers or TRL.
        inputs: a batch in place of the first one, or a callable model -> loss in place of the trainer's
            loss.

    Raises:
        UsageError: it is no trainer, or it has no training data.
    """
    if not hasattr(trainer, "get_train_dataloader") or not hasattr(trainer, "model"):
        raise UsageError.of(
            "nothing to check",
            f"a {type(trainer).__name__}",
            "an nn.Module with its inputs, or a transformers or TRL trainer",
            "isotype.check(model, inputs)",
        )
    processes = _processes_of(trainer.model, trainer.args)
    shared = processes["fsdp"] or processes["devices"] > 1
    batches = [inputs] if inputs is not None else _first_batches(trainer, _PROCESSES if shared else 1)
    batch = batches[0]
    own_loss = inputs is None or isinstance(inputs, Mapping)
    told: Any = True
    if own_loss:
        told = (
            _with_count(trainer, batch) if isinstance(batch, Mapping) else _prompts_and_completions(trainer)
        )
    request = _request(trainer.model, _loss_of_trainer(trainer, batch) if own_loss else inputs, trainer.args)
    return replace(
        request,
        wiring=told,
        others=batches[1:] if isinstance(batch, Mapping) else (),
        scaler=_has_scaler(trainer),
        gradient_checkpointing=checkpointing(trainer.args),
        evaluation=_evaluation(trainer) if inputs is None else None,
        reference=None if getattr(trainer, "ref_model", None) is None else "weights",
    )


def _with_count(trainer: Any, batch: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the batch with the label count that the trainer passes to its model, for two such micro-batches."""
    labels = batch.get("labels")
    if not getattr(trainer, "model_accepts_loss_kwargs", False) or not isinstance(labels, torch.Tensor):
        return batch
    return {**batch, "num_items_in_batch": 2 * (labels != -100).sum()}


def _evaluation(trainer: Any) -> LossOf | None:
    """Return an evaluation batch of the trainer with its loss; None if it does not evaluate."""
    held = getattr(trainer, "eval_dataset", None)
    if trainer.args.eval_strategy == "no" or held is None:
        return None
    held = next(iter(held.values()), None) if isinstance(held, dict) else held
    with random_states_kept():
        batch = next(iter(trainer.get_eval_dataloader(held)), None)
    return _loss_of_trainer(trainer, batch) if isinstance(batch, Mapping) else None


def request_of_first_step(
    model: nn.Module, call: tuple[Sequence[Any], Mapping[str, Any]], arguments: Any, optimizer: Any
) -> StepRequest:
    """Return the step of a running trainer, when its first training batch reaches the model.

    Args:
        model: the trainer's.
        call: positional and keyword arguments of its forward.
        arguments: the trainer's TrainingArguments.
        optimizer: accelerate's, with its GradScaler.
    """
    args, kwargs = call
    named = {**{str(i): arg for i, arg in enumerate(args)}, **kwargs}
    scaler = getattr(optimizer, "scaler", None)
    request = _request(model, LossOf(partial(_call, len(args)), named), arguments)
    return replace(request, scaler=scaler is not None and scaler.is_enabled(), fold=True)


def _request(model: nn.Module, loss: Any, arguments: Any) -> StepRequest:
    return StepRequest(
        model,
        loss,
        device=arguments.device,
        autocast=_autocast(arguments),
        optimizer=getattr(arguments.optim, "value", arguments.optim),
        learning_rate=arguments.learning_rate,
        accumulates=arguments.gradient_accumulation_steps,
        ahead=batches_ahead(arguments.gradient_accumulation_steps, torch.device(arguments.device).type),
        **_processes_of(model, arguments),
    )


def _processes_of(model: nn.Module, arguments: Any) -> dict[str, Any]:
    """Return how processes train together: as the model is sharded, else as accelerate will shard it.

    accelerate 1.15 does not shard frozen integer weights (`fsdp2_prepare_model` in
    accelerate/utils/fsdp_utils.py).
    """
    sharded: Any = next((each for each in model.parameters() if is_sharded(each)), None)
    if sharded is not None:
        integers = [each for each in model.parameters() if not each.is_floating_point()]
        return {
            "fsdp": 2,
            "devices": sharded.device_mesh.size(),
            "shard_integers": all(is_sharded(each) for each in integers),
        }
    config = arguments.fsdp_config if isinstance(getattr(arguments, "fsdp_config", None), Mapping) else {}
    return {
        "fsdp": fsdp_version(arguments),
        "devices": arguments.world_size,
        "reshard": str(config.get("reshard_after_forward", True)).lower() in ("true", "1", "full_shard"),
        "shard_integers": False,
        "zero3": _zero3(arguments),
        "find_unused": arguments.world_size > 1 and _finds_unused(arguments),
    }


def _zero3(arguments: Any) -> str:
    """Return the version of the DeepSpeed whose ZeRO-3 shards the run; "" for none."""
    plugin = getattr(arguments, "deepspeed_plugin", None)
    return version("deepspeed") if plugin is not None and int(plugin.zero_stage) == 3 else ""


def _finds_unused(arguments: Any) -> bool:
    """Return whether DDP looks for parameters without a gradient.

    `_build_accelerator_args` and `_wrap_model` in transformers/trainer.py.
    """
    chosen = getattr(arguments, "ddp_find_unused_parameters", None)
    return not checkpointing(arguments) if chosen is None else bool(chosen)


def _autocast(arguments: Any) -> torch.dtype | bool:
    return torch.float16 if arguments.fp16 else torch.bfloat16 if arguments.bf16 else False


def _has_scaler(trainer: Any) -> bool:
    scaler = getattr(trainer.accelerator, "scaler", None)
    return bool(trainer.args.fp16) or (scaler is not None and scaler.is_enabled())


def fsdp_version(arguments: Any) -> int:
    """Return the FSDP version of TrainingArguments, 0 for none; transformers' default is 2.

    `_process_fsdp_args` in transformers/training_args.py.
    """
    if not getattr(arguments, "fsdp", None):
        return 0
    config = arguments.fsdp_config if isinstance(arguments.fsdp_config, Mapping) else {}
    return int(config.get("version", 2))


def _loss_of_trainer(trainer: Any, batch: Any) -> LossOf:
    if not isinstance(batch, Mapping):
        return _over_completions(trainer)

    def loss(twin: nn.Module, inputs: Any) -> torch.Tensor:
        shadow = _shadow(trainer, twin)
        loss_value = shadow.compute_loss(twin, inputs)
        return loss_value if isinstance(loss_value, torch.Tensor) else loss_value[0]

    return LossOf(loss, dict(batch))


def _over_completions(trainer: Any) -> LossOf:
    """Return a batch of token ids of the longest completion's length: prompts come without completions."""
    arguments = trainer.args
    rows = arguments.per_device_train_batch_size
    length = arguments.max_completion_length or 128
    ids = torch.zeros((rows, length), dtype=torch.long)

    def loss(twin: nn.Module, inputs: Any) -> torch.Tensor:
        # TRL 1.16 gives its trainers' models a forward that returns log-probabilities (`add_fused_lm_head`).
        log_probs: torch.Tensor = twin(**inputs, labels=inputs["input_ids"], fused_lm_head=True).log_probs
        return -log_probs.mean()

    return LossOf(loss, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})


def _prompts_and_completions(trainer: Any) -> dict[str, torch.Tensor]:
    """Return a copy of the trainer with the twin as its model and separate metrics."""
    vocabulary = trainer.model.get_input_embeddings().num_embeddings
    ids = (torch.arange(2 * 16) + vocabulary // 2).remainder(vocabulary).view(2, 16)
    mask, learned = torch.ones_like(ids), torch.zeros_like(ids)
    mask[0, :4] = mask[1, 12:] = 0
    learned[:, 8:] = 1
    padding = getattr(getattr(trainer, "processing_class", None), "pad_token_id", None) or 0
    return {"input_ids": ids.where(mask > 0, padding), "attention_mask": mask, "completion_mask": learned}


def _shadow(trainer: Any, twin: nn.Module) -> Any:
    """Return the model's loss on inputs, the first of them positional."""
    shadow = copy.copy(trainer)
    shadow.model = shadow.model_wrapped = twin
    for name in ("_metrics", "_stored_metrics", "state"):
        if name in vars(shadow):
            setattr(shadow, name, copy.deepcopy(getattr(trainer, name)))
    return shadow


# Errors of accelerate for a stream without a batch, and of torch for an empty data set.
_NO_DATA = ("does not contain any data", "num_samples should be a positive integer")


_PROCESSES = 8
"""Batches that are compared: those of as many processes, or steps, of a sharded training."""


def _first_batches(trainer: Any, most: int) -> list[Any]:
    with random_states_kept():  # the data loader must not change the order of training
        try:
            batches = list(islice(trainer.get_train_dataloader(), most))
        except ValueError as error:
            if not any(message in str(error) for message in _NO_DATA):
                raise
            batches = []
    if not batches:
        raise UsageError.of(
            "nothing to check", "an empty train_dataset", "at least one batch", "give the trainer data"
        )
    return batches


def _call(positional: int, model: nn.Module, inputs: Any) -> torch.Tensor:
    """Return the model on inputs whose first ones come by position."""
    values = list(inputs.values())[:positional]
    return loss_of(model(*values, **dict(list(inputs.items())[positional:])))

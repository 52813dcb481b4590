"""Builds a request for one step of a trainer from its model, first batch, loss and arguments."""

import copy
from collections.abc import Mapping, Sequence, Sized
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from itertools import islice
from typing import Any

import torch
from torch import nn

from isotype.compat.peft import without_peft
from isotype.compat.trl import is_fused_forward, prompts_of
from isotype.core.errors import UsageError
from isotype.core.random_states import random_states_kept
from isotype.model.loss import loss_of
from isotype.model.recompute import checkpointing
from isotype.model.rollout import CACHES, rollout
from isotype.model.shard import is_sharded
from isotype.precision.devices.profile import device_profile
from isotype.records.request import LossOf, StepRequest


def request_of_trainer(trainer: Any, inputs: Any = None, device: Any = None) -> StepRequest:
    """Return the request for a trainer's first step with its loss and arguments. Call this before `train()`.

    This function does not change the trainer, its data order and the random states. If the data set has only prompts
    (GRPO, RLOO), the step is a forward and a backward over the first prompts. The completions have the maximum length,
    and no rewards are computed. Unless vLLM generates the completions, the step also generates one token, and the
    report contains the memory of this generation. With PEFT, the token is generated outside of autocast, as in the
    trainer.

    Args:
        inputs: a batch that replaces the trainer's first batch, or a function from the model to a loss that replaces the
            trainer's loss.
        device: the device or device profile for the check, or None for the trainer's device.

    Raises:
        UsageError: `trainer` is no trainer, or has no training data.
    """
    if not hasattr(trainer, "get_train_dataloader") or not hasattr(trainer, "model"):
        what, fix = f"a {type(trainer).__name__}", "isotype.check(model, inputs)"
        expected = "an nn.Module with its inputs, or a transformers or TRL trainer"
        raise UsageError.of("nothing to check", what, expected, fix)
    processes = _processes_of(trainer.model, trainer.args)
    shared = processes["fsdp"] or processes["devices"] > 1
    batches, of_epoch = [inputs], None
    if inputs is None:
        batches, of_epoch = _first_batches(trainer, _PROCESSES if shared else 1)
    batch = batches[0]
    wiring: Any = True
    loss, scaler = inputs, getattr(trainer.accelerator, "scaler", None)
    device = trainer.args.device if device is None else device
    on_cpu = device_profile(device).kind == "cpu"
    # accelerate 1.15 silently leaves out autocast and GradScaler for float16 on a CPU; isotype's trainers add both.
    scaled = bool(trainer.args.fp16) and (trainer.accelerator.native_amp or not on_cpu)
    if inputs is None or isinstance(inputs, Mapping):
        loss = _loss_of_trainer(trainer, batch)
        mapped = isinstance(batch, Mapping)
        wiring = _with_count(trainer, batch) if mapped else _prompts_and_completions(trainer)
    request = _request(trainer.model, loss, trainer.args, getattr(trainer, "optimizer", None))
    if not isinstance(batch, Mapping) and isinstance(loss, LossOf) and not trainer.args.use_vllm:
        token = partial(_generate, ids=loss.inputs["input_ids"][:, :1])
        request = replace(request, phases=(*request.phases, "generate"), generate=token)
        request = replace(request, autocast_eval=_generates_under_autocast(trainer))
    return replace(
        request,
        device=device,
        accumulates=min(filter(None, (of_epoch, trainer.args.gradient_accumulation_steps))),
        autocast=request.autocast if scaled or not trainer.args.fp16 else False,
        wiring=wiring,
        others=batches[1:] if isinstance(batch, Mapping) else (),
        scaler=scaled or (scaler is not None and scaler.is_enabled()),
        gradient_checkpointing=checkpointing(trainer.args),
        evaluation=_between_steps(trainer, batch) if inputs is None else None,
        reference=None if getattr(trainer, "ref_model", None) is None else "weights",
    )


def _with_count(trainer: Any, batch: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the batch. If the trainer passes `num_items_in_batch` to the model, add twice the number of labels in the batch.

    If TRL's fused head computes the loss, add `fused_lm_head`.
    """
    if is_fused_forward(without_peft(trainer.model).forward):
        batch = {**batch, "fused_lm_head": True}
    labels = batch.get("labels")
    if not getattr(trainer, "model_accepts_loss_kwargs", False) or not isinstance(labels, torch.Tensor):
        return batch
    return {**batch, "num_items_in_batch": 2 * (labels != -100).sum()}


def _between_steps(trainer: Any, first: Any) -> LossOf | None:
    """Return the loss over an evaluation batch. Without evaluation, return the generation for the prompts `first`, or None."""
    rows = getattr(trainer, "eval_dataset", None)
    if trainer.args.eval_strategy == "no" or rows is None:
        return None if isinstance(first, Mapping) else _rollout(trainer, first)
    rows = next(iter(rows.values()), None) if isinstance(rows, dict) else rows
    with random_states_kept():
        loader = trainer.get_eval_dataloader(rows)
        batch = next(iter(loader), None)
    if not isinstance(batch, Mapping):
        return None if isinstance(first, Mapping) else _rollout(trainer, max(first, batch or [], key=len))
    # If a function shortens the predictions, little is stored. Generated tokens are small, too.
    small = trainer.preprocess_logits_for_metrics or getattr(trainer.args, "predict_with_generate", False)
    if trainer.compute_metrics is None or trainer.args.prediction_loss_only or small:
        return _loss_of_trainer(trainer, batch)
    known = (len(loader) if isinstance(rows, Sized) else None, trainer.args.eval_accumulation_steps)
    batches = min(filter(None, known), default=1)
    gathered = batches * trainer.args.world_size
    # Each batch is appended to a copy of all batches before it.
    return LossOf(
        partial(_predictions, trainer),
        dict(batch),
        kept=gathered + (gathered - 1 if trainer.args.eval_do_concat_batches and batches > 1 else -1),
    )


def _predictions(trainer: Any, twin: nn.Module, inputs: Any) -> list[Any]:
    """Return the outputs that `Trainer.evaluation_loop` stores for metrics (`prediction_step` in transformers/trainer.py)."""
    from accelerate.utils import convert_to_fp32

    _, outputs = _shadow(trainer, twin).compute_loss(twin, inputs, return_outputs=True)
    if trainer.args.bf16 or trainer.args.fp16:
        outputs = convert_to_fp32(outputs)  # as accelerate does after each forward under autocast
    if not isinstance(outputs, dict):
        return list(outputs[1:])
    ignored = getattr(getattr(twin, "config", None), "keys_to_ignore_at_inference", CACHES)
    return [value for name, value in outputs.items() if name not in ("loss", *ignored)]


def request_of_first_step(
    model: nn.Module, call: tuple[Sequence[Any], Mapping[str, Any]], arguments: Any, optimizer: Any
) -> StepRequest:
    """Return the request for the first step of a running trainer, at the first call of its model.

    Args:
        call: positional and keyword arguments with which the model was called.
        optimizer: accelerate's wrapper of the optimizer. It has the GradScaler.
    """
    args, kwargs = call
    named = {**{str(i): arg for i, arg in enumerate(args)}, **kwargs}
    scaler = getattr(optimizer, "scaler", None)
    request = _request(model, LossOf(partial(_call, len(args)), named), arguments, optimizer)
    return replace(request, scaler=scaler is not None and scaler.is_enabled(), fold=True)


def _request(model: nn.Module, loss: Any, arguments: Any, optimizer: Any) -> StepRequest:
    optimizer = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps the optimizer in a training
    # An existing optimizer decides, with its state, class and rates; the name in the arguments does not count.
    known = isinstance(optimizer, torch.optim.Optimizer)
    return StepRequest(
        model,
        loss,
        device=arguments.device,
        autocast=torch.float16 if arguments.fp16 else torch.bfloat16 if arguments.bf16 else False,
        optimizer=optimizer if known else getattr(arguments.optim, "value", arguments.optim),
        learning_rate=None if known else arguments.learning_rate,
        accumulates=arguments.gradient_accumulation_steps,
        fetches_all=True,
        **_processes_of(model, arguments),
    )


def _processes_of(model: nn.Module, arguments: Any) -> dict[str, Any]:
    """Return the fields of a request that describe FSDP, DeepSpeed and DDP.

    If the model is not sharded yet, the fields describe how accelerate will shard the model. accelerate 1.15 does not
    shard frozen integer weights (`fsdp2_prepare_model` in accelerate/utils/fsdp_utils.py).
    """
    sharded: Any = next(filter(is_sharded, model.parameters()), None)
    if sharded is not None:
        integers = [parameter for parameter in model.parameters() if not parameter.is_floating_point()]
        return {
            "fsdp": 2,
            "devices": sharded.device_mesh.size(),
            "shard_integers": all(map(is_sharded, integers)),
        }
    config = arguments.fsdp_config if isinstance(getattr(arguments, "fsdp_config", None), Mapping) else {}
    # The rule is that of `_build_accelerator_args` and `_wrap_model` in transformers/trainer.py.
    unused = getattr(arguments, "ddp_find_unused_parameters", None)
    plugin = getattr(arguments, "deepspeed_plugin", None)
    return {
        "fsdp": fsdp_version(arguments),
        "devices": arguments.world_size,
        "reshard": str(config.get("reshard_after_forward", True)).lower() in ("true", "1", "full_shard"),
        "shard_integers": False,
        "deepspeed": plugin is not None,
        "zero3": version("deepspeed") if plugin is not None and int(plugin.zero_stage) == 3 else "",
        "find_unused": arguments.world_size > 1
        and bool(not checkpointing(arguments) if unused is None else unused),
    }


def fsdp_version(arguments: Any) -> int:
    """Return the FSDP version of TrainingArguments, or 0 (`_process_fsdp_args` in transformers/training_args.py)."""
    if not getattr(arguments, "fsdp", None):
        return 0
    config = arguments.fsdp_config if isinstance(arguments.fsdp_config, Mapping) else {}
    return int(config.get("version", 2))


def _loss_of_trainer(trainer: Any, batch: Any) -> LossOf:
    if not isinstance(batch, Mapping):
        return _over_completions(trainer, batch)

    def loss(twin: nn.Module, inputs: Any) -> torch.Tensor:
        loss_value = _shadow(trainer, twin).compute_loss(twin, inputs)
        return loss_value if isinstance(loss_value, torch.Tensor) else loss_value[0]

    return LossOf(loss, dict(batch))


def _over_completions(trainer: Any, rows: Sequence[Any]) -> LossOf:
    """Return the loss over the prompts of the rows, each followed by a completion of the maximum length."""
    length = _completion(trainer)
    prompts = prompts_of(trainer, rows[: trainer.args.per_device_train_batch_size])
    if prompts is None:
        ids = torch.zeros((trainer.args.per_device_train_batch_size, 1), dtype=torch.long)
        prompts = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    shape = prompts["input_ids"].shape
    inputs = {
        name: nn.functional.pad(value, (0, length), value=int(name == "attention_mask"))
        if value.shape == shape and not value.is_floating_point()
        else value
        for name, value in prompts.items()
    }

    def loss(twin: nn.Module, inputs: Any) -> torch.Tensor:
        labels = inputs["input_ids"].clone()
        labels[:, :-length] = -100
        # TRL 1.16 gives the models of its trainers a forward that returns log-probabilities (`add_fused_lm_head`).
        log_probs: torch.Tensor = twin(**inputs, labels=labels, fused_lm_head=True).log_probs
        return -log_probs[:, -length:].mean()

    return LossOf(loss, inputs)


def _completion(trainer: Any) -> int:
    return trainer.args.max_completion_length or 128


def _rollout(trainer: Any, rows: Sequence[Any]) -> LossOf | None:
    """Return the generation of completions for the rows; None if vLLM or a function of the user generates the completions."""
    prompts = None if trainer.args.use_vllm else prompts_of(trainer, rows)
    if prompts is None:
        return None
    generated = rollout(prompts, _completion(trainer))

    def generate(twin: nn.Module, inputs: Any) -> Any:
        enabled = torch.is_autocast_enabled("cpu") and _generates_under_autocast(trainer)
        with torch.autocast("cpu", enabled=enabled):
            return generated.function(twin, inputs)

    return replace(generated, function=generate)


def _generates_under_autocast(trainer: Any) -> bool:
    """Return True if completions are generated under accelerate's autocast. With PEFT, the base model generates without this autocast."""
    return not hasattr(trainer.model, "peft_config")


def _generate(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=ids).logits
    return logits


def _prompts_and_completions(trainer: Any) -> dict[str, torch.Tensor]:
    """Return a batch of two prompts with completions and padding. Only the completions have labels."""
    vocabulary = trainer.model.get_input_embeddings().num_embeddings
    ids = (torch.arange(2 * 16) + vocabulary // 2).remainder(vocabulary).view(2, 16)
    mask, learned = torch.ones_like(ids), torch.zeros_like(ids)
    mask[0, :4] = mask[1, 12:] = 0
    learned[:, 8:] = 1
    padding = getattr(getattr(trainer, "processing_class", None), "pad_token_id", None) or 0
    return {"input_ids": ids.where(mask > 0, padding), "attention_mask": mask, "completion_mask": learned}


def _shadow(trainer: Any, twin: nn.Module) -> Any:
    """Return a copy of the trainer with the model `twin`, and with copies of the trainer's metrics and state."""
    shadow = copy.copy(trainer)
    shadow.model = shadow.model_wrapped = twin
    for name in ("_metrics", "_stored_metrics", "state"):
        if name in vars(shadow):
            setattr(shadow, name, copy.deepcopy(getattr(trainer, name)))
    return shadow


# Errors of accelerate for a data stream without a batch, and of torch for an empty data set.
_NO_DATA = ("does not contain any data", "num_samples should be a positive integer")
_PROCESSES = 8
"""Number of batches that a check compares to predict differences between processes."""


def _first_batches(trainer: Any, most: int) -> tuple[list[Any], int | None]:
    """Return at most `most` batches, and the number of batches in an epoch (None for a data stream)."""
    from transformers.trainer_utils import has_length

    with random_states_kept():  # the data loader must not change the order of training
        try:
            loader = trainer.get_train_dataloader()
            batches = list(islice(loader, most))
        except ValueError as error:
            if not any(message in str(error) for message in _NO_DATA):
                raise
            batches = []
    if not batches:
        what = "an empty train_dataset"
        raise UsageError.of("nothing to check", what, "at least one batch", "give the trainer data")
    return batches, len(loader) if has_length(loader) else None


def _call(positional: int, model: nn.Module, inputs: Any) -> torch.Tensor:
    """Call the model and return the loss. The first `positional` inputs are passed as positional arguments."""
    values = list(inputs.values())[:positional]
    return loss_of(model(*values, **dict(list(inputs.items())[positional:])))

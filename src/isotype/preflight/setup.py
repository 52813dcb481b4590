"""The settings of a requested step, with all defaults, and errors about invalid arguments."""

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import nn

from isotype.compat.peft import without_peft
from isotype.compat.transformers import attention_of
from isotype.core.dtypes import parse_dtype
from isotype.core.errors import Problem, UsageError
from isotype.core.names import plain_name
from isotype.core.optimizers import (
    class_of,
    learning_rate_of,
    names_instead,
    optimizers_in,
    unknown_optimizer,
    updates_of,
)
from isotype.core.pretrained import saved_dtype
from isotype.model.adapters import adapter_words
from isotype.model.enforce import policy_of
from isotype.model.parts import towers_of
from isotype.model.shard import uncopied
from isotype.model.walk import STANDS_FOR
from isotype.precision.by_ranges import known_ranges
from isotype.precision.devices.profile import device_profile
from isotype.precision.versions import incompatible_here
from isotype.records.memory import BETWEEN_STEPS, PHASES
from isotype.records.request import LossOf, Setup, StepRequest, StepSettings, named_inputs
from isotype.trace.sides import tallies, whole
from isotype.trace.weights import unread_weights


def setup_of(request: StepRequest) -> Setup:
    """Return the settings of the step, with all defaults filled in.

    Raises:
        UsageError: lists all invalid arguments.
        PrecisionError: an unknown device or dtype.
    """
    problems = list(_problems(request))
    if problems:
        raise UsageError("the step cannot be checked with these arguments", problems)
    policy = request.policy or policy_of(request.model)
    if policy is not None and policy.keep_frozen:
        policy = None
    requested = policy.autocast if request.autocast is None and policy is not None else request.autocast
    autocast = None if requested in (None, False) else parse_dtype(requested)  # type: ignore[arg-type]
    decided = policy.compute if policy is not None else autocast
    config = getattr(request.model, "config", None)
    device = policy.device if request.device is None and policy is not None else request.device
    profile = device_profile("auto" if device is None else device)
    optimizer, checkpointing = request.optimizer, request.gradient_checkpointing
    inputs = named_inputs(request.inputs)
    optimizers = [names_instead(part, request.model) for part in optimizers_in(optimizer)]
    kinds = map(class_of, optimizers or [optimizer])
    rate = request.learning_rate
    micro_batches = 2 if request.accumulates is True else int(request.accumulates)
    evaluation = request.evaluation
    between = [evaluation.between if isinstance(evaluation, LossOf) else "evaluate"]
    phases = {*request.phases, *(between if evaluation is not None else ())}
    names = {id(module): plain_name(name) for name, module in request.model.named_modules()}
    return Setup(
        **{field.name: getattr(request, field.name) for field in fields(StepSettings)},
        profile=profile,
        autocast=autocast,
        scaler=autocast == torch.float16 if request.scaler is None else request.scaler,
        optimizer=optimizer if isinstance(optimizer, str) else " and ".join(kinds),
        compute=decided or compute_dtype(request.model),
        learning_rate=learning_rate_of(*optimizers) if optimizers and rate is None else rate,
        updates={
            n: (kind, group_rate if rate is None else rate)
            for n, (kind, group_rate) in updates_of(optimizers).items()
        },
        phases=tuple(phase for phase in PHASES if phase in phases),
        policy=policy,
        gradient_checkpointing={} if checkpointing is True else checkpointing or None,
        checkpoint_dtype=saved_dtype(config),
        attention=attention_of(config),
        accumulates=micro_batches,
        # accelerate's loader fetches one batch more, which stays in the host's memory.
        ahead=max(1, micro_batches) - 1 + (profile.kind == "cpu") if request.fetches_all else 0,
        batch={
            name: tuple(value.shape)
            for name, value in inputs.items()
            if isinstance(value, torch.Tensor) and not value.is_nested
        },
        towers=tuple(names[id(tower)] for _, tower in towers_of(without_peft(request.model))),
        details=(
            *adapter_words(request.model),
            _checkpointing_words(request),
            *_padding_words(request.inputs),
        ),
        incompatible=incompatible_here() if profile.present else (),
        family_ranges=known_ranges(str(getattr(config, "model_type", ""))),
    )


def _problems(request: StepRequest) -> Iterator[Problem]:
    yield from unknown_optimizer(request.optimizer)
    inputs = request.inputs
    if not callable(inputs) and not isinstance(inputs, (Mapping, LossOf)) and not hasattr(inputs, "keys"):
        what = f"inputs of type {type(inputs).__name__}"
        expected = "the dict of arguments of the model (labels included), or a callable model -> loss"
        yield Problem(what, expected, "isotype.check(model, {'input_ids': …, 'labels': …})")
    if why := uncopied(request.model):
        fix = "check the model before FSDP1 or DeepSpeed wraps it"
        yield Problem(f"a {type(request.model).__name__}", f"a model whose copy can run, but {why}", fix)
    if not isinstance(request.devices, int) or request.devices < 1:
        fix = "set it to 1, or omit it"
        yield Problem(f"devices={request.devices!r}", "a number of devices, at least 1", fix)
    unknown = [phase for phase in request.phases if phase not in PHASES]
    if unknown:
        phases = (phase for phase in PHASES if phase not in BETWEEN_STEPS)
        yield Problem(f"phases {unknown}", f"of {', '.join(phases)}", "omit them")


def _checkpointing_words(request: StepRequest) -> str:
    settings = request.gradient_checkpointing
    modules = [item for item in request.model.named_modules() if hasattr(item[1], "gradient_checkpointing")]
    numbered = (module for name, module in modules if name.rpartition(".")[2].isdigit())
    layers = [m.gradient_checkpointing is True for m in numbered for _ in range(getattr(m, STANDS_FOR, 1))]
    if isinstance(settings, Mapping):
        layers = [at % settings.get("every_n_layers", 1) == 0 for at in range(len(layers))]
    if 0 < sum(layers) < len(layers):
        return f"gradient checkpointing of {sum(layers)} of {len(layers)} layers"
    on = settings or any(module.gradient_checkpointing is True for _, module in modules)
    return "gradient checkpointing" if on else "no gradient checkpointing"


def _padding_words(inputs: Any) -> Iterator[str]:
    """If more than a tenth of all columns contain only padding, yield a clause about them."""
    mask = named_inputs(inputs).get("attention_mask")
    if type(mask) is torch.Tensor and mask.ndim == 2 and not mask.is_meta:
        empty = int((mask == 0).all(0).sum())
        if 10 * empty > mask.shape[1]:
            yield f"{empty:,} of {mask.shape[1]:,} columns are only padding"


def compute_dtype(model: nn.Module) -> torch.dtype:
    """Return the weight dtype of most modules. If several dtypes have equally many modules, return the one with more elements."""
    return whole(tallies(unread_weights(model))) or torch.float32

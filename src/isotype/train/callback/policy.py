"""The policy of a model in a script, and disagreements with its optimizer, its GradScaler or the trained values.

It is the model's policy, else one derived from its dtypes and the trainer's arguments.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import torch

from isotype.checkpoint.opened import facts_of
from isotype.checkpoint.resolve import resolve_precision
from isotype.core.dtypes import dtype_name
from isotype.core.errors import PrecisionError
from isotype.model.enforce import policy_of
from isotype.model.walk import own_float_parameters, places
from isotype.precision.policy import PrecisionPolicy


def policy_that_binds(model: Any) -> PrecisionPolicy | None:
    """Return the model's policy; None if it was only derived for another run."""
    policy = policy_of(model)
    return None if policy is None or policy.keep_frozen else policy


def policy_of_current_dtypes(model: Any, args: Any) -> PrecisionPolicy:
    """Return the policy of a model that has none, in a trainer with these arguments.

    Storage is the quantization format, else the dtype of most float weights (trainable ones count as float32
    masters). Compute is the dtype of `fp16` or `bf16`, else bitsandbytes' compute dtype, else the storage. Frozen
    weights are never cast.

    Raises:
        PrecisionError: invalid policy, or 16-bit weights would meet float32 ones without autocast.
    """
    elements = _elements_by_dtype(model)
    most = max(elements, key=lambda dtype: elements[dtype], default=torch.float32)
    saved = facts_of(model).quantization
    asked = torch.float16 if args.fp16 else torch.bfloat16 if args.bf16 else None
    compute = asked or (saved.compute_dtype if saved else None) or most
    trainable = "lora" if getattr(model, "peft_config", None) else "full"
    others = [dtype for dtype in elements if dtype != torch.float32]
    if trainable == "full" and compute == torch.float32 and others:
        raise PrecisionError.of(
            "weights of different dtypes and no autocast",
            f"frozen weights in {dtype_name(others[0])} among float32 masters",
            "one dtype, or autocast between them",
            "train with bf16=True or fp16=True, or load the model in float32",
        )
    policy = resolve_precision(
        model,
        dtype=compute,
        device=args.device,
        trainable=trainable,
        storage=most if trainable == "lora" and saved is None else None,
    )
    return replace(
        policy,
        storage=policy.storage if policy.quantized else dtype_name(most),
        keep_frozen=True,
        routers=False,
        reasons={**policy.reasons, "storage": "as the model has it; no frozen weight is recast"},
        warnings=(),
    )


def _elements_by_dtype(model: Any) -> Counter[torch.dtype]:
    """Count elements of the base's float weights by dtype; trainable ones count as float32 masters."""
    elements: Counter[torch.dtype] = Counter()
    for place in places(model):
        if not place.adapter:
            for parameter in own_float_parameters(place.module).values():
                elements[torch.float32 if parameter.requires_grad else parameter.dtype] += parameter.numel()
    return elements


def optimizer_error(optimizer: Any, master: torch.dtype) -> PrecisionError | None:
    """Return the error if a parameter or a state tensor of `optimizer` is not in the master dtype, else None."""
    problems = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            tensors = {"parameter": parameter, **optimizer.state.get(parameter, {})}
            for name, tensor in tensors.items():
                if _is_moment(name, tensor) and tensor.dtype != master:
                    problems.append((name, dtype_name(tensor.dtype), tuple(parameter.shape)))
    if not problems:
        return None
    name, dtype, shape = problems[0]
    return PrecisionError.of(
        f"{len(problems)} optimizer tensors are not in {dtype_name(master)}",
        f"{name} of a parameter of shape {shape} is {dtype}",
        f"{dtype_name(master)}, the policy's master dtype",
        "build the optimizer after isotype.enforce(model, policy)",
    )


def raise_optimizer_state(optimizer: Any, master: torch.dtype) -> None:
    """Cast float state tensors of `optimizer` to `master`; the step refuses other dtypes."""
    for parameter, state in optimizer.state.items():
        for name, tensor in state.items():
            if _is_moment(name, tensor) and tensor.dtype != master and parameter.dtype == master:
                state[name] = tensor.to(master)


def _is_moment(name: str, tensor: Any) -> bool:
    # Quantized optimizers keep uint8 state with its own constants; `step` counts in float32.
    return torch.is_tensor(tensor) and tensor.is_floating_point() and name != "step"


def scaler_error(optimizer: Any, policy: PrecisionPolicy) -> PrecisionError | None:
    """Return the error if a GradScaler is missing or not allowed, else None."""
    scaler = getattr(optimizer, "scaler", None)
    active = scaler is not None and scaler.is_enabled()
    if active == policy.loss_scaling:
        return None
    compute = dtype_name(policy.compute)
    if policy.loss_scaling:
        what, fix = (
            "no GradScaler",
            (
                "build the trainer with fp16=True and call isotype.enforce(trainer, policy) before trainer.train() "
                "(on a CPU, accelerate makes no GradScaler by itself)"
            ),
        )
    else:
        what, fix = "a GradScaler", "build the trainer with fp16=False"
    return PrecisionError.of(
        "the trainer and the policy disagree about loss scaling",
        f"{what} with compute dtype {compute}",
        "a GradScaler with float16 compute and with nothing else",
        fix,
    )


def rounded_error(model: Any, master: torch.dtype) -> PrecisionError | None:
    """Return the error if the resumed values were rounded on loading, else None.

    `model.load_adapter` copies into the parameters first and then makes them float32, so only their values show it.
    The trainable parameters are in the `master` dtype already.
    """
    rounded = _rounded_to(model) if master == torch.float32 else None
    if rounded is None:
        return None
    return PrecisionError.of(
        "the values this run goes on from were rounded while they were loaded",
        f"trainable parameters hold no more digits than {dtype_name(rounded)}",
        f"{dtype_name(master)} values, as they were saved",
        "call isotype.enforce(trainer, isotype.PrecisionPolicy.read(checkpoint)) before "
        "trainer.train(resume_from_checkpoint=checkpoint): the parameters are then float32 when they are loaded",
    )


def _rounded_to(model: Any) -> torch.dtype | None:
    """Return the 16-bit dtype that represents all trainable values exactly, else None."""
    trainable = [p.detach() for p in model.parameters() if p.requires_grad and p.is_floating_point()]
    for dtype in (torch.bfloat16, torch.float16):
        if trainable and all(torch.equal(p, p.to(dtype).to(p.dtype)) for p in trainable):
            return dtype
    return None

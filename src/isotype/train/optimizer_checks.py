"""What of an optimizer, its GradScaler or the trained values disagrees with a policy."""

from __future__ import annotations

from typing import Any

import torch

from isotype.core.dtypes import dtype_name
from isotype.core.errors import PrecisionError
from isotype.precision.policy import PrecisionPolicy


def optimizer_error(optimizer: Any, master: torch.dtype) -> PrecisionError | None:
    """The error where a parameter or a state tensor of `optimizer` is not in the master dtype, or None."""
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
    """Float state tensors of `optimizer` in another dtype are cast to `master`: the step would refuse them."""
    for parameter, state in optimizer.state.items():
        for name, tensor in state.items():
            if _is_moment(name, tensor) and tensor.dtype != master and parameter.dtype == master:
                state[name] = tensor.to(master)


def _is_moment(name: str, tensor: Any) -> bool:
    # Quantized optimizers keep uint8 state with its own constants; `step` counts in float32.
    return torch.is_tensor(tensor) and tensor.is_floating_point() and name != "step"


def scaler_error(optimizer: Any, policy: PrecisionPolicy) -> PrecisionError | None:
    """The error where a GradScaler is missing or one too many, or None."""
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
    """The error for a run that goes on from values that were rounded while they were loaded, or None.

    `model.load_adapter` copies into the parameters as they are and only then makes them float32, so their dtype
    says nothing afterwards; their values do.

    Args:
        model: its trainable parameters are in the master dtype already.
        master: the policy's master dtype.
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
    """The 16-bit dtype that holds every trainable value exactly, or None: values that were trained need more."""
    trainable = [p.detach() for p in model.parameters() if p.requires_grad and p.is_floating_point()]
    for dtype in (torch.bfloat16, torch.float16):
        if trainable and all(torch.equal(p, p.to(dtype).to(p.dtype)) for p in trainable):
            return dtype
    return None

"""What one set-up of a foreign code base is, and the usual ways in which people break one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

Loss = Callable[[nn.Module], torch.Tensor]
HALVES = (torch.bfloat16, torch.float16)
SHORT = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


@dataclass
class Step:
    """One training step as its owner would write it.

    Attributes:
        model: in the dtype it is trained in.
        inputs: what the model is called with, or a callable model -> loss.
        autocast: dtype of autocast around forward and loss.
        scaler: whether a GradScaler scales the loss.
        optimizer: a name in `tests.reality.OPTIMIZERS`, or a callable parameters -> optimizer.
    """

    model: nn.Module
    inputs: Mapping[str, Any] | Loss
    autocast: torch.dtype | None = None
    scaler: bool = False
    optimizer: Any = "adamw"


Build = Callable[[torch.dtype], Step]
"""Makes a code base's model and batch in a dtype; random states are set before each call."""


@dataclass(frozen=True)
class Case:
    """One set-up.

    Attributes:
        name: what it is.
        build: makes it, the same each time.
        cause: a pattern of the cause that a finding has to name where the real step raises; "" for a healthy one.
    """

    name: str
    build: Callable[[], Step]
    cause: str = ""


def healthy(build: Build, *kinds: str) -> Iterator[Case]:
    """Set-ups without a fault: `float32`, `bfloat16`, `float16`, `autocast` (bfloat16) or `scaled` (float16)."""
    dtypes = {name: dtype for dtype, name in SHORT.items()}
    for kind in kinds or ("float32", "bfloat16", "autocast", "scaled"):
        if kind in dtypes:
            yield Case(f"all {kind}", partial(build, dtypes[kind]))
        else:
            dtype = torch.float16 if kind == "scaled" else torch.bfloat16
            yield Case(f"autocast {SHORT[dtype]}", partial(_under_autocast, build, dtype))


def _under_autocast(build: Build, dtype: torch.dtype) -> Step:
    return replace(build(torch.float32), autocast=dtype, scaler=dtype == torch.float16)


def broken(
    name: str,
    cause: str,
    build: Build,
    dtype: torch.dtype,
    fault: Callable[[nn.Module], object],
    **settings: Any,
) -> Case:
    """`build` in `dtype` after `fault` has changed its model; `settings` of the step (autocast, scaler, …)."""

    def made() -> Step:
        step = replace(build(dtype), **settings)
        fault(step.model)
        return step

    return Case(name, made, cause)


def cast(name: str, dtype: torch.dtype) -> Callable[[nn.Module], object]:
    """The fault: the module, parameter or buffer `name` is in `dtype`."""

    def fault(model: nn.Module) -> None:
        modules = dict(model.named_modules())
        if name in modules:
            modules[name].to(dtype)
            return
        module, _, own = name.rpartition(".")
        holder = modules[module]
        if own in holder._buffers:
            setattr(holder, own, getattr(holder, own).to(dtype))
        else:
            tensor = getattr(holder, own)
            tensor.data = tensor.data.to(dtype)

    return fault


def cast_norms(dtype: torch.dtype) -> Callable[[nn.Module], object]:
    """The fault that kept norms "for stability": what modules with "norm" in their class's name hold is in `dtype`."""

    def fault(model: nn.Module) -> None:
        for module in model.modules():
            if "norm" in type(module).__name__.lower():
                for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                    if tensor.is_floating_point():
                        tensor.data = tensor.data.to(dtype)

    return fault


def with_lora(build: Build, targets: list[str] | str, **options: Any) -> Build:
    """`build` with PEFT's LoRA on `targets`; `options` go to `get_peft_model`."""

    def made(dtype: torch.dtype) -> Step:
        from peft import LoraConfig, get_peft_model

        step = build(dtype)
        config = LoraConfig(r=4, target_modules=targets, init_lora_weights=False)
        return replace(step, model=get_peft_model(step.model, config, **options))

    return made

"""Real traces of tiny models for the tests of rules, and the same trace on another device."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

import isotype.preflight.check
from isotype.precision.devices.profile import device_profile
from isotype.preflight.setup import compute_dtype
from isotype.records.finding import Finding
from isotype.records.memory import Phase
from isotype.records.request import Setup, StepRequest
from isotype.records.trace import Trace
from isotype.rules import all_rules
from isotype.rules.kit.groups import code_of
from isotype.trace.fake.step import trace_step
from tests import cpus
from tests.models import one_layer, tiny_batch, tiny_model

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
WHOLE: tuple[Phase, ...] = ("forward", "backward", "unscale", "optimizer")


def traced(
    model: nn.Module,
    inputs: Any,
    autocast: torch.dtype | None = None,
    phases: tuple[Phase, ...] = WHOLE,
) -> Trace:
    """One step of `model` on fake tensors, seen from this CPU; no rule looks at it."""
    setup = Setup(
        profile=device_profile("cpu"),
        autocast=autocast,
        scaler=autocast == FP16,
        optimizer="adamw",
        compute=autocast or compute_dtype(model),
        phases=phases,
    )
    return trace_step(StepRequest(model, inputs), setup)


def of_llama(dtype: torch.dtype = BF16, lora: bool = True, autocast: torch.dtype | None = None) -> Trace:
    """One step of `llama(dtype, lora)` on `batch()`, traced once: no rule changes a trace."""
    return _of_llama(dtype, lora, autocast, cpus.seen())


@functools.cache
def _of_llama(dtype: torch.dtype, lora: bool, autocast: torch.dtype | None, cpu: str) -> Trace:
    return traced(llama(dtype, lora), batch(), autocast)


def verified(model: nn.Module, inputs: Any, code: str, **options: Any) -> list[Finding]:
    """The findings of one code of a forward and a backward with their fixes tried; no such code is one of what `check` measures in a small copy."""
    options = {"phases": WHOLE[:2], **options}
    report = isotype.preflight.check.check(model, inputs, device="cpu", wiring=False, **options)
    return [finding for finding in report.findings if finding.code == code]


def on(trace: Trace, device: str, **setup: Any) -> Trace:
    """The same step as it is judged for a named device; `setup` changes other fields."""
    return replace(trace, setup=replace(trace.setup, profile=device_profile(device), **setup))


def found(name: str, trace: Trace) -> list[Finding]:
    """What the rule in the file `name` finds."""
    return list(next(rule for rule in all_rules() if rule.code == code_of(name)).find(trace))


def llama(dtype: torch.dtype = BF16, lora: bool = True, layers: int = 1, **settings: Any) -> Any:
    """A tiny Llama in `dtype` of one layer or two, frozen with float32 adapters of rank 4, or whole."""
    model = tiny_model("llama", dtype)
    model = one_layer(model) if layers == 1 else model
    if not lora:
        return model
    import peft

    config = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", **settings)
    return peft.get_peft_model(model, config)


def batch() -> dict[str, torch.Tensor]:
    """`[2, 16]` ids with labels."""
    return tiny_batch("llama")


def cast(model: nn.Module, dtype: torch.dtype, parts: Sequence[str]) -> Any:
    """Cast the parameters whose names contain one of `parts`."""
    for name, parameter in model.named_parameters():
        if any(part in name for part in parts):
            parameter.data = parameter.data.to(dtype)
    return model

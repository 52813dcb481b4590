"""Small traces made by hand, for tests of rules."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from isotype.precision.devices.profile import device_profile
from isotype.precision.policy import PrecisionPolicy
from isotype.records.memory import Memory, Phase
from isotype.records.reach import Labels, Leak, NoReach, Reach
from isotype.records.request import Setup
from isotype.records.trace import Breach, Call, Failure, Operand, Origin, Quantization, Trace, Weight

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
LAYER = "model.layers.0.self_attn.q_proj"
POLICY = PrecisionPolicy(compute=BF16, storage="bfloat16")


def setup(device: str = "t4", **given: Any) -> Setup:
    """A step on a T4 in bfloat16 without autocast."""
    values: dict[str, Any] = {"autocast": None, "scaler": False, "optimizer": "adamw", "compute": BF16}
    return Setup(profile=device_profile(device), **(values | given))


def weight(name: str = f"{LAYER}.weight", dtype: torch.dtype = BF16, **given: Any) -> Weight:
    """A frozen linear weight `[64, 64]`."""
    values: dict[str, Any] = {"module": name.rpartition(".")[0], "module_class": "Linear", "kind": "linear"}
    return Weight(name, dtype, given.pop("shape", (64, 64)), **(values | given))


def adapter(dtype: torch.dtype, name: str = f"{LAYER}.lora_A.default.weight", **given: Any) -> Weight:
    """A trainable LoRA weight."""
    return weight(name, dtype, trainable=True, adapter=True, **given)


def norm(dtype: torch.dtype, **given: Any) -> Weight:
    """The weight of a norm of 64 values."""
    return weight(
        "model.layers.0.input_layernorm.weight",
        dtype,
        kind="norm",
        module_class="LlamaRMSNorm",
        shape=(64,),
        **given,
    )


def packed(compute: torch.dtype | None = BF16, state: torch.dtype | None = BF16, **given: Any) -> Weight:
    """An nf4 weight as bitsandbytes lays it, healthy where nothing else is said."""
    values: dict[str, Any] = {
        "format": "nf4",
        "present": state is not None,
        "absmax": FP32 if state is not None else None,
        "packed": torch.uint8,
        "storage": torch.uint8,
    }
    kept = Quantization(compute=compute, state=state, **(values | given))
    return weight(
        dtype=kept.packed, shape=(2048, 1), kind="linear4bit", module_class="Linear4bit", quantization=kept
    )


def operand(
    dtype: torch.dtype, kind: Any = "input", name: str = "hidden", shape: tuple[int, ...] = (32, 64)
) -> Operand:
    """An operand whose dtype `name` made."""
    return Operand("self", dtype, shape, Origin(kind, dtype, name))


def call(
    op: str, *operands: Operand, result: torch.dtype = BF16, phase: Phase = "forward", **given: Any
) -> Call:
    """One operator."""
    shape = operands[0].shape if operands else ()
    return Call(op, phase, given.pop("module", LAYER), "model.py:1", operands, ((result, shape),), **given)


def refused(op: str, phase: Phase, *operands: Operand, message: str = "refused") -> Call:
    """One operator that broke its contract."""
    return call(op, *operands, phase=phase, breach=Breach(message, False, None))


def unscale(*weights: Weight) -> Call:
    """The unscale phase refusing the gradients of `weights`."""
    grads = [Operand("grad", w.dtype, w.shape, Origin("gradient", w.dtype, w.name)) for w in weights]
    return refused("GradScaler.unscale_", "unscale", *grads, message="Attempting to unscale FP16 gradients.")


def trace(
    weights: Iterable[Weight] = (), calls: Iterable[Call] = (), failure: Failure | None = None, **given: Any
) -> Trace:
    """A trace of `weights` and `calls`; the rest goes to `setup`."""
    return Trace(
        setup=setup(**given),
        calls=tuple(calls),
        weights=tuple(weights),
        modules={},
        memory=Memory({}),
        failure=failure,
    )


def reached(
    *leaks: Leak,
    weights: Iterable[Weight] = (),
    labels: Labels | None = None,
    unused: tuple[NoReach, ...] = (),
    **batch: Any,
) -> Trace:
    """A trace with what was measured of a batch; `batch` names its inputs."""
    reach = Reach("a copy of the model", 2, 16, labels or Labels(30, 1), leaks, unused)
    return replace(trace(weights, batch=batch), reach=reach)


def leak(source: Any, **given: Any) -> Leak:
    """Every prediction behind the seventh token changes, in the first layer's attention."""
    values: dict[str, Any] = {"module": "model.layers.0.self_attn", "kind": "LlamaAttention"}
    return Leak(source, 0, 7, 16, 16, 1.25, **(values | given))


def with_modules(given: Trace, **modules: str) -> Trace:
    """The same with class names of modules; `__` stands for the dot."""
    return replace(given, modules={name.replace("__", "."): kind for name, kind in modules.items()})

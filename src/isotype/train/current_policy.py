"""The policy of a model in a script: the one that it carries, else the one that its dtypes and the trainer's arguments come to."""

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
    """The policy that a model carries; None for one that was read off it for another run, which says nothing about this one."""
    policy = policy_of(model)
    return None if policy is None or policy.keep_frozen else policy


def policy_of_current_dtypes(model: Any, args: Any) -> PrecisionPolicy:
    """The policy of a model that carries none, in a trainer with these arguments.

    Storage is the model's quantization format, else the dtype that most of its float weights have once trainable
    ones are float32 masters. Compute is what `fp16` or `bf16` asks for, else bitsandbytes' compute dtype, else
    that same dtype. Frozen weights are never recast under it.

    Raises:
        PrecisionError: such a policy cannot be, or without autocast 16-bit weights would meet float32 ones.
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
        reasons={**policy.reasons, "storage": "as the model has it; no frozen weight is recast"},
        warnings=(),
    )


def _elements_by_dtype(model: Any) -> Counter[torch.dtype]:
    """Elements of the base's float weights by dtype; a trainable one counts as the float32 master it becomes."""
    elements: Counter[torch.dtype] = Counter()
    for place in places(model):
        if not place.adapter:
            for parameter in own_float_parameters(place.module).values():
                elements[torch.float32 if parameter.requires_grad else parameter.dtype] += parameter.numel()
    return elements

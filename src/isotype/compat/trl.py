"""TRL (1.16): arguments of the fused head that its trainers wrap around a model's forward, and a replacement.

`add_fused_lm_head` (trl/trainer/utils.py) holds them only in the closure of the forward that it creates.
https://github.com/huggingface/trl/blob/v1.16.0/trl/trainer/utils.py
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from types import CodeType, MethodType
from typing import Any

_MAKER = "add_fused_lm_head"
HEAD_ARGUMENTS = ("temperature", "cast_lm_head_to_fp32", "outputs")
"""Names read from the closure."""


_FORMER = "_isotype_trl_forward"

NAMES: Mapping[str, tuple[str, ...]] = {
    "trl": (
        *("TrlParser", "ModelConfig", "ScriptArguments", "DatasetMixtureConfig", "get_peft_config"),
        *("get_training_chat_template", "is_conversational", "prepare_multimodal_messages"),
    ),
    "trl.trainer.utils": ("FusedCausalLMOutput",),
    "trl.chat_template_utils": ("has_generation_markers",),
    "trl.trainer.dpo_trainer": ("DataCollatorForVisionPreference",),
    "trl.trainer.sft_trainer": ("DataCollatorForVisionLanguageModeling",),
    "trl.rewards": ("accuracy_reward",),  # one of the names of --reward_funcs
}
"""Module of TRL -> names used by a training. Names used only on GPUs (`trl.kernels`) are not listed."""


def is_fused_forward(function: Any) -> bool:
    """Return whether a forward was created by TRL."""
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    return code is not None and code.co_qualname.startswith(f"{_MAKER}.")


def head_arguments(function: Any) -> dict[str, Any]:
    """Return the head's arguments from its forward; raises LookupError if the closure has other names."""
    held = inspect.getclosurevars(function).nonlocals
    missing = [name for name in HEAD_ARGUMENTS if name not in held]
    if missing:
        raise LookupError(f"the forward that TRL's {_MAKER} makes keeps no {', '.join(missing)}")
    return {name: held[name] for name in HEAD_ARGUMENTS}


def put_forward(model: Any, forward: Callable[..., Any]) -> None:
    """Replace the model's (or TRL's fused) forward on the instance by `forward(model, …)`, until `take_forward`."""
    model.__dict__[_FORMER] = model.forward
    model.forward = MethodType(forward, model)


def former_forward(model: Any) -> Callable[..., Any]:
    """Return the forward that `put_forward` replaced."""
    forward: Callable[..., Any] = model.__dict__[_FORMER]
    return forward


def take_forward(model: Any) -> None:
    """Undo `put_forward`, if it was called."""
    former = model.__dict__.pop(_FORMER, None)
    if former is not None:
        model.forward = former


def completions_of(trainer: Any) -> dict[str, Any] | None:
    """Return the completions that GRPO and RLOO still train on, and the micro-batch count; None for others."""
    if not hasattr(trainer, "_buffered_inputs"):
        return None
    return {"batches": trainer._buffered_inputs, "micro_steps": trainer._step}


def put_completions(trainer: Any, held: Mapping[str, Any] | None) -> None:
    """Restore the result of `completions_of` in a trainer, on its device."""
    if held is not None:
        from accelerate.utils import send_to_device

        trainer._step = held["micro_steps"]
        trainer._buffered_inputs = send_to_device(held["batches"], trainer.args.device)


def lacking(names: Iterable[str] = ()) -> list[str]:
    """Return the `NAMES` of `trl` itself, and other `names`, that it lacks, without importing them."""
    known = frozenset(dir(import_module("trl")))
    return [f"it has no {name}" for name in (*NAMES["trl"], *names) if name not in known]


def lacking_inside() -> list[str]:
    """Return the `NAMES` that TRL's modules lack; imports them."""
    inside = ((module, name) for module, names in NAMES.items() if module != "trl" for name in names)
    return [f"{module} has no {name}" for module, name in inside if not _has(module, name)]


def _has(module: str, name: str) -> bool:
    try:
        return hasattr(import_module(module), name)
    except ImportError:
        return False


def incompatibilities(utilities: Any) -> list[str]:
    """Return what TRL's module of `add_fused_lm_head` lacks: the function, its forward, names in its closure."""
    maker = getattr(utilities, _MAKER, None)
    if maker is None:
        return [f"{utilities.__name__} has no {_MAKER}"]
    inner = [code for code in maker.__code__.co_consts if isinstance(code, CodeType)]
    held = {name for code in inner for name in code.co_freevars}
    return [f"the forward that {_MAKER} makes keeps no {name}" for name in HEAD_ARGUMENTS if name not in held]

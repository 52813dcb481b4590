"""enforce: restore the policy on a model or a trainer that something else has touched."""

from __future__ import annotations

from typing import Any

from isotype.core.errors import PrecisionError
from isotype.model.enforce import Change, enforce_model, policy_of
from isotype.precision.policy import PrecisionPolicy


def enforce(model: Any, policy: PrecisionPolicy | None = None) -> tuple[Change, ...]:
    """Restore `policy` in place and return what had to be changed (an empty tuple when nothing had).

    Args:
        model: a model, or a transformers/TRL trainer before `train()`: then its GradScaler and autocast are
            brought along, which accelerate leaves out for float16 on a CPU.
        policy: by default the one the model carries (`isotype.load` and `isotype.add_lora` leave it there).

    Raises:
        PrecisionError: no policy was given and the model carries none; a quantization state is lost; or the
            trainer was built for another mixed precision.
    """
    is_trainer = hasattr(model, "accelerator") and hasattr(model, "model")
    policy = policy or policy_of(model.model if is_trainer else model)
    if policy is None:
        raise PrecisionError.of(
            "no policy to enforce",
            f"{type(model).__name__} without a precision_policy",
            "a policy",
            "pass one: isotype.enforce(model, isotype.resolve_precision(model, …))",
        )
    if is_trainer:
        from isotype.train.trainer import enforce_trainer

        return enforce_trainer(model, policy)
    return enforce_model(model, policy)

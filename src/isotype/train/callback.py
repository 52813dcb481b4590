"""PrecisionCallback: one line in any transformers or TRL script keeps the policy through training."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from isotype.dtypes import dtype_name
from isotype.errors import PrecisionError, Problem, UsageError
from isotype.model.enforce import enforce_model, policy_of, summarize
from isotype.precision.policy import PrecisionPolicy

logger = logging.getLogger("isotype")


class PrecisionCallback(TrainerCallback):  # type: ignore[misc]  # transformers ships no types
    """Restores the policy before the first optimizer step and watches that it holds.

    At the beginning of training the model is brought under the policy, whatever the trainer has done to it (TRL
    casts every trainable parameter of a quantized model to bfloat16); optimizer state that a resumed run brings
    along becomes float32 again, adapter values that a bfloat16 parameter has rounded while a checkpoint was
    being loaded are read again; and a GradScaler must be there exactly when the policy asks for one. After the
    first step the optimizer state is checked. Every checkpoint gets the policy as a readable file.

    Args:
        policy: by default the one the model carries, else decided from the trainer's own arguments
            (`fp16`, `bf16`) for the model as it is.
        check: what to do where trainer and policy disagree (a GradScaler missing or too many, optimizer state
            that is not in the master dtype): `"error"` raises PrecisionError, `"warning"` logs it, None looks
            away.
    """

    def __init__(self, policy: PrecisionPolicy | None = None, check: str | None = "error") -> None:
        if check not in ("error", "warning", None):
            raise UsageError(
                "unknown check",
                [Problem(f"check={check!r}", "'error', 'warning' or None", "give one of these")],
            )
        self.policy = policy
        self.check = check
        self._checked = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Bring model, optimizer and GradScaler under the policy."""
        model, optimizer = kwargs["model"], kwargs["optimizer"]
        if self.policy is None:
            self.policy = policy_of(model) or _policy_from_arguments(model, args)
        rounded = [
            name for name, p in model.named_parameters() if p.requires_grad and p.dtype != self.policy.master
        ]
        changes = enforce_model(model, self.policy)
        for line in summarize(changes):
            logger.info("policy restored: %s", line)
        if rounded and state.global_step > 0:
            _read_again(model, optimizer, Path(args.output_dir) / f"checkpoint-{state.global_step}")
        self._judge(scaler_error(optimizer, self.policy))
        self._checked = False

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """After the first step: masters and optimizer state are in the master dtype."""
        if self._checked or self.policy is None:
            return
        self._checked = True
        self._judge(optimizer_error(kwargs["optimizer"], self.policy.master))

    def _judge(self, error: PrecisionError | None) -> None:
        if error is None or self.check is None:
            return
        if self.check == "error":
            raise error
        logger.warning("%s", error)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave the policy beside the adapter."""
        directory = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if self.policy is not None and state.is_world_process_zero and directory.is_dir():
            self.policy.save(directory)


def optimizer_error(optimizer: Any, master: torch.dtype) -> PrecisionError | None:
    """The error where a parameter or a state tensor of `optimizer` is not in the master dtype, or None."""
    problems = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            tensors = {"parameter": parameter, **optimizer.state.get(parameter, {})}
            for name, tensor in tensors.items():
                # Quantized optimizers keep uint8 state with its own constants; `step` counts in float32.
                if (
                    torch.is_tensor(tensor)
                    and tensor.is_floating_point()
                    and name != "step"
                    and tensor.dtype != master
                ):
                    problems.append((name, dtype_name(tensor.dtype), tuple(parameter.shape)))
    if not problems:
        return None
    name, found, shape = problems[0]
    return PrecisionError(
        f"{len(problems)} optimizer tensors are not in {dtype_name(master)}",
        [
            Problem(
                f"{name} of a parameter of shape {shape} is {found}",
                f"{dtype_name(master)}, the policy's master dtype",
                "build the optimizer after isotype.enforce(model, policy)",
            )
        ],
    )


def _policy_from_arguments(model: Any, args: Any) -> PrecisionPolicy:
    from isotype.resolve import resolve_precision

    dtype = "float16" if args.fp16 else "bfloat16" if args.bf16 else "float32"
    return resolve_precision(model, dtype=dtype, device=args.device)


def scaler_error(optimizer: Any, policy: PrecisionPolicy) -> PrecisionError | None:
    """The error where a GradScaler is missing or one too many, or None."""
    scaler = getattr(optimizer, "scaler", None)
    active = scaler is not None and scaler.is_enabled()
    if active == policy.loss_scaling:
        return None
    compute = dtype_name(policy.compute)
    if policy.loss_scaling:
        given, fix = (
            "no GradScaler",
            (
                "build the trainer with fp16=True and call isotype.enforce(trainer) before trainer.train() "
                "(on a CPU, accelerate makes no GradScaler by itself)"
            ),
        )
    else:
        given, fix = "a GradScaler", "build the trainer with fp16=False"
    return PrecisionError(
        "the trainer and the policy disagree about loss scaling",
        [
            Problem(
                f"{given} with compute dtype {compute}",
                "a GradScaler with float16 compute and with nothing else",
                fix,
            )
        ],
    )


def _read_again(model: Any, optimizer: Any, checkpoint: Path) -> None:
    """Adapter values and optimizer state that were rounded on their way into bfloat16 parameters."""
    weights, state = checkpoint / "adapter_model.safetensors", checkpoint / "optimizer.pt"
    if not weights.is_file():
        logger.warning(
            "trainable parameters were rounded while a checkpoint was loaded into them, and %s is not there to "
            "read them again; call isotype.enforce(trainer) before trainer.train(resume_from_checkpoint=…)",
            weights,
        )
        return
    from peft import set_peft_model_state_dict
    from safetensors.torch import load_file

    set_peft_model_state_dict(model, load_file(weights))
    if state.is_file():
        optimizer.load_state_dict(torch.load(state, map_location="cpu", weights_only=True))

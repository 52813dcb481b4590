"""A transformers or TRL trainer under a policy: whole checkpoints only, and a measure of every step.

`governed(SFTTrainer)` is a subclass; nothing of the trainer's own source is replaced.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch

from isotype.checkpoint.staging import fsync_tree, publish_directory, publish_files
from isotype.errors import PrecisionError, Problem
from isotype.model.enforce import Change, enforce_model
from isotype.precision.policy import PrecisionPolicy

STAGING = ".isotype-saving"
"""Folder inside the output directory in which a checkpoint is built before it is renamed into place."""


class _Governed:
    """Mixin over `transformers.Trainer`; see `governed`."""

    _staging: Path | None = None
    step_tokens: int = 0
    step_loss: torch.Tensor | None = None

    def training_step(self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """As the trainer's own, and adds the tokens and the loss of this micro-batch to the step's."""
        loss = super().training_step(model, inputs, *args, **kwargs)  # type: ignore[misc]
        self.step_tokens += count_tokens(inputs)
        self.step_loss = loss if self.step_loss is None else self.step_loss + loss
        return loss

    def take_step_measures(self) -> tuple[int, float]:
        """(tokens, loss) of the optimizer step that has just ended, and start anew."""
        loss = float("nan") if self.step_loss is None else float(self.step_loss)
        tokens, self.step_tokens, self.step_loss = self.step_tokens, 0, None
        return tokens, loss

    def _get_output_dir(self: Any, trial: Any) -> str:
        if self._staging is not None:
            return str(self._staging)
        return str(super()._get_output_dir(trial))  # type: ignore[misc]

    def _save_checkpoint(self: Any, model: Any, trial: Any) -> None:
        """Build the checkpoint aside, bring it to the disk, then rename it: it is whole or not there."""
        run_dir = Path(super()._get_output_dir(trial))  # type: ignore[misc]
        name = f"checkpoint-{self.state.global_step}"
        with self._staged(run_dir):
            super()._save_checkpoint(model, trial)  # type: ignore[misc]
            built, final = run_dir / STAGING / name, run_dir / name
            if self.args.should_save:
                if str(self.state.best_model_checkpoint) == str(built):
                    self.state.best_model_checkpoint = str(final)
                    self.state.save_to_json(str(built / "trainer_state.json"))
                policy = getattr(self.model, "precision_policy", None)
                if policy is not None:
                    policy.save(built)
                fsync_tree(built)
                publish_directory(built, final)
            self.accelerator.wait_for_everyone()
        if self.args.should_save:
            from transformers.trainer_utils import rotate_checkpoints

            rotate_checkpoints(
                output_dir=str(run_dir),
                save_total_limit=self.args.save_total_limit,
                best_model_checkpoint=self.state.best_model_checkpoint,
                use_mtime=True,
            )

    def save_final(self: Any, directory: Path) -> None:
        """Save the model into `directory` so that a crash in the middle leaves the files that were there."""
        with self._staged(directory) as staging:
            self.save_model(str(staging / "model"))
            if self.args.should_save:
                policy = getattr(self.model, "precision_policy", None)
                if policy is not None:
                    policy.save(staging / "model")
                fsync_tree(staging / "model")
                publish_files(staging / "model", directory)

    @contextmanager
    def _staged(self: Any, directory: Path) -> Iterator[Path]:
        staging = directory / STAGING
        if self.args.should_save:
            shutil.rmtree(staging, ignore_errors=True)
            staging.mkdir(parents=True)
        self.accelerator.wait_for_everyone()
        self._staging = staging
        try:
            yield staging
        finally:
            self._staging = None
            if self.args.should_save:
                shutil.rmtree(staging, ignore_errors=True)


@cache
def governed(trainer_class: type) -> type:
    """`trainer_class` with whole checkpoints and step measures; the name is kept."""
    return type(trainer_class.__name__, (_Governed, trainer_class), {"__module__": trainer_class.__module__})


def enforce_trainer(
    trainer: Any, policy: PrecisionPolicy, masters: Mapping[str, torch.Tensor] | None = None
) -> tuple[Change, ...]:
    """Bring a trainer that has just been built under `policy`: its model, its autocast and its GradScaler.

    Args:
        trainer: a transformers or TRL trainer, before `train()`.
        policy: from `isotype.resolve_precision`.
        masters: trainable parameters as they were before the trainer was built, by name. TRL casts the
            trainable parameters of a quantized model to bfloat16 when it is built; with these the digits it cut
            off come back.
    """
    parameters = dict(trainer.model.named_parameters())
    for name, values in (masters or {}).items():
        if parameters[name].dtype != values.dtype:
            parameters[name].data = values
    changes = enforce_model(trainer.model, policy)
    _mixed_precision(trainer, policy)
    return changes


def masters_of(model: Any) -> dict[str, torch.Tensor]:
    """The trainable parameters' storage by name, to hand to `enforce_trainer` (references, no copies)."""
    return {name: p.data for name, p in model.named_parameters() if p.requires_grad}


def mixed_precision_name(policy: PrecisionPolicy) -> str:
    """accelerate's name for the policy's autocast: `"no"`, `"bf16"` or `"fp16"`."""
    return {None: "no", torch.bfloat16: "bf16", torch.float16: "fp16"}[policy.autocast]


def _mixed_precision(trainer: Any, policy: PrecisionPolicy) -> None:
    accelerator = trainer.accelerator
    wanted = mixed_precision_name(policy)
    if accelerator.state.mixed_precision != wanted:
        raise PrecisionError(
            "the trainer and the policy disagree",
            [
                Problem(
                    f"a trainer with mixed precision {accelerator.state.mixed_precision!r}",
                    f"{wanted!r}, for compute {policy.rows()[1][1]}",
                    f"build it with fp16={wanted == 'fp16'}, bf16={wanted == 'bf16'} in its arguments",
                )
            ],
        )
    if policy.loss_scaling and accelerator.scaler is None:
        # accelerate 1.15 leaves out both autocast and the scaler for float16 on a CPU, without a word
        # (Accelerator.__init__: `self.device.type != "cpu"`); torch has both for it.
        accelerator.scaler = torch.amp.GradScaler(accelerator.device.type)
        accelerator.native_amp = True


def count_tokens(inputs: Any) -> int:
    """Tokens in a batch: the attended ones where a mask says which, else all ids."""
    if not isinstance(inputs, Mapping):
        return 0
    total = 0
    for key, value in inputs.items():
        if (
            not key.endswith("_ids")
            or key in ("position_ids", "token_type_ids")
            or not torch.is_tensor(value)
        ):
            continue
        mask = inputs.get(key.removesuffix("_ids") + "_mask", inputs.get("attention_mask"))
        same = torch.is_tensor(mask) and mask.shape == value.shape
        total += int(mask.sum()) if same and mask is not None else value.numel()
    return total


def whole_checkpoints(output_dir: str | os.PathLike[str]) -> list[Path]:
    """The checkpoints in `output_dir` that were saved to the end, oldest first."""
    found = []
    root = Path(output_dir)
    for path in root.glob("checkpoint-*") if root.is_dir() else ():
        step = path.name.removeprefix("checkpoint-")
        if step.isdigit() and (path / "trainer_state.json").is_file():
            found.append((int(step), path))
    return [path for _, path in sorted(found)]

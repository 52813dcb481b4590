"""A transformers or TRL trainer under a policy: whole checkpoints only, and a measure of every step.

`policy_trainer(SFTTrainer)` is a subclass; nothing of the trainer's own source is replaced.
"""

from __future__ import annotations

import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from isotype.checkpoint.opened import require_readable
from isotype.compat.torch_scaler import sharded_scaler
from isotype.core.errors import PrecisionError, SaveError
from isotype.core.files import (
    NO_ROOM,
    STAGING,
    discard,
    fsync_tree,
    publish_directory,
    publish_files,
    recover,
    write_failure,
    write_whole,
)
from isotype.lora.loss.trl_head import use_own_head
from isotype.model.enforce import Change, enforce_model
from isotype.model.finite import all_finite
from isotype.model.recompute import needs_input_gradients
from isotype.model.shard import has_shards
from isotype.precision.policy import DEFAULT_LOSS_SCALE, PrecisionPolicy
from isotype.train.compilation import take_compilation
from isotype.train.monitor.diverged import not_finite
from isotype.train.monitor.memory import memory_meter
from isotype.train.monitor.meter import StepMeter
from isotype.train.output.checkpoints import (
    Order,
    all_checkpoints,
    begin_epoch,
    save_loop_state,
    saved_at,
    whole_checkpoints,
    write_manifest,
)
from isotype.train.output.sharded import Sharded
from isotype.train.rows.packed import seen_as_joined


class PolicyTrainer:
    """Mixin over `transformers.Trainer`; see `policy_trainer`.

    Attributes:
        card: makes the model card of the run; None for the trainer's own.
        in_checkpoint: writes what else belongs into the folder of a checkpoint.
        goes_on: the command that goes on from a checkpoint; None in a script.
        compilation: arguments of `torch.compile` for the model's blocks; None where nothing is to be compiled.
        asks_to_stop: whether this process was asked to stop.
        steps: measures its steps while it trains.
        before_saving: raises where a step so far must not be saved.
    """

    _staging: Path | None = None
    _began: float = 0.0
    _resumed_from: Path | None = None
    _flops_of_value: int | None = None
    _order: Order | None = None
    card: Callable[[], str] | None = None
    in_checkpoint: Callable[[Path], object] | None = None
    goes_on: Callable[[Path], str] | None = None
    compilation: Mapping[str, Any] | None = None
    asks_to_stop: Callable[[], bool] = staticmethod(lambda: False)
    before_saving: Callable[[], object] = staticmethod(lambda: None)
    steps: StepMeter

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        with warnings.catch_warnings():
            # Not with isotype's loss: it smooths labels without whole logits.
            warnings.filterwarnings("ignore", "`label_smoothing_factor` is deprecated", FutureWarning)
            super().__init__(*args, **kwargs)
        # From here on: the Trainer refuses to be made to save such a model, which `Sharded` does.
        self.is_distributed_loading_by_transformers = has_shards(self.model)
        use_own_head(self)
        self._free_inputs()

    def create_accelerator_and_postprocess(self: Any) -> None:
        """As the trainer's own; what is to be compiled is not left to accelerate, which would take the whole model."""
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        self.compilation = take_compilation(self.accelerator)

    def _free_inputs(self: Any) -> None:
        """Let embeddings need no gradient where gradient checkpointing does without.

        TRL asks for it when the trainer is built, transformers (5.23) when the training begins. A frozen part below the first
        adapter then has a graph, and a backward.
        """
        args = self.args
        if args.gradient_checkpointing and not needs_input_gradients(args.gradient_checkpointing_kwargs):
            self.model.disable_input_require_grads()

    def train(self: Any, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As the trainer's own; first, what a killed run left in the output directory is put in order."""
        if self.args.should_save:
            recover(Path(self.args.output_dir))
        self._began, self._flops_of_value = time.time(), None
        self._resumed_from = Path(resume_from_checkpoint) if isinstance(resume_from_checkpoint, str) else None
        with memory_meter(self.args.device) as memory:
            self.steps = StepMeter(self, True, memory, lambda: self.asks_to_stop())
            self.steps.attach()
            try:
                result = super().train(resume_from_checkpoint, *args, **kwargs)  # type: ignore[misc]
            finally:
                self.steps.detach()
        last = self.last_checkpoint()
        if self.args.should_save and last is not None and last.parent == Path(self.args.output_dir):
            self._rotate(last.parent, last)  # a run that was killed after its last save has deleted none
        return result

    def last_checkpoint(self: Any) -> Path | None:
        """The whole checkpoint to go on from: the last that this run saved, else the one it went on from."""
        whole = whole_checkpoints(self.args.output_dir)
        return whole[-1] if whole and saved_at(whole[-1]) >= self._began else self._resumed_from

    def run_epoch(self: Any, **kwargs: Any) -> None:
        self._free_inputs()
        # A run that goes on from its last step has no step left; transformers 5.23 looks only after one more.
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return
        resumed = kwargs["epoch"] == kwargs["epochs_trained"] and kwargs["resume_from_checkpoint"]
        skipped = kwargs["steps_trained_in_current_epoch"]
        self._order = begin_epoch(
            self, kwargs["train_dataloader"], Path(resumed) if resumed else None, skipped
        )
        super().run_epoch(**kwargs)  # type: ignore[misc]

    def floating_point_ops(self: Any, inputs: Any) -> int:
        """As the trainer's own: a number for each value of the input, for which it counts the model's parameters every time."""
        name = getattr(self.model, "main_input_name", "input_ids")
        values: int = inputs[name].numel() if name in inputs else 0
        if not values:
            return 0
        each: int | None = self._flops_of_value
        if each is None:
            each = self._flops_of_value = super().floating_point_ops(inputs) // values  # type: ignore[misc]
        return values * each

    def compute_loss(self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """As the trainer's own; hooks of embeddings see rows that were kept as TRL would have joined them."""
        with seen_as_joined(self, inputs):
            return super().compute_loss(model, inputs, *args, **kwargs)  # type: ignore[misc]

    def _check_trained(self: Any) -> None:
        """Raise TrainingError, in every process, rather than save weights that are not finite in one, or after a step that was left out."""
        self.before_saving()
        here = all_finite(p for p in self.model.parameters() if p.requires_grad)
        broken = self.accelerator.reduce(torch.tensor(0.0 if here else 1.0, device=self.args.device))
        if broken.item():
            raise not_finite(
                "the trained weights are not finite",
                self.args,
                self.state.global_step,
                {},
                self.last_checkpoint(),
            )

    def folder_of_run(self: Any, trial: Any) -> str:
        if self._staging is not None:
            return str(self._staging)
        return str(super().folder_of_run(trial))  # type: ignore[misc]

    def write_checkpoint(self: Any, model: Any, trial: Any) -> None:
        """Build the checkpoint aside, bring it to the disk, then rename it: it is whole or not there."""
        self._check_trained()
        run_dir = Path(super().folder_of_run(trial))  # type: ignore[misc]
        name = f"checkpoint-{self.state.global_step}"
        built, final = run_dir / STAGING / name, run_dir / name
        with self._staged(run_dir, "checkpoint"):
            super().write_checkpoint(model, trial)  # type: ignore[misc]
            save_loop_state(self, self._order, built)
            if self.state.best_model_checkpoint == str(built):
                self.state.best_model_checkpoint = str(final)
                if self.args.should_save:
                    self.state.save_to_json(str(built / "trainer_state.json"))
            self.accelerator.wait_for_everyone()  # every rank has put its random state into it
            if self.args.should_save:
                self._save_policy(built)
                if self.in_checkpoint is not None:
                    self.in_checkpoint(built)
                require_readable(built)
                fsync_tree(built)
                write_manifest(built)
                publish_directory(built, final)
            self.accelerator.wait_for_everyone()
        if self.args.should_save:
            self._rotate(run_dir, final)
        if self.args.push_to_hub:
            self.push_checkpoint(str(final))

    def create_model_card(self: Any, *args: Any, **kwargs: Any) -> None:
        """Write `card()`, the run as a model card, where the trainer would write a form to be filled in."""
        if self.card is None:
            super().create_model_card(*args, **kwargs)  # type: ignore[misc]
        elif self.args.should_save:
            write_whole(Path(self.args.output_dir) / "README.md", self.card())

    def push_checkpoint(self: Any, checkpoint_folder: str) -> None:
        # An upload reads its files later, in a thread: only from where they stay.
        if self._staging is None:
            super().push_checkpoint(checkpoint_folder)  # type: ignore[misc]

    def _rotate(self: Any, run_dir: Path, newest: Path) -> None:
        """Delete the oldest checkpoints beyond `save_total_limit`, but never the newest or the best one."""
        limit = self.args.save_total_limit
        if limit is None or limit <= 0:
            return
        best = self.state.best_model_checkpoint
        keep = {newest} | ({Path(best)} if best is not None else set())
        saved = all_checkpoints(run_dir)
        surplus = len(saved) - max(limit, len(keep))
        for path in [p for p in saved if p not in keep][: max(surplus, 0)]:
            discard(path)

    def save_final(self: Any, directory: Path) -> None:
        """Save the model into `directory`: its files are the former ones or, after `recover`, all the new ones.

        Raises:
            SaveError: the disk is full, or cannot be written.
            TrainingError: the trained weights are not finite.
        """
        self._check_trained()
        with self._staged(directory, "trained model") as staging:
            self.save_model(str(staging / "model"), _internal_call=True)
            if self.args.should_save:
                # TRL's copy of what a preference run started from, in a folder of its own: no result.
                shutil.rmtree(staging / "model" / "ref", ignore_errors=True)
                self._save_policy(staging / "model")
                require_readable(staging / "model")
                fsync_tree(staging / "model")
                publish_files(staging / "model", directory)
        with self._save_errors(directory, "model card, beside the trained model, which is whole,"):
            self.create_model_card()
        if self.args.push_to_hub:
            self.push_to_hub()

    def _save_policy(self: Any, directory: Path) -> None:
        policy = getattr(self.model, "precision_policy", None)
        if policy is not None:
            policy.save(directory)

    @contextmanager
    def _staged(self: Any, directory: Path, what: str) -> Iterator[Path]:
        """An empty folder to build in; a failure to write becomes a SaveError about `what`."""
        staging = directory / STAGING
        try:
            if self.args.should_save:
                if staging.exists():
                    shutil.rmtree(staging)
                with self._save_errors(directory, what):
                    staging.mkdir(parents=True)
            self.accelerator.wait_for_everyone()
            self._staging = staging
            with self._save_errors(directory, what):
                yield staging
        finally:
            self._staging = None
            if self.args.should_save:
                shutil.rmtree(staging, ignore_errors=True)  # what is left of it goes at the next save

    @contextmanager
    def _save_errors(self: Any, directory: Path, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            failure = write_failure(error, directory)
            if failure is None:
                raise
            raise self._save_error(directory, what, *failure) from error

    def _save_error(self: Any, directory: Path, what: str, number: int | None, reason: str) -> SaveError:
        full = number in NO_ROOM
        last = self.last_checkpoint()
        return SaveError.of(
            f"the disk is full: the {what} could not be saved" if full else f"the {what} could not be saved",
            f"{directory}: {reason}",
            "room for the adapter and twice its size for the optimizer state"
            if full
            else "a directory that takes files of this size",
            "free some room, or give --output_dir on another disk, or --save_total_limit 1"
            if full
            else "make it writable and lift limits on file sizes, or give another --output_dir",
            hint=self._way_on(last),
        )

    def _way_on(self: Any, last: Path | None) -> str:
        if last is None:
            return "no checkpoint had been saved before: start again when there is room"
        how = f"go on with --resume_from_checkpoint {last}"
        if self.goes_on is not None:
            how = f"go on with:\n    {self.goes_on(last)}"
        return f"nothing else is lost, {last} is whole; {how}"


@cache
def policy_trainer(trainer_class: type) -> type:
    """`trainer_class` with whole checkpoints, step measures and isotype's loss; the name is kept."""
    bases = (PolicyTrainer, Sharded, trainer_class)
    return type(trainer_class.__name__, bases, {"__module__": trainer_class.__module__})


def enforce_trainer(
    trainer: Any, policy: PrecisionPolicy, masters: Mapping[str, torch.Tensor] | None = None
) -> tuple[Change, ...]:
    """Bring a trainer that has just been built under `policy`: its model, its autocast and its GradScaler.

    Liger's kernels, which the trainer would put into the model when training begins, are switched off: see `isotype.compat.liger`.

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
    reference = getattr(trainer, "ref_model", None)
    if reference is not None:
        # Its forward is the model's, so that the two agree at the first step; its weights stay as exact as those that are trained.
        enforce_model(reference, replace(policy, keep_frozen=True))
    if getattr(trainer.args, "use_liger_kernel", False):
        trainer.args.use_liger_kernel = False
        changes = (
            *changes,
            Change("use_liger_kernel", "True -> False: Liger's forwards would hide those of the policy"),
        )
    _mixed_precision(trainer, policy)
    return changes


def masters_of(model: Any) -> dict[str, torch.Tensor]:
    """The trainable parameters' storage by name, to hand to `enforce_trainer` (references, no copies)."""
    return {name: p.data for name, p in model.named_parameters() if p.requires_grad}


def mixed_precision_name(policy: PrecisionPolicy) -> str:
    """accelerate's name for the policy's autocast: `"no"`, `"bf16"` or `"fp16"`."""
    return {None: "no", torch.bfloat16: "bf16", torch.float16: "fp16"}[policy.autocast]


def apply_to_arguments(policy: PrecisionPolicy, training: Any) -> None:
    """Set `fp16`, `bf16` and what follows from them on transformers' TrainingArguments."""
    training.bf16 = policy.compute == torch.bfloat16
    training.fp16 = policy.compute == torch.float16
    training.mixed_precision = mixed_precision_name(policy)


def _mixed_precision(trainer: Any, policy: PrecisionPolicy) -> None:
    accelerator = trainer.accelerator
    wanted = mixed_precision_name(policy)
    if accelerator.state.mixed_precision != wanted:
        raise PrecisionError.of(
            "the trainer and the policy disagree",
            f"a trainer with mixed precision {accelerator.state.mixed_precision!r}",
            f"{wanted!r}, for compute {policy.rows()[1][1]}",
            f"build it with fp16={wanted == 'fp16'}, bf16={wanted == 'bf16'} in its arguments",
        )
    if policy.loss_scaling and accelerator.scaler is None:
        # accelerate 1.15 leaves out both autocast and the scaler for float16 on a CPU, without a word
        # (Accelerator.__init__: `self.device.type != "cpu"`); torch has both for it.
        accelerator.scaler = torch.amp.GradScaler(accelerator.device.type)
        accelerator.native_amp = True
    if policy.loss_scaling and has_shards(trainer.model):
        # Every process has to skip a step that overflows in one of them.
        accelerator.scaler = sharded_scaler(accelerator.device.type)
    if policy.loss_scaling:
        begin_loss_scale(accelerator.scaler, policy)


def begin_loss_scale(scaler: Any, policy: PrecisionPolicy) -> None:
    """Let a GradScaler that nobody has set begin with the policy's loss scale; it has not made a step yet."""
    if scaler.get_scale() == DEFAULT_LOSS_SCALE != policy.loss_scale:
        scaler.load_state_dict({**scaler.state_dict(), "scale": policy.loss_scale})

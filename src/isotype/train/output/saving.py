"""Saves only complete checkpoints. Each checkpoint is built in a temporary folder, synced to disk, and renamed."""

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from isotype.checkpoint.checkpoint import require_readable
from isotype.core import files
from isotype.core.errors import SaveError
from isotype.model.finite import all_finite
from isotype.train.monitor.meter import not_finite
from isotype.train.output import checkpoints
from isotype.train.output.sharded import Sharded


@dataclass(frozen=True)
class Hooks:
    """Functions of a training command that the trainer calls when it saves.

    Attributes:
        before: raises an error if the current step must not be saved.
        in_checkpoint: writes more files into the folder of a checkpoint.
        card: returns the model card of the run. None means that the trainer writes the model card.
        resume_command: returns the command that resumes a checkpoint. None in a script.
    """

    before: Callable[[], object] = lambda: None
    in_checkpoint: Callable[[Path], object] = lambda checkpoint: None
    card: Callable[[], str] | None = None
    resume_command: Callable[[Path], str] | None = None


class WholeCheckpoints(Sharded):
    """Mixin for `transformers.Trainer`. Its checkpoints are either complete or absent, even if the process is killed."""

    hooks: Hooks = Hooks()
    _staging: Path | None = None
    _began: float = 0.0
    _resumed_from: Path | None = None
    _order: checkpoints.Order | None = None

    def train(
        self: Any, resume_from_checkpoint: Any = None, *args: Any, hooks: Hooks | None = None, **kwargs: Any
    ) -> Any:
        """Finish or undo a save that a killed run left incomplete, and then call the trainer's `train`."""
        if self.args.should_save:
            files.recover(Path(self.args.output_dir))
        self.hooks, self._began = hooks or Hooks(), time.time()
        self._resumed_from = Path(resume_from_checkpoint) if isinstance(resume_from_checkpoint, str) else None
        result = super().train(resume_from_checkpoint, *args, **kwargs)
        last = self.last_checkpoint()
        if self.args.should_save and last is not None and last.parent == Path(self.args.output_dir):
            self._rotate(last.parent, last)  # a run killed after its last save may have left old checkpoints
        return result

    def last_checkpoint(self: Any) -> Path | None:
        """Return the last complete checkpoint of this run, or else the resumed checkpoint; None without a checkpoint."""
        whole = checkpoints.whole_checkpoints(self.args.output_dir)
        return whole[-1] if whole and checkpoints.saved_at(whole[-1]) >= self._began else self._resumed_from

    def _check_trained(self: Any) -> None:
        """Call `Hooks.before`. Raise TrainingError in every process if trained weights of any process are not finite."""
        self.hooks.before()
        finite = all_finite(p for p in self.model.parameters() if p.requires_grad)
        broken = self.accelerator.reduce(torch.tensor(0.0 if finite else 1.0, device=self.args.device))
        if broken.item():
            raise not_finite(self, "the trained weights are not finite", self.state.global_step)

    def folder_of_run(self: Any, trial: Any) -> str:
        return str(self._staging) if self._staging is not None else str(super().folder_of_run(trial))

    def write_checkpoint(self: Any, model: Any, trial: Any) -> None:
        self._check_trained()
        run_dir = Path(super().folder_of_run(trial))
        name = f"checkpoint-{self.state.global_step}"
        built, final = run_dir / files.STAGING / name, run_dir / name
        with self._staged(run_dir, "checkpoint"):
            super().write_checkpoint(model, trial)
            checkpoints.save_loop_state(self, self._order, built)
            if self.state.best_model_checkpoint == str(built):
                self.state.best_model_checkpoint = str(final)
                if self.args.should_save:
                    self.state.save_to_json(str(built / "trainer_state.json"))
            self.accelerator.wait_for_everyone()  # until every rank has saved its random state
            if self.args.should_save:
                self._save_policy(built)
                self.hooks.in_checkpoint(built)
                require_readable(built)
                files.fsync_tree(built)
                checkpoints.write_manifest(built)
                files.publish_directory(built, final)
            self.accelerator.wait_for_everyone()
        if self.args.should_save:
            self._rotate(run_dir, final)
        if self.args.push_to_hub:
            self.push_checkpoint(str(final))

    def create_model_card(self: Any, *args: Any, **kwargs: Any) -> None:
        if self.hooks.card is None:
            super().create_model_card(*args, **kwargs)
        elif self.args.should_save:
            files.write_whole(Path(self.args.output_dir) / "README.md", self.hooks.card())

    def push_checkpoint(self: Any, checkpoint_folder: str) -> None:
        # The upload reads the files later, in a thread, so they must be in their final folder.
        if self._staging is None:
            super().push_checkpoint(checkpoint_folder)

    def _rotate(self: Any, run_dir: Path, newest: Path) -> None:
        """Delete the oldest checkpoints beyond `save_total_limit`, but never the newest or the best checkpoint."""
        limit = self.args.save_total_limit
        if limit is None or limit <= 0:
            return
        best = self.state.best_model_checkpoint
        keep = {newest} | ({Path(best)} if best is not None else set())
        saved = checkpoints.all_checkpoints(run_dir)
        surplus = max(len(saved) - max(limit, len(keep)), 0)
        for path in [p for p in saved if p not in keep][:surplus]:
            files.discard(path)

    def save_final(self: Any, directory: Path) -> None:
        """Save the model into `directory`. After a kill, `recover` in the next run restores either all old files or all new files."""
        self._check_trained()
        former = checkpoints.trained_kind(directory)
        with self._staged(directory, "trained model") as staging:
            self.save_model(str(staging / "model"), _internal_call=True)
            if self.args.should_save:
                # TRL's reference adapter does not belong to the result.
                shutil.rmtree(staging / "model" / "ref", ignore_errors=True)
                self._save_policy(staging / "model")
                require_readable(staging / "model")
                files.fsync_tree(staging / "model")
                files.publish_files(staging / "model", directory)
        with self._save_errors(directory, "model card (the trained model itself is complete)"):
            self.create_model_card()
        if self.args.push_to_hub:
            self.push_to_hub()
        if self.args.should_save:
            checkpoints.remove_other_kind(directory, former)

    def _save_policy(self: Any, directory: Path) -> None:
        policy = getattr(self.model, "precision_policy", None)
        if policy is not None:
            policy.save(directory)

    @contextmanager
    def _staged(self: Any, directory: Path, what: str) -> Iterator[Path]:
        """Yield an empty folder for new files, and delete it at the end. If a write fails, raise SaveError about `what`."""
        staging = directory / files.STAGING
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
                shutil.rmtree(staging, ignore_errors=True)  # the next save deletes the rest

    @contextmanager
    def _save_errors(self: Any, directory: Path, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            failure = files.write_failure(error, directory)
            if failure is None:
                raise
            number, reason = failure
            hint = "no checkpoint has been saved yet; start again when there is enough space"
            if last := self.last_checkpoint():
                command = self.hooks.resume_command and self.hooks.resume_command(last)
                how = f"with:\n    {command}" if command else f"with --resume_from_checkpoint {last}"
                hint = f"nothing else is lost; {last} is complete: resume {how}"
            headline = f"the {what} could not be saved"
            expected = "a directory that accepts files of this size"
            fix = "make it writable and lift limits on file sizes, or set another --output_dir"
            if number in files.NO_ROOM:
                headline = f"the disk is full: {headline}"
                expected = "space for the adapter, and twice as much for the optimizer state"
                fix = "free some space, or set --output_dir on another disk, or --save_total_limit 1"
            raise SaveError.of(headline, f"{directory}: {reason}", expected, fix, hint=hint) from error

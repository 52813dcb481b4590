"""Saves checkpoints of a sharded model. Any number of processes can resume training from such a checkpoint.

A checkpoint of a sharded run has the folder `sharded/` with trained weights and optimizer states by parameter name.
`torch.distributed.checkpoint` writes safetensors files, and each process writes its own rows of the tensors.
"""

import json
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from transformers.trainer import SCHEDULER_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from isotype.checkpoint.load import restore
from isotype.compat.transformers import TrainerSteps
from isotype.core.errors import CheckpointError, Problem
from isotype.core.names import base_name, listed
from isotype.model.shard import has_shards, is_sharded

SHARDS = "sharded"
"""Folder in a checkpoint for the shards of all processes."""

_GROUPS = "optimizer_groups.json"
_MODEL, _OPTIMIZER = "model.", "optimizer."


def whole_state(model: nn.Module, keep: bool) -> dict[str, torch.Tensor]:
    """Gather the weights to save (a collective operation). Return name -> weight in CPU memory, or {} if `keep` is False."""
    named: Mapping[str, torch.Tensor] = model.state_dict()
    if hasattr(model, "peft_config"):  # only the adapters are saved, with TRL's reference adapter `ref`
        named = {name: p for name, p in model.named_parameters() if p.requires_grad or ".ref." in name}
    state = {}
    for name, tensor in named.items():
        whole = whole_tensor(tensor.detach())
        if keep:
            state[name] = whole.cpu()
    return state


def whole_tensor(tensor: torch.Tensor) -> torch.Tensor:
    sharded: Any = tensor
    return sharded.full_tensor() if is_sharded(tensor) else tensor


def load_weights(directory: Path, model: nn.Module) -> None:
    _read(directory, {f"{_MODEL}{name}": p.detach() for name, p in _trained(model).items()})


def load_optimizer(directory: Path, model: nn.Module, optimizer: Any) -> None:
    """Read optimizer states from `directory`. Each state is sharded in the same way as its parameter."""
    reader = HuggingFaceStorageReader(str(directory))
    saved: Mapping[str, Any] = reader.read_metadata().state_dict_metadata
    pairs = ((group, p) for group in optimizer.param_groups for p in group["params"])
    fused = {id(p): group.get("fused") or group.get("capturable") for group, p in pairs}
    states: dict[str, torch.Tensor] = {}
    for name, parameter in _trained(model).items():
        prefix = f"{_OPTIMIZER}{name}."
        for key, header in saved.items():
            if not key.startswith(prefix):
                continue
            dtype, size = header.properties.dtype, tuple(header.size)
            where = parameter.device if size or fused.get(id(parameter)) else "cpu"
            states[key] = (
                torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
                if size == tuple(parameter.shape)
                else torch.zeros(size, dtype=dtype, device=where)
            )
            optimizer.state[parameter][key.removeprefix(prefix)] = states[key]
    _read(directory, states)
    groups = json.loads((directory / _GROUPS).read_text(encoding="utf-8"))
    for group, saved_group in zip(optimizer.param_groups, groups, strict=True):
        group.update({k: tuple(v) if isinstance(v, list) else v for k, v in saved_group.items()})


def _trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def _read(directory: Path, state: dict[str, torch.Tensor]) -> None:
    reader = HuggingFaceStorageReader(str(directory))
    saved = reader.read_metadata().state_dict_metadata
    _require(directory, [name for name in state if name not in saved])
    with warnings.catch_warnings():
        # A single process can read the files, too.
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        load(state, storage_reader=reader, no_dist=not distributed.is_initialized())


def load_whole_adapter(checkpoint: Path, model: nn.Module) -> None:
    """Read the adapter of an unsharded run into sharded parameters. Every process must read all of it."""
    from safetensors.torch import load_file

    files, trained = sorted(checkpoint.glob("*model*.safetensors")), _trained(model)
    weights = {base_name(name): value for file in files for name, value in load_file(file).items()}
    _require(checkpoint, [name for name in trained if base_name(name) not in weights])
    for name, parameter in trained.items():
        _copy(parameter.detach(), weights[base_name(name)])


def _copy(target: torch.Tensor, whole: torch.Tensor) -> None:
    """Copy a whole tensor into a tensor that may be sharded."""
    to: Any = target
    if is_sharded(target):
        to, whole = to.to_local(), _sharded_like(to, whole.to(to.dtype)).to_local()
    to.copy_(whole)


def shard_optimizer(optimizer: Any) -> None:
    """Shard optimizer states in the same way as their parameters. Every process must have the whole states."""
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if is_sharded(parameter) and value.shape == parameter.shape and not is_sharded(value):
                state[key] = _sharded_like(parameter, value)


def _sharded_like(parameter: Any, whole: torch.Tensor) -> Any:
    from torch.distributed.tensor import distribute_tensor

    local = whole.to(parameter.device)
    return distribute_tensor(local, parameter.device_mesh, parameter.placements, src_data_rank=None)


class Sharded(TrainerSteps):
    """Mixin for `transformers.Trainer` that saves and resumes sharded models, and reads checkpoints of sharded runs."""

    def save_model(self: Any, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if not has_shards(self.model):
            super().save_model(output_dir, _internal_call)
            return
        writes = self.args.should_save
        # A checkpoint without adapters has only the shards, which are enough to resume.
        adapter = hasattr(self.model, "peft_config")
        inside = output_dir is not None and Path(output_dir).name.startswith(f"{PREFIX_CHECKPOINT_DIR}-")
        state = whole_state(self.model, keep=writes) if adapter or not inside else {}
        if writes and state:
            self._save(output_dir or self.args.output_dir, state_dict=state)
        self.accelerator.wait_for_everyone()
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def write_optimizer(self: Any, output_dir: str) -> None:
        """Save the optimizer. If the run is sharded, save the trained weights of all processes into the folder `SHARDS`, too."""
        if not has_shards(self.model):
            super().write_optimizer(output_dir)
            return
        directory, state = Path(output_dir) / SHARDS, dict[str, Any]()
        for name, parameter in _trained(self.model).items():
            state[f"{_MODEL}{name}"] = parameter
            moments = self.optimizer.state.get(parameter, {})
            state |= {f"{_OPTIMIZER}{name}.{key}": value for key, value in moments.items()}
        save(state, storage_writer=HuggingFaceStorageWriter(str(directory), save_distributed=True))
        if distributed.get_rank() == 0:
            groups = [
                {k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups
            ]
            (directory / _GROUPS).write_text(json.dumps(groups, indent=2) + "\n", encoding="utf-8")
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)

    def read_weights(self: Any, resume_from_checkpoint: str, model: Any = None) -> None:
        if not self._read_weights(Path(resume_from_checkpoint)):
            super().read_weights(resume_from_checkpoint, model)

    def read_best_weights(self: Any) -> None:
        if not self._read_weights(Path(self.state.best_model_checkpoint)):
            super().read_best_weights()

    def _read_weights(self: Any, checkpoint: Path) -> bool:
        """Read the trained weights of a checkpoint into the model, or return False if the trainer reads them correctly."""
        if (checkpoint / SHARDS).is_dir():
            load_weights(checkpoint / SHARDS, self.model)
        elif not hasattr(self.model, "peft_config") and not self.is_deepspeed_enabled:
            # transformers (5.23) reads no tensor that its `save_pretrained` has renamed or split.
            restore(self.model, checkpoint, _copy)
        elif has_shards(self.model):
            load_whole_adapter(checkpoint, self.model)
        else:
            return False
        return True

    def read_optimizer(self: Any, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        saved = Path(checkpoint)
        if (saved / SHARDS).is_dir():
            load_optimizer(saved / SHARDS, self.model, self.optimizer)
            self.lr_scheduler.load_state_dict(torch.load(saved / SCHEDULER_NAME, weights_only=True))
            return
        super().read_optimizer(checkpoint)
        shard_optimizer(self.optimizer)

    def gradient_norm(self: Any, *args: Any, **kwargs: Any) -> Any:
        norm = super().gradient_norm(*args, **kwargs)
        return whole_tensor(norm) if isinstance(norm, torch.Tensor) else norm

    @contextmanager
    def gradients_stay_local(self: Any) -> Iterator[None]:
        # The Trainer's method works only for a model that transformers has sharded.
        self.model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self.model.set_requires_gradient_sync(True)


def _require(checkpoint: Path, missing: list[str]) -> None:
    if missing:
        fix = "use the settings of the run that saved the checkpoint"
        problem = Problem(f"{checkpoint} without {listed(missing)}", "every trained weight", fix)
        raise CheckpointError("a checkpoint of another run", [problem])

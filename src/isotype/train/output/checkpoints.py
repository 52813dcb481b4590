"""Checkpoints in an output directory: manifests, missing or damaged files, and the order of rows in an epoch."""

import json
import logging
import os
import pickle
import time
import warnings
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_model, save_model

from isotype.compat.trl import completions_of, put_completions
from isotype.core.errors import UsageError, first_line
from isotype.core.files import write_whole
from isotype.model.shard import has_shards
from isotype.precision.policy import POLICY_FILE

MANIFEST = "isotype_checkpoint.json"
"""File in a checkpoint that records the time of saving, and the size and checksum of each file."""

_STATE = "trainer_state.json"
_WEIGHTS = (
    "adapter_model.*", "*/adapter_model.*", "model*.safetensors", "pytorch_model*", "sharded/*.safetensors",
)  # fmt: skip

_MODEL = "model.safetensors model.safetensors.index.json model-*-of-*.safetensors config.json generation_config.json"
RESULT_FILES = {"lora": ("adapter_config.json", "adapter_model.*"), "full": tuple(_MODEL.split())}
"""Files of a finished run, for each value of `PrecisionPolicy.trainable`."""


def write_manifest(directory: Path) -> None:
    """Write a checkpoint's manifest: sizes, checksums, and the time of saving, which copied files may lose."""
    files = {
        path.relative_to(directory).as_posix(): path
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.name != MANIFEST and path.suffix != ".md"  # users may edit texts
    }
    content = {
        "saved_at": time.time(),
        "files": {name: path.stat().st_size for name, path in files.items()},
        "crc32": {name: _crc32(path) for name, path in files.items()},
    }
    write_whole(directory / MANIFEST, json.dumps(content, indent=2) + "\n")


def damage(checkpoint: Path, *, contents: bool = False) -> str | None:
    """Return a clause that says what is missing or damaged in a checkpoint; None if the checkpoint is complete.

    A checkpoint of another program has no manifest, but must have weights and a readable trainer state. If `contents` is
    True, every file is compared with its checksum in the manifest.
    """
    if not checkpoint.is_dir():
        return "it is not a folder" if checkpoint.exists() else "it does not exist"
    manifest = read_json(checkpoint / MANIFEST)
    if manifest is None and (checkpoint / MANIFEST).exists():
        return f"{MANIFEST} is not JSON"
    sizes, checksums = ((manifest or {}).get(key, {}) for key in ("files", "crc32"))
    if not (isinstance(sizes, dict) and isinstance(checksums, dict)):
        return f"{MANIFEST} does not list files"
    for name, size in sizes.items():
        path = checkpoint / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} of {size} bytes"
    for name, checksum in checksums.items() if contents else ():
        if _crc32(checkpoint / name) != checksum:
            return f"{name} differs from the file that was saved"
    if not (checkpoint / _STATE).is_file():
        return f"{_STATE} is missing"
    if read_json(checkpoint / _STATE) is None:
        return f"{_STATE} is not JSON"
    if not any(any(checkpoint.glob(pattern)) for pattern in _WEIGHTS):
        return "there are no weights in it"
    return None


_REFUSALS = (TypeError, ValueError, AttributeError, LookupError, RuntimeError)
_KINDS: dict[str, dict[str, type]] = {
    "optimizer.pt": {"state": dict, "param_groups": list},
    "scheduler.pt": {"last_epoch": int, "_last_lr": list},
    "rng_state*.pth": {"python": tuple, "numpy": tuple, "cpu": torch.Tensor},
    "scaler.pt": {},
}
"""Maps each file of the trainer's state to the entries that the file must have, with their types."""


def unreadable_state(checkpoint: Path) -> str | None:
    """Return a clause that says why the trainer's state cannot be read, or None. Only tensors and numbers are unpickled."""
    from transformers import TrainerState
    from transformers.trainer_pt_utils import safe_globals

    try:
        state = TrainerState(**(read_json(checkpoint / _STATE) or {}))
        counts = (state.global_step, state.max_steps, state.num_train_epochs, state.train_batch_size)
        if not all(type(count) is int for count in counts) or state.global_step < 0:
            return f"{_STATE} lacks the number of steps, epochs or rows"
        if not isinstance(state.log_history, list):
            return f"{_STATE} has no log_history"
    except _REFUSALS as error:
        return f"{_STATE}: {first_line(error)}"
    files = [(path, kinds) for name, kinds in _KINDS.items() for path in sorted(checkpoint.glob(name))]
    for path, entries in files:
        try:
            with safe_globals(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about the pickle; a refusal is reported below
                content = torch.load(path, map_location="meta", weights_only=True)
        except (pickle.UnpicklingError, EOFError, OSError, *_REFUSALS):
            kind = "a torch.save file of tensors and numbers"
            return f"{path.name} is not {kind}, and isotype unpickles no other objects"
        content = content if isinstance(content, dict) else {}
        if lacking := [key for key, kind in entries.items() if not isinstance(content.get(key), kind)]:
            return f"{path.name} has no {' and no '.join(lacking)}"
    return None


def all_checkpoints(output_dir: str | os.PathLike[str]) -> list[Path]:
    """Return all folders `checkpoint-N` in `output_dir` (also incomplete checkpoints), in the order of saving."""
    root = Path(output_dir)
    checkpoints = [
        (saved_at(path), int(step), path)
        for path in (root.glob("checkpoint-*") if root.is_dir() else ())
        if path.is_dir() and (step := path.name.removeprefix("checkpoint-")).isdigit()
    ]
    return [path for _, _, path in sorted(checkpoints)]


def whole_checkpoints(output_dir: str | os.PathLike[str]) -> list[Path]:
    return [path for path in all_checkpoints(output_dir) if damage(path) is None]


def saved_at(checkpoint: Path) -> float:
    """Return the time of saving from the manifest. Without a manifest, return a file time (seconds since 1970)."""
    manifest = read_json(checkpoint / MANIFEST) or {}
    if isinstance(manifest.get("saved_at"), (int, float)):
        return float(manifest["saved_at"])
    state = checkpoint / _STATE
    return (state if state.is_file() else checkpoint).stat().st_mtime


def trained_kind(root: Path) -> str | None:
    """Return the kind of the result in `root`, which is a key of `RESULT_FILES`; None if there is no result."""
    kind = (read_json(root / POLICY_FILE) or {}).get("trainable")
    return kind if kind in RESULT_FILES else None


def remove_other_kind(root: Path, former: str | None) -> None:
    """Delete the files of an earlier result of the other kind (adapter or model), because programs would read them too."""
    if former is None or former == trained_kind(root):
        return
    for pattern in RESULT_FILES[former]:
        for path in root.glob(pattern):
            path.unlink()


def _crc32(path: Path) -> int:
    checksum = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            checksum = zlib.crc32(chunk, checksum)
    return checksum


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the object in a JSON file, or None if the file is missing or contains no object."""
    try:
        content = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


REFERENCE = "isotype_reference.safetensors"
"""Name of the reference model's file in a checkpoint. The file exists only with `--sync_ref_model`."""

logger = logging.getLogger("isotype")


@dataclass(frozen=True)
class Order:
    """The sampler of an epoch, and the random states (of torch and of the sampler) that determine the order of rows."""

    sampler: Any
    drawn_from: dict[str, torch.Tensor]


def begin_epoch(trainer: Any, loader: Any, checkpoint: Path | None, skipped: int) -> Order | None:
    """Restore or record the random states that determine the order of rows; None if seed and epoch determine the
    order.

    Args:
        checkpoint: the checkpoint that is resumed in this epoch, or None if the epoch begins with its first batch.
        skipped: number of the epoch's batches that were trained before the checkpoint.
    """
    part = loader
    while (inner := getattr(part, "batch_sampler", None)) is not None:
        part = inner
    sampler = getattr(part, "sampler", None)
    if checkpoint is not None and _moves_reference(trainer):
        if (checkpoint / REFERENCE).exists():
            load_model(trainer.ref_model, checkpoint / REFERENCE)
        else:
            headline = "the run cannot resume with its reference model"
            what = f"--sync_ref_model, but {checkpoint} has no reference model (a sharded run saves none)"
            expected = "a checkpoint of an unsharded run"
            raise UsageError.of(headline, what, expected, "begin again, or train without --sync_ref_model")
    if not hasattr(sampler, "generator") or hasattr(sampler, "set_epoch"):
        return None
    if checkpoint is not None:
        _restore(trainer, sampler, _file(trainer, checkpoint), "begin" if skipped else "now")
    return Order(sampler, _random_states(sampler))


def save_loop_state(trainer: Any, order: Order | None, folder: Path) -> None:
    """Save the random states and completions of this process, and the reference model if the training changes its weights."""
    if _moves_reference(trainer) and trainer.args.should_save and not has_shards(trainer.model):
        save_model(trainer.ref_model, str(folder / REFERENCE))
    if order is None:
        return
    states = {"begin": order.drawn_from, "now": _random_states(order.sampler)}
    content = {"processes": trainer.args.world_size, "completions": completions_of(trainer), **states}
    torch.save(content, _file(trainer, folder))


def _moves_reference(trainer: Any) -> bool:
    moves = bool(getattr(trainer.args, "sync_ref_model", False))
    return moves and getattr(trainer, "ref_model", None) is not None


def _file(trainer: Any, folder: Path) -> Path:
    return folder / f"isotype_loop_{trainer.args.process_index}.pt"


def _random_states(sampler: Any) -> dict[str, torch.Tensor]:
    states = {} if sampler.generator is None else {"sampler": sampler.generator.get_state()}
    return {"torch": torch.get_rng_state(), **states}


def _restore(trainer: Any, sampler: Any, file: Path, moment: str) -> None:
    saved = torch.load(file, map_location="cpu", weights_only=True) if file.exists() else {}
    if saved.get("processes") != trainer.args.world_size:
        why = "from a run with another number of processes" if saved else "not saved by isotype"
        order = "rows may come in another order, and completions are generated again"
        logger.warning("%s: %s; %s", file.parent, why, order)
        return
    torch.set_rng_state(saved[moment]["torch"])
    if sampler.generator is not None:
        sampler.generator.set_state(saved[moment]["sampler"])
    put_completions(trainer, saved["completions"])

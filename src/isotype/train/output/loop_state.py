"""What a training loop holds beside weights, optimizer and random states, in a file of a checkpoint for each process.

transformers 5.23 resumes the order of `RandomSampler`, which follows seed and epoch. Samplers that draw the order of an epoch from a generator
of their own (TRL's for GRPO and RLOO) or from torch's (`group_by_length`) would begin with another order in a later epoch. GRPO and RLOO
also learn from completions that are several steps old, which TRL 1.16 generates again.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_model, save_model

from isotype.compat.trl import completions_of, put_completions
from isotype.train.output.sharded import has_shards

REFERENCE = "isotype_reference.safetensors"
"""File of a checkpoint with the reference model of `--sync_ref_model`."""

logger = logging.getLogger("isotype")


@dataclass(frozen=True)
class Order:
    """What the order of the epoch was drawn from: torch's random state at its begin, and that of the sampler's generator."""

    sampler: Any
    drawn_from: dict[str, torch.Tensor]


def begin_epoch(trainer: Any, loader: Any, checkpoint: Path | None, skipped: int) -> Order | None:
    """Called before an epoch draws its order; None where that follows seed and epoch.

    Args:
        trainer: a transformers trainer.
        loader: of its training batches.
        checkpoint: that the run goes on from with this epoch; None for an epoch that begins by itself.
        skipped: batches of the epoch that were trained on before.
    """
    part = loader
    while (inner := getattr(part, "batch_sampler", None)) is not None:
        part = inner
    sampler = getattr(part, "sampler", None)
    if checkpoint is not None and _moves_reference(trainer):
        if (checkpoint / REFERENCE).exists():
            load_model(trainer.ref_model, checkpoint / REFERENCE)
        else:
            logger.warning("%s holds no reference model of --sync_ref_model: the base is taken", checkpoint)
    if not hasattr(sampler, "generator") or hasattr(sampler, "set_epoch"):
        return None
    if checkpoint is not None:
        _restore(trainer, sampler, _file(trainer, checkpoint), "begin" if skipped else "now")
    return Order(sampler, _random_states(sampler))


def save_loop_state(trainer: Any, order: Order | None, folder: Path) -> None:
    """Write what this process needs to go on with in the middle of an epoch, and of a generation."""
    if _moves_reference(trainer) and trainer.args.should_save and not has_shards(trainer.model):
        save_model(trainer.ref_model, str(folder / REFERENCE))
    if order is None:
        return
    states = {"begin": order.drawn_from, "now": _random_states(order.sampler)}
    held = {"processes": trainer.args.world_size, "completions": completions_of(trainer), **states}
    torch.save(held, _file(trainer, folder))


def _moves_reference(trainer: Any) -> bool:
    """Whether the reference model follows the one that is trained (`--sync_ref_model`): it is no longer the base."""
    return (
        bool(getattr(trainer.args, "sync_ref_model", False))
        and getattr(trainer, "ref_model", None) is not None
    )


def _file(trainer: Any, folder: Path) -> Path:
    return folder / f"isotype_loop_{trainer.args.process_index}.pt"


def _random_states(sampler: Any) -> dict[str, torch.Tensor]:
    own = {} if sampler.generator is None else {"sampler": sampler.generator.get_state()}
    return {"torch": torch.get_rng_state(), **own}


def _restore(trainer: Any, sampler: Any, file: Path, moment: str) -> None:
    held = torch.load(file, map_location="cpu", weights_only=True) if file.exists() else {}
    if held.get("processes") != trainer.args.world_size:
        why = "of another number of processes" if held else "not saved by isotype"
        logger.warning(
            "%s is %s: rows may come in another order, and completions are generated again", file.parent, why
        )
        return
    torch.set_rng_state(held[moment]["torch"])
    if sampler.generator is not None:
        sampler.generator.set_state(held[moment]["sampler"])
    put_completions(trainer, held["completions"])

"""measure_ranges: the largest values of a model in memory, or of a checkpoint whose weights stay on disk until a module asks for them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from isotype.checkpoint.formats.hub import local_snapshot
from isotype.checkpoint.kept import kept_or_noted
from isotype.checkpoint.load import load_checkpoint, saved_format, tokenizer_source
from isotype.checkpoint.locate import local_path
from isotype.checkpoint.opened import Checkpoint, config_of, downloaded, headers_of, open_checkpoint
from isotype.checkpoint.resolve import resolve_request
from isotype.checkpoint.stored_weights import StoredWeights, blank_model, fill_buffers
from isotype.checkpoint.tokenizer import tokenizer_of
from isotype.core.errors import CheckpointError
from isotype.precision.decide import PrecisionRequest
from isotype.precision.ranges import Ranges
from isotype.ranges.batches import Batches, given_batches, made_batches, require_positions
from isotype.ranges.measure import Measured, base_of, measure, of_module
from isotype.ranges.weights import Weight

TOKENS = 256
"""Tokens that are run where nobody gives a batch."""


def measure_ranges(
    model: nn.Module | str | Path,
    batch: Any = None,
    *,
    tokens: int = TOKENS,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    progress: bool = True,
    revision: str | None = None,
) -> Ranges:
    """Run a forward and a backward of the mean loss and write down the largest magnitude of every value.

    It is computed in float32 from the weights as they are, in evaluation mode, without autocast and without a policy's
    boundaries. Of a checkpoint, and of a model in memory, one block at a time is there in float32: blocks are computed
    again in the backward. A model in memory is not changed, nor its gradients, hooks, modes or random states. What is
    measured of a checkpoint on text of this package, no less than by default, is kept for
    `isotype.checkpoint.kept.kept`.

    Args:
        model: a module (with PEFT adapters, quantized layers, boundaries or not), or a checkpoint: a directory, a
            GGUF file, `embedded:NAME` or a hub id.
        batch: what the model is called with, a dict of tensors, labels included, or a list of such dicts; by default
            short texts that come with isotype.
        tokens: how many tokens of these texts.
        device: where it is computed; by default where the model is, of a checkpoint the CPU.
        dtype: dtype that it is computed in; by default float32, bfloat16 where that does not fit into free memory.
        progress: whether a bar is shown on a terminal when it takes longer than three seconds.
        revision: branch, tag or commit of a hub id.

    Returns:
        The measurement. Where even float32 overflows it holds infinity or NaN, and a note names the first operator.

    Raises:
        CheckpointError: there is no checkpoint, or it cannot be loaded.
        UsageError: no batch can be made up for the model, or the one given is none; a model in memory without values.
    """
    options: dict[str, Any] = {"device": device, "dtype": dtype, "progress": progress}
    if isinstance(model, nn.Module):
        return measure(*module_to_measure(model, batch, tokens), **options)
    return measure_checkpoint(open_checkpoint(model, revision), batch, tokens=tokens, **options)


def measure_checkpoint(
    checkpoint: Checkpoint, batch: Any = None, *, tokens: int = TOKENS, **options: Any
) -> Ranges:
    """`measure_ranges` of a checkpoint that is open."""
    checkpoint = downloaded(checkpoint)
    ranges = measure(*to_measure(checkpoint, batch, tokens), **options)
    ranges = replace(ranges, key=checkpoint.fingerprint or "")
    return kept_or_noted(ranges) if ranges.key and batch is None and tokens >= TOKENS else ranges


def module_to_measure(model: nn.Module, batch: Any, tokens: int) -> tuple[Measured, Batches]:
    """(the model in memory, what it is called with): the batch, or as many tokens of the texts that come with isotype."""
    measured = of_module(model)
    if batch is not None:
        return measured, require_positions(measured.model, given_batches(batch))
    return measured, made_batches(measured.model, _tokenizer_of_module(measured.model), tokens)


def to_measure(checkpoint: Checkpoint, batch: Any, tokens: int) -> tuple[Measured, Batches]:
    """`module_to_measure` of a checkpoint whose weights are on this machine."""
    measured = of_checkpoint(checkpoint)
    if batch is not None:
        return measured, require_positions(measured.model, given_batches(batch))
    return measured, made_batches(measured.model, tokenizer_of(tokenizer_source(checkpoint)), tokens)


def _tokenizer_of_module(model: nn.Module) -> Any:
    """The tokenizer of what a model in memory says it was loaded from; None where that cannot be reached."""
    name = str(getattr(base_of(model), "name_or_path", "") or "")
    try:
        files = (local_path(name) or local_snapshot(name)) if name else None
        return None if files is None else tokenizer_of(tokenizer_source(open_checkpoint(files)))
    except CheckpointError:
        return None  # it has been moved since, or lies on a hub that nobody can reach


def of_checkpoint(checkpoint: Checkpoint) -> Measured:
    """A checkpoint, its weights left on disk where transformers' own conversions allow to read them one by one."""
    quantization = checkpoint.facts.quantization
    if quantization is not None and not quantization.dequantized:
        return _loaded(checkpoint, f"its weights are stored in {quantization.format}")
    model = blank_model(config_of(checkpoint))
    stored = StoredWeights(model, headers_of(checkpoint))
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    held = {
        each: next((name for name in tied if name in stored.shapes), None) for each, tied in names.items()
    }
    missing = [names[each][0] for each, name in held.items() if name is None]
    if missing:
        return _loaded(checkpoint, f"it has no {missing[0]}, which transformers draws")
    fill_buffers(model, stored)

    def read(_: nn.Module, __: str, parameter: torch.Tensor) -> Weight:
        name = held[id(parameter)]
        assert name is not None
        return Weight(id(parameter), parameter.shape, lambda: stored.read(name))

    return Measured(model, checkpoint.name, torch.device("cpu"), read)


def _loaded(checkpoint: Checkpoint, why: str) -> Measured:
    request = PrecisionRequest("auto", saved_format(checkpoint.facts))
    policy, _ = resolve_request(checkpoint.facts, request, "cpu", checkpoint)
    model = load_checkpoint(checkpoint, policy)
    note = f"loaded whole, not block by block: {why}"
    return Measured(model.requires_grad_(False), checkpoint.name, torch.device("cpu"), None, (note,))

"""`measure_ranges` records the largest values of a model in memory, or of a checkpoint that is read module by module."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from isotype.checkpoint.checkpoint import Checkpoint, local_path, open_checkpoint
from isotype.checkpoint.formats.hub import local_snapshot
from isotype.checkpoint.load import load
from isotype.checkpoint.resolve import Measurement, resolve_request, saved_or_noted
from isotype.checkpoint.stored_weights import StoredWeights, blank_model, fill_buffers
from isotype.compat.peft import without_peft
from isotype.core.errors import CheckpointError
from isotype.precision.decide import PrecisionRequest
from isotype.precision.ranges import Ranges
from isotype.ranges.measure import Batches, Measured, measure
from isotype.ranges.weights import Weight

TOKENS = 256


def measure_ranges(
    model: nn.Module | str | Path | Checkpoint,
    batch: Any = None,
    *,
    tokens: int = TOKENS,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    progress: bool = True,
    revision: str | None = None,
) -> Ranges:
    """Run a forward and a backward, and record the largest magnitude in every tensor of the step.

    The step computes the mean loss in float32 from the stored weights, in evaluation mode, without autocast and without the
    casts of a `PrecisionPolicy`. Only one block at a time is converted to float32. Blocks are recomputed in the backward.
    The measurement does not change a model in memory, its gradients, hooks, modes and random states. The measurement of a
    checkpoint is cached if `batch` is None and `tokens` is at least the default.

    Args:
        model: a module (with or without PEFT adapters and quantized layers), or a checkpoint: a directory, a GGUF file,
            `embedded:NAME`, a hub id, or an open `Checkpoint`.
        batch: inputs and labels of the model, as a dict of tensors or a list of such dicts. The default is a few short texts
            that isotype contains.
        tokens: number of tokens of the default texts.
        device: the device to run on. The default is the model's device, or the CPU for a checkpoint.
        dtype: compute dtype. The default is float32, or bfloat16 if float32 does not fit into free memory.
        progress: True to show a bar on a terminal if the measurement takes longer than three seconds.
        revision: branch, tag or commit of a hub id.

    Returns:
        The measurement. If float32 overflows, the values are infinity or NaN, and a note names the first operator that
        overflowed.

    Raises:
        CheckpointError: the checkpoint does not exist, or cannot be loaded.
        UsageError: isotype cannot make a batch for the model, `batch` is not a batch, or weights are not in this process.
    """
    source = model if isinstance(model, nn.Module) else open_checkpoint(model, revision)
    return measured_and_kept(measure, source, batch, tokens, device=device, dtype=dtype, progress=progress)


def measured_and_kept(
    measure: Callable[..., Measurement], source: Checkpoint | nn.Module, batch: Any, tokens: int, **rest: Any
) -> Measurement:
    """Return the result of `measure`. For a checkpoint and at least `TOKENS` tokens of isotype's texts, cache the result."""
    if isinstance(source, nn.Module):
        return measure(*to_measure(source, batch, tokens), **rest)
    source = source.downloaded()
    measured = measure(*to_measure(source, batch, tokens), **rest)
    measured = replace(measured, key=source.fingerprint or "")
    return saved_or_noted(measured) if measured.key and batch is None and tokens >= TOKENS else measured


def to_measure(source: Checkpoint | nn.Module, batch: Any, tokens: int) -> tuple[Measured, Batches]:
    """Return the model to measure and the batches (isotype's texts if `batch` is None). A checkpoint must be local."""
    measured = Measured.of(source) if isinstance(source, nn.Module) else of_checkpoint(source)
    if batch is not None:
        return measured, Batches.of(batch).require_positions(measured.model)
    if isinstance(source, nn.Module):
        return measured, Batches.for_model(measured.model, _tokenizer_of_module(measured.model), tokens)
    return measured, Batches.for_model(measured.model, source.tokenizer(), tokens)


def _tokenizer_of_module(model: nn.Module) -> Any:
    """Return the tokenizer of the checkpoint from which a model in memory was loaded; None if it is not available."""
    name = str(getattr(without_peft(model), "name_or_path", "") or "")
    try:
        files = (local_path(name) or local_snapshot(name)) if name else None
        return None if files is None else open_checkpoint(files).tokenizer()
    except CheckpointError:
        return None  # the checkpoint was moved or removed since


def of_checkpoint(checkpoint: Checkpoint) -> Measured:
    """Return the model of a checkpoint for a measurement. Its weights stay on disk if they can be read block by block."""
    if saved := checkpoint.facts.saved_format:
        return _loaded(checkpoint, f"its weights are stored in {saved}")
    model = blank_model(checkpoint.model_config)
    stored = StoredWeights(model, checkpoint.require_headers())
    named = list(model.named_parameters(remove_duplicate=False))
    held = {id(parameter): name for name, parameter in reversed(named) if name in stored.shapes}
    missing = next((name for name, parameter in named if id(parameter) not in held), None)
    if missing is not None:
        return _loaded(
            checkpoint,
            f"the checkpoint has no {missing}, so transformers initialises this weight with random values",
        )
    fill_buffers(model, stored)

    def read(_: nn.Module, __: str, parameter: torch.Tensor) -> Weight:
        name = held[id(parameter)]
        return Weight(id(parameter), parameter.shape, lambda: stored.read(name))

    return Measured(model, checkpoint.name, torch.device("cpu"), read)


def _loaded(checkpoint: Checkpoint, why: str) -> Measured:
    request = PrecisionRequest("auto", checkpoint.facts.saved_format)
    policy, _ = resolve_request(checkpoint.facts, request, "cpu", checkpoint)
    model = load(checkpoint, policy)
    note = f"the model was loaded whole, not block by block: {why}"
    return Measured(model.requires_grad_(False), checkpoint.name, torch.device("cpu"), None, (note,))

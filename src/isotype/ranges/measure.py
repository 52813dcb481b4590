"""Measurement of a module's largest values in one forward and backward in float32."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from isotype.compat.torch import tree_map
from isotype.core.console import Bar
from isotype.core.dtypes import dtype_name
from isotype.core.errors import UsageError
from isotype.core.names import free_memory
from isotype.core.random_states import random_states_kept
from isotype.model.loss import find_loss, loss_of
from isotype.model.walk import blocks_in, kind_of
from isotype.precision.devices.probe import real_device
from isotype.precision.ranges import Ranges
from isotype.ranges.batches import Batches
from isotype.ranges.recorder import RangeRecorder
from isotype.ranges.twin import Read, Twin, twin_of, unwrapped
from isotype.ranges.weights import Weights

_ROOM = 1.5
"""Memory of a measurement relative to the largest block's weights."""


@dataclass(frozen=True)
class Measured:
    """The module to measure.

    Attributes:
        model: on the meta device if its weights stay on disk.
        source: description of the model.
        device: its device.
        read: reads a parameter's values; None if the parameter holds them.
        notes: for the result.
    """

    model: nn.Module
    source: str
    device: torch.device
    read: Read | None = None
    notes: tuple[str, ...] = ()

    def fitting_dtype(self, device: torch.device) -> torch.dtype:
        """Return float32, or bfloat16 if the largest block does not fit into the device's memory in float32."""
        free = free_memory(device)
        needed = _ROOM * 4 * max(parts(self.model), default=0)
        return torch.bfloat16 if free is not None and needed > free else torch.float32


def parts(model: nn.Module) -> list[int]:
    """Return the weight counts of the units held in memory together: blocks, and modules outside of blocks."""
    blocks = blocks_in(model)
    inside = {id(module) for block in blocks for module in block.modules()}
    parts = [sum(each.numel() for each in block.parameters()) for block in blocks]
    outside = [module for module in model.modules() if id(module) not in inside]
    return parts + [
        sum(each.numel() for each in module.parameters(recurse=False))
        for module in outside
        if kind_of(module) != "embedding"  # its rows are read on lookup
    ]


def of_module(model: nn.Module) -> Measured:
    """Return a model in memory; raises UsageError if its weights have no values here."""
    model = unwrapped(model)
    for name, parameter in model.named_parameters():
        if parameter.is_meta or hasattr(parameter, "full_tensor"):
            where = "on the meta device" if parameter.is_meta else "sharded over processes"
            raise UsageError.of(
                "this model cannot be measured in memory",
                f"{name} {where}",
                "weights with values",
                "give the checkpoint, by its path or hub id",
            )
    device = next((each.device for each in model.parameters()), torch.device("cpu"))
    return Measured(model, type(base_of(model)).__name__, device)


def base_of(model: nn.Module) -> nn.Module:
    """Return the base model of a PEFT model; other models unchanged."""
    base: nn.Module = model.get_base_model() if hasattr(model, "peft_config") else model  # type: ignore[operator]
    return base


def measure(
    measured: Measured,
    run: Batches,
    *,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    progress: bool = True,
) -> Ranges:
    """Run forward and backward of the mean loss and record the largest magnitude of every value.

    It runs in float32 in evaluation mode, without autocast and the policy's boundaries. Only one block is in
    float32 at a time: blocks are recomputed in the backward. The model, its gradients, hooks, modes and
    random states stay unchanged.

    Args:
        measured: the model.
        run: its batches.
        device: device of the computation; by default the model's.
        dtype: dtype of the computation; by default float32, or bfloat16 if that does not fit into free
            memory.
        progress: whether to show a progress bar on a terminal after three seconds.

    Returns:
        The measurement, without a key. If float32 overflows, it has infinity or NaN, and a note names the
            first operator.
    """
    where = real_device(device) if device is not None else measured.device
    chosen = dtype or measured.fitting_dtype(where)
    recorder, weights = RangeRecorder(), Weights(chosen, where)
    bar = Bar("measuring value ranges", progress)
    twin = twin_of(measured.model, weights, recorder, bar.advance, measured.read)
    bar.total = 2 * len(run.batches) * sum(map(len, twin.blocks))
    try:
        losses, notes = _run(twin, recorder, run, where, chosen)
    finally:
        bar.close()
    return replace(
        _ranges(recorder, twin, run),
        source=measured.source,
        dtype=dtype_name(chosen),
        loss=losses,
        notes=(*measured.notes, *run.notes, *notes),
    )


def _ranges(recorder: RangeRecorder, twin: Twin, run: Batches) -> Ranges:
    """Return the recorded ranges, without source and key."""
    return Ranges(
        source="",
        key="",
        when=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        dtype="",
        text=run.said,
        tokens=run.tokens,
        batches=run.rows or len(run.batches),
        spread=recorder.spread(),
        modules=recorder.modules(twin.weight_ranges()),
        operators=recorder.operators(),
        stream=_stream(recorder, twin),
    )


def _run(
    twin: Twin, recorder: RangeRecorder, run: Batches, device: torch.device, dtype: torch.dtype
) -> tuple[tuple[float, ...], tuple[str, ...]]:
    """Run forward and backward of every batch; return the losses and notes."""
    losses, notes = [], dict[str, None]()
    with undisturbed(device):
        for batch in run.batches:
            inputs = on_device(batch, device, dtype)
            with recorder.step(run.rows):
                output = twin.model(**inputs)
                if find_loss(output) is None:
                    notes[
                        "the model returns no loss: gradients are those of the mean of its first output"
                    ] = None
                loss = loss_of(output)
                loss = loss if not loss.ndim else loss.float().mean()
                del output  # logits can be larger than a block of a small model
                recorder.phase = "backward"
                if loss.requires_grad:
                    loss.backward()  # type: ignore[no-untyped-call]
                else:
                    notes["the loss depends on nothing that takes a gradient: there are no gradients"] = None
            twin.weights.end_step()
            losses.append(float(loss.detach()))
    if recorder.first:
        notes[f"not finite in {dtype_name(dtype)}: {recorder.first}"] = None
    return tuple(losses), tuple(notes)


@contextlib.contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """Disable the caller's autocast and inference modes, and restore the random states on exit."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(random_states_kept(device))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.autocast(device.type, enabled=False))
        yield


def on_device(batch: Mapping[str, Any], device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Return a batch's tensors on a device; floats are copied in `dtype` and require gradients."""

    def moved(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if not value.is_floating_point():
            return value.to(device)
        # So that modules fed only by images or embeddings get gradients.
        return value.detach().to(device, dtype, copy=True).requires_grad_()

    return {name: tree_map(moved, value) for name, value in batch.items()}


def _stream(recorder: RangeRecorder, twin: Twin) -> tuple[str, ...]:
    """Return the embedding before each list of blocks, and the blocks."""
    order = recorder.order()
    stream: list[str] = []
    start = 0
    for blocks in sorted((each for each in twin.blocks if each[0] in order), key=lambda each: order[each[0]]):
        first = order[blocks[0]]
        embeddings = [
            name for name, at in order.items() if start <= at < first and recorder.kind(name) == "embedding"
        ]
        stream += [*embeddings[:1], *(block for block in blocks if block in order)]
        start = order[stream[-1]]
    return tuple(dict.fromkeys(stream))

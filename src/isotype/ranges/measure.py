"""The largest values of a module, in one forward and backward in float32."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from isotype.compat.torch import tree_map
from isotype.core.bar import Bar
from isotype.core.dtypes import dtype_name
from isotype.core.random_states import random_states_kept
from isotype.model.loss import find_loss, loss_of
from isotype.precision.devices.probe import real_device
from isotype.precision.ranges import Ranges
from isotype.ranges.batches import Batches
from isotype.ranges.measured import Measured
from isotype.ranges.recorder import RangeRecorder
from isotype.ranges.twin import Twin, twin_of
from isotype.ranges.weights import Weights


def measure(
    measured: Measured,
    run: Batches,
    *,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    progress: bool = True,
) -> Ranges:
    """Run a forward and a backward of the mean loss and write down the largest magnitude of every value.

    It is computed in float32 from the weights as they are, in evaluation mode, without autocast and without a policy's
    boundaries. One block at a time is there in float32: blocks are computed again in the backward. The model is not changed, nor
    its gradients, hooks, modes or random states.

    Args:
        measured: the model.
        run: what it is called with.
        device: where it is computed; by default where the model is.
        dtype: dtype that it is computed in; by default float32, bfloat16 where that does not fit into free memory.
        progress: whether a bar is shown on a terminal when it takes longer than three seconds.

    Returns:
        The measurement, without a key. Where even float32 overflows it holds infinity or NaN, and a note names the first operator.
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
    """What was recorded, of a model that has no name yet."""
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
    """Forward and backward of every batch: their losses, and what there is to say."""
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
                del output  # logits are larger than a block of a small model
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
    """Whatever the caller has switched on is off, what is drawn is put back."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(random_states_kept(device))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.autocast(device.type, enabled=False))
        yield


def on_device(batch: Mapping[str, Any], device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """A batch's tensors on a device: floats in `dtype`, copied, with a gradient."""

    def moved(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if not value.is_floating_point():
            return value.to(device)
        # Gradients reach what only images or embeddings lead to.
        return value.detach().to(device, dtype, copy=True).requires_grad_()

    return {name: tree_map(moved, value) for name, value in batch.items()}


def _stream(recorder: RangeRecorder, twin: Twin) -> tuple[str, ...]:
    """The embedding before each list of blocks, and its blocks."""
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

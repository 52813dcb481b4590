"""Inputs, pictures, adapters and trainable weights that change no prediction."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from isotype.core.names import starred
from isotype.model.loss import find_loss
from isotype.records.reach import NoReach
from isotype.trace.reach.place import gradients_of
from isotype.trace.reach.probe import Probe

COUNT = "num_items_in_batch"
_PICTURES = ("pixel", "features", "audio", "image")


def unused_inputs(probe: Probe, padding_is_read: bool) -> Iterator[NoReach]:
    """Yield pictures and sounds of learned rows, and attention masks over padding, that change no prediction."""
    batch, shown = probe.batch, probe.of_pictures.any(-1)
    unlearned = bool(shown.any()) and not bool(shown[probe.learned.rows].any())
    for name, value in batch.inputs.items():
        if (
            isinstance(value, torch.Tensor)
            and not unlearned
            and value.is_floating_point()
            and any(word in name for word in _PICTURES)
        ):
            changed = batch.but(**{name: value + probe.noise(value) * value.abs().max().clamp_min(1.0)})
            if _nothing(probe, changed):
                yield NoReach("picture", name)
    mask = batch.inputs.get("attention_mask")
    if isinstance(mask, torch.Tensor) and mask.shape == batch.ids.shape and padding_is_read:
        hidden = mask.clone()
        for row in sorted(set(probe.learned.rows.tolist())):
            real = (~batch.padding[row]).nonzero()[:, 0]
            last = (
                int(real[-1])
                if probe.of_rows
                else int(probe.learned.columns[probe.learned.rows == row].max())
            )
            before = real[real < last]
            hidden[row, before[len(before) // 2 :][:2]] = 0
        if not torch.equal(hidden, mask) and _nothing(probe, batch.but(attention_mask=hidden)):
            yield NoReach("input", "attention_mask")


def unused_count(probe: Probe) -> Iterator[NoReach]:
    """Yield `num_items_in_batch`, the number of labels in a step's micro-batches, if it does not change the loss."""
    count = probe.batch.inputs.get(COUNT)
    if count is None:
        return
    losses = []
    with torch.no_grad():
        for inputs in (probe.batch.inputs, probe.batch.but(num_items_in_batch=count * 2)):
            losses.append(find_loss(probe.run(inputs)))
    if losses[0] is not None and losses[1] is not None and torch.equal(losses[0], losses[1]):
        yield NoReach("count", COUNT)


def _nothing(probe: Probe, inputs: dict[str, object]) -> bool:
    change = probe.changes(inputs, torch.ones(len(probe.learned), dtype=torch.bool))
    return len(change) > 0 and float(change.max()) == 0.0


def unused_weights(probe: Probe) -> Iterator[NoReach]:
    """Yield trainable weights outside of the loss's graph, and those whose gradient is exactly zero in every layer.

    Experts count as one set, because a batch need not use each expert.
    """
    model = probe.copy.model
    trains = any(weight.requires_grad for weight in model.parameters())
    gradients = gradients_of(model, probe.loss()) if trains else {}
    silent: dict[str, bool] = {}
    outside: dict[str, bool] = {}
    for name, gradient in gradients.items():
        outside[starred(name)] = outside.get(starred(name), True) and gradient is None
        if gradient is not None:
            silent[starred(name)] = silent.get(starred(name), True) and not bool(gradient.any())
    for name in (name for name, alone in outside.items() if alone):
        yield NoReach("ungraded", name)
    for name, nothing in silent.items():
        if nothing:
            yield NoReach("adapter" if "lora_" in name else "weight", name, _why(probe, name, gradients))


def _why(probe: Probe, name: str, trained: Iterable[str]) -> str:
    """Return PEFT's reason for an adapter without effect; "" if PEFT's layer shows none."""
    parameter = next(other for other in trained if starred(other) == name)
    layer = (
        probe.copy.model.get_submodule(parameter.partition(".lora_")[0]) if ".lora_" in parameter else None
    )
    scaling = getattr(layer, "scaling", {})
    silent = [
        adapter for adapter, scale in scaling.items() if scale == 0 and f".{adapter}." in f"{parameter}."
    ]
    return f"the scaling of the adapter {silent[0]!r}, lora_alpha / r, is 0" if silent else ""

"""Inputs, pictures, adapters and trainable weights that do not change any prediction."""

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
    """Yield the inputs that change no prediction, among pictures and sounds in labelled rows and the attention mask."""
    batch, learned, has_picture = probe.batch, probe.learned, probe.of_pictures.any(-1)
    unlearned = bool(has_picture.any()) and not bool(has_picture[learned.rows].any())
    for name, value in () if unlearned else batch.inputs.items():
        is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
        if is_float and any(word in name for word in _PICTURES):
            changed = batch.but(**{name: value + probe.noise(value) * value.abs().max().clamp_min(1.0)})
            if _changes_nothing(probe, changed):
                yield NoReach("picture", name)
    mask = batch.inputs.get("attention_mask")
    if isinstance(mask, torch.Tensor) and mask.shape == batch.ids.shape and padding_is_read:
        hidden = mask.clone()
        for row in sorted(set(learned.rows.tolist())):
            real = (~batch.padding[row]).nonzero()[:, 0]
            last = int(real[-1] if probe.of_rows else learned.columns[learned.rows == row].max())
            before = real[real < last]
            hidden[row, before[len(before) // 2 :][:2]] = 0
        if not torch.equal(hidden, mask) and _changes_nothing(probe, batch.but(attention_mask=hidden)):
            yield NoReach("input", "attention_mask")


def unused_count(probe: Probe) -> Iterator[NoReach]:
    """Yield `num_items_in_batch`, the number of labels in all micro-batches of a step, if it does not change the loss."""
    count = probe.batch.inputs.get(COUNT)
    if count is None:
        return
    with torch.no_grad():
        loss = find_loss(probe.run(probe.batch.inputs))
        other = find_loss(probe.run(probe.batch.but(num_items_in_batch=count * 2)))
    if loss is not None and other is not None and torch.equal(loss, other):
        yield NoReach("count", COUNT)


def _changes_nothing(probe: Probe, inputs: dict[str, object]) -> bool:
    change = probe.changes(inputs)
    return len(change) > 0 and float(change.max()) == 0.0


def unused_weights(probe: Probe) -> Iterator[NoReach]:
    """Yield the trainable weights that are outside of the loss's graph, or whose gradient is exactly zero in all layers.

    All experts of a layer count as one weight, because a batch does not always use every expert.
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
    for name in (name for name, everywhere in outside.items() if everywhere):
        yield NoReach("ungraded", name)
    for name in (name for name, everywhere in silent.items() if everywhere):
        yield NoReach("adapter" if "lora_" in name else "weight", name, _why(probe, name, gradients))


def _why(probe: Probe, name: str, trained: Iterable[str]) -> str:
    """If an adapter has no effect because its scaling in PEFT's layer is 0, return this reason, else ""."""
    parameter = next(other for other in trained if starred(other) == name)
    if ".lora_" not in parameter:
        return ""
    layer = probe.copy.model.get_submodule(parameter.partition(".lora_")[0])
    for adapter, scale in getattr(layer, "scaling", {}).items():
        if scale == 0 and f".{adapter}." in f"{parameter}.":
            return f"the scaling of the adapter {adapter!r}, lora_alpha / r, is 0"
    return ""

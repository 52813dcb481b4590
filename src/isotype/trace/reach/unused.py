"""What is there to change the predictions and changes none: inputs, pictures, adapters, trainable weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from isotype.core.names import starred
from isotype.model.loss import find_loss
from isotype.records.reach import NoReach
from isotype.trace.reach.probe import Probe

COUNT = "num_items_in_batch"
_PICTURES = ("pixel", "features", "audio", "image")


def unused_inputs(probe: Probe, padding_is_read: bool) -> Iterator[NoReach]:
    """Pictures and sounds of rows that are learned, and an attention mask that would hide padding, whose change changes no prediction."""
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
    """`num_items_in_batch`, the labels of all micro-batches of a step, by which a loss is to be divided, if it changes no loss."""
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
    """Trainable weights whose gradient is zero to the last bit in every layer, although they are part of the loss's graph.

    Experts are one set: a batch need not reach each of them.
    """
    named = probe.copy.model.named_parameters()
    trained = {name: each for name, each in named if each.requires_grad and each.is_floating_point()}
    loss = probe.loss() if trained else None
    if loss is None or not loss.requires_grad:
        return
    gradients = torch.autograd.grad(loss.sum(), list(trained.values()), allow_unused=True)
    silent: dict[str, bool] = {}
    for name, gradient in zip(trained, gradients, strict=True):
        if gradient is not None:
            silent[starred(name)] = silent.get(starred(name), True) and not bool(gradient.any())
    for name, nothing in silent.items():
        if nothing:
            yield NoReach("adapter" if "lora_" in name else "weight", name, _why(probe, name, trained))


def _why(probe: Probe, name: str, trained: Iterable[str]) -> str:
    """Why an adapter changes nothing, where PEFT's layer says so; else ""."""
    parameter = next(each for each in trained if starred(each) == name)
    layer = (
        probe.copy.model.get_submodule(parameter.partition(".lora_")[0]) if ".lora_" in parameter else None
    )
    scaling = getattr(layer, "scaling", {})
    silent = [
        adapter for adapter, scale in scaling.items() if scale == 0 and f".{adapter}." in f"{parameter}."
    ]
    return f"the scaling of the adapter {silent[0]!r}, lora_alpha / r, is 0" if silent else ""

"""Measures which inputs affect which predictions: changes an input of a small copy and compares the copy's logits."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import nn

from isotype.core.errors import error_line
from isotype.core.names import grouped, starred
from isotype.core.random_states import random_states_kept
from isotype.core.threads import one_thread
from isotype.model.loss import find_loss
from isotype.model.small import NoCopyError, small_copy
from isotype.records.reach import Labels, Matrix, NoReach, Reach, Unused
from isotype.trace.reach.batch import IGNORED, Batch, batch_of, by_token, renumbered
from isotype.trace.reach.leaks import leaks
from isotype.trace.reach.probe import LEAST_CHANGE, Probe, UndecidedError, gradients_of, logits_of, spread
from isotype.trace.reach.processes import collective_mismatch, skipped_modules, without_gradient

_MATRIX_ROWS = 24
_DRAWS = 2
_SHARED_OUT = 1 << 27
"""A copy runs on all threads if weights times tokens exceed this number. One thread would take over 0.02 s."""

Sharing = Literal["", "ddp", "fsdp"]
_COUNT = "num_items_in_batch"
_PICTURES = ("pixel", "features", "audio", "image")


def measure_reach(
    model: nn.Module,
    inputs: Mapping[str, Any],
    seconds: float = 6.0,
    most_bytes: int | None = None,
    others: Sequence[Mapping[str, Any]] = (),
    sharing: Sharing = "",
) -> Reach | None:
    """Measure which inputs of the batch affect which predictions of a small copy of the model.

    Args:
        model: the model, whose weights need no values; it is not changed.
        inputs: keyword arguments of the model, with token ids and labels.
        seconds: time limit in CPU seconds of this thread. A sentence in `Reach.undecided` reports missing measurements.
        most_bytes: memory limit in bytes for a copy of the whole model; None for no limit. The limit does not apply to
            a model without a transformers config.
        others: batches that other processes get at the same time.
        sharing: how these processes train together; "" for one process.

    Returns:
        The measurement; None if the batch has no token ids, or only tensors without values.
    """
    batch = batch_of(inputs)
    if batch is None:
        return None
    rows, tokens = batch.ids.shape
    more = [other for other in map(batch_of, others) if other is not None]
    try:
        copy = small_copy(model, torch.cat([*map(_all_tokens, (batch, *more))]), most_bytes)
    except Exception as error:  # noqa: BLE001 - a class may refuse to be copied; the reason is reported
        known = isinstance(error, NoCopyError)
        why = str(error) if known else f"no small copy could be made: {error_line(error)}"
        return Reach("", rows, tokens, undecided=(why,))
    batch, deadline = renumbered(batch, copy.tokens), time.thread_time() + seconds
    more = [renumbered(other, copy.tokens) for other in more]
    weights = sum(parameter.numel() for parameter in copy.model.parameters())
    with random_states_kept(), one_thread(weights * batch.ids.numel() <= _SHARED_OUT):
        for dtype in (dtype for dtype in LEAST_CHANGE if dtype.itemsize <= copy.dtype.itemsize):
            try:
                reach = _measured(Probe(copy, batch.to(dtype), deadline, dtype))
                batches = [member.to(dtype) for member in (batch, *more)]
                return _of_processes(reach, copy.model, batches, sharing)
            except Exception as error:  # noqa: BLE001 - any code may fail on changed inputs; the reason is reported
                known = isinstance(error, UndecidedError)
                why = str(error) if known else f"the copy could not be run: {error_line(error)}"
            copy.model.to(torch.float32)
    return Reach(copy.words, rows, tokens, undecided=(why,))


def _of_processes(reach: Reach, model: nn.Module, batches: Sequence[Batch], sharing: Sharing) -> Reach:
    """Return the measurement together with the differences between processes. `model` cannot be used afterwards."""
    try:
        if sharing == "ddp":
            return replace(reach, ungraded=without_gradient(model, batches))
        if sharing == "fsdp":
            reach = replace(reach, skipped=skipped_modules(model, batches))
            return replace(reach, mismatch=collective_mismatch(model, batches))
    except Exception as error:  # noqa: BLE001 - any code may fail on another batch; the reason is reported
        why = f"the processes' batches could not be compared: {error_line(error)}"
        return replace(reach, undecided=(*reach.undecided, why))
    return reach


def _all_tokens(batch: Batch) -> torch.Tensor:
    tokens = torch.cat([ids.flatten() for ids in batch.tokens.values()])
    return tokens[tokens >= 0]


def _measured(probe: Probe) -> Reach:
    rows, tokens = probe.batch.ids.shape
    of_copy = tuple(leaks(probe))
    padding = any(leak.source in ("padding", "padding position") for leak in of_copy)
    reach = Reach(
        probe.copy.words,
        rows,
        tokens,
        labels=_labels(probe) if probe.batch.labelled else None,
        leaks=of_copy,
        unused=(*_unused_inputs(probe, padding), *_unused_weights(probe), *_unused_count(probe)),
        matrix=_matrix(probe, of_copy[0].row if of_copy else int(probe.learned.rows[0])),
    )
    return replace(reach, undecided=("there was no time for all measurements",)) if probe.late else reach


def _labels(probe: Probe) -> Labels:
    batch, labels = probe.batch, probe.batch.inputs["labels"]
    at_padding = at_pictures = 0
    if labels.shape == batch.ids.shape:
        learned = labels != IGNORED
        at_padding = int((learned & batch.padding).sum())
        at_pictures = int((learned & probe.of_pictures).sum())
    return Labels(len(probe.learned), probe.shift, at_padding, at_pictures)


def _matrix(probe: Probe, row: int) -> Matrix | None:
    """For some predictions of a row, return the tokens whose embeddings get a gradient; None without gradients."""
    table = getattr(probe.copy.model, "get_input_embeddings", lambda: None)()
    learned, ids = probe.learned, probe.batch.ids
    places = (learned.rows == row).nonzero()[:, 0].tolist()
    if not isinstance(table, nn.Module) or probe.of_rows or probe.late or not places:
        return None
    embeddings: list[torch.Tensor] = []

    def keep(_: nn.Module, __: Any, output: torch.Tensor) -> torch.Tensor:
        embeddings.append(output.detach().requires_grad_())
        return embeddings[-1].clone()  # the model may modify the embeddings in place

    with table.register_forward_hook(keep):
        logits = logits_of(probe.run(probe.batch.inputs), ids)
    if logits is None or not embeddings or embeddings[0].shape[:2] != ids.shape:
        return None
    reached = []
    for at in spread(0, len(places) - 1, _MATRIX_ROWS):
        column = int(learned.columns[places[at]])
        logit = logits[row, column, learned.targets[places[at]]]
        (gradient,) = torch.autograd.grad(logit, embeddings[0], retain_graph=True, materialize_grads=True)
        reached.append((column, tuple(gradient[row].abs().amax(-1).nonzero()[:, 0].tolist())))
    return Matrix(row, tuple(probe.batch.sequences[row].tolist()), tuple(reached))


def _unused_inputs(probe: Probe, padding_is_read: bool) -> Iterator[NoReach]:
    """Yield the inputs that change no prediction: attention masks, and images and audio in labelled rows."""
    batch, learned, has_picture = probe.batch, probe.learned, probe.of_pictures.any(-1)
    unlearned = bool(has_picture.any()) and not bool(has_picture[learned.rows].any())
    for name, value in () if unlearned else batch.inputs.items():
        is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
        if is_float and any(word in name for word in _PICTURES):
            changed = batch.but(**{name: value + probe.noise(value) * value.abs().max().clamp_min(1.0)})
            if _changes_nothing(probe, changed):
                yield NoReach("picture", name)
    mask = by_token(batch.inputs, "attention_mask")
    if mask is not None and padding_is_read:
        hidden = mask.clone()
        for row in sorted(set(learned.rows.tolist())):
            real = (~batch.padding[row]).nonzero()[:, 0]
            last = int(real[-1] if probe.of_rows else learned.columns[learned.rows == row].max())
            before = real[real < last]
            hidden[row, before[len(before) // 2 :][:2]] = 0
        if not torch.equal(hidden, mask) and _changes_nothing(probe, batch.but(attention_mask=hidden)):
            yield NoReach("input", "attention_mask")


def _unused_count(probe: Probe) -> Iterator[NoReach]:
    """Yield a finding if the loss does not depend on `num_items_in_batch`, the number of labels in all micro-batches."""
    count = probe.batch.inputs.get(_COUNT)
    if count is None:
        return
    with torch.no_grad():
        loss = find_loss(probe.run(probe.batch.inputs))
        other = find_loss(probe.run(probe.batch.but(num_items_in_batch=count * 2)))
    if loss is not None and other is not None and torch.equal(loss, other):
        yield NoReach("count", _COUNT)


def _changes_nothing(probe: Probe, inputs: dict[str, object]) -> bool:
    change = probe.changes(inputs)
    return len(change) > 0 and float(change.max()) == 0.0


def _unused_weights(probe: Probe) -> Iterator[NoReach]:
    """Yield trainable weights that are outside of the loss's graph in all layers, or have zero gradients in all layers.

    All experts of a layer count as one weight, because a batch does not use every expert.
    """
    model, loss = probe.copy.model, None
    if any(weight.requires_grad for weight in model.parameters()):
        loss = probe.loss()
    gradients = gradients_of(model, loss)
    in_layers = grouped(gradients, starred)
    used = {name: [g for n in names if (g := gradients[n]) is not None] for name, names in in_layers.items()}
    for name in (name for name, group in used.items() if not group):
        yield NoReach("ungraded", name)
    for name in (name for name, group in used.items() if group and not any(map(torch.any, group))):
        group = [model.get_parameter(other) for other in in_layers[name]]
        if probe.late or _changes_loss(probe, group, loss):
            continue  # the gradient is zero only at these values, as behind a saturated softmax
        kind: Unused = "adapter" if "lora_" in name else "weight"
        kind = "ungraded" if _lacks_tokens(probe, name) else kind
        yield NoReach(kind, name, _reason(probe, in_layers[name][0]))


def _lacks_tokens(probe: Probe, name: str) -> bool:
    """Return whether a parameter contains PEFT's trained embeddings of tokens that the batch lacks."""
    layer, delta, adapter = name.partition(".trainable_tokens_delta.")
    if not delta:
        return False
    tokens: Any = probe.copy.model.get_submodule(layer).token_indices
    return not bool(torch.isin(probe.batch.ids, torch.as_tensor(tokens[adapter])).any())


@torch.no_grad()
def _changes_loss(probe: Probe, weights: Sequence[torch.Tensor], loss: torch.Tensor | None) -> bool:
    """Return whether other values of the weights change the copy's loss or cause an error."""
    weights = [weight for weight in weights if weight.numel()]
    values = [weight.clone() for weight in weights]
    try:
        for _ in range(_DRAWS):
            noise = [probe.noise(weight) * weight.abs().max().clamp_min(1.0) for weight in weights]
            for factor in (10, -20):  # in one direction, then in the other
                for weight, part in zip(weights, noise, strict=True):
                    weight += factor * part
                other = probe.loss()
                if loss is not None and other is not None and not torch.equal(loss, other):
                    return True
    except Exception:  # noqa: BLE001 - code that fails on other values depends on them
        return True
    finally:
        for weight, value in zip(weights, values, strict=True):
            weight.copy_(value)
    return False


def _reason(probe: Probe, parameter: str) -> str:
    """Return a reason if an adapter has no effect because its scaling in PEFT's layer is 0; else ""."""
    if ".lora_" not in parameter:
        return ""
    layer = probe.copy.model.get_submodule(parameter.partition(".lora_")[0])
    for adapter, scale in getattr(layer, "scaling", {}).items():
        if scale == 0 and f".{adapter}." in f"{parameter}.":
            return f"the scaling of the adapter {adapter!r}, lora_alpha / r, is 0"
    return ""

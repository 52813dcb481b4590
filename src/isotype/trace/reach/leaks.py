"""Leaks: predictions that depend on inputs that they must not depend on. Each source of leaks has its own test."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from isotype.core.operators import tensors_of
from isotype.records.reach import Leak, Source
from isotype.trace.reach.batch import IGNORED
from isotype.trace.reach.probe import Probe, spread

_MOST_SEQUENCES = 3
_CUTS = 3


def leaks(probe: Probe) -> Iterator[Leak]:
    """Yield the leaks that the small copy of the model has, at most one for each source."""
    if len(probe.copy.plain) < 2:
        return
    for source in (_neighbours, _other_rows, _padding, _padding_positions, _later, _label):
        if probe.late:
            return
        if (leak := source(probe)) is not None:
            yield leak


def _leak(
    probe: Probe, source: Source, changed: dict[str, Any], at: torch.Tensor, guarded: torch.Tensor
) -> Leak | None:
    """Return a leak if the inputs `changed` change a prediction that must stay the same; else None.

    `at` is a mask of the predictions with a label (`probe.learned`), True if a prediction must stay the same. `guarded`
    is a mask of the tokens whose hidden states must stay the same, `[rows, tokens]`.
    """
    if not probe.of_rows:
        # A padding token attends to no token or to all tokens, so its prediction has no meaning.
        at = at & ~probe.batch.padding[probe.learned.rows, probe.learned.columns]
    change = probe.changes(changed, at) if at.any() else torch.zeros(0)
    changes = (change > probe.least).nonzero()[:, 0]
    if not len(changes):
        return None
    first = int(at.nonzero()[:, 0][changes[0]])
    module, kind = _first_place(probe, changed, guarded)
    row, column = int(probe.learned.rows[first]), int(probe.learned.columns[first])
    return Leak(source, row, column, len(changes), len(change), float(change.max()), module, kind)


def _first_place(probe: Probe, changed: dict[str, Any], where: torch.Tensor) -> tuple[str, str]:
    """Return (name, class) of the first module whose outputs at the tokens `where` change although its inputs do not."""
    before, after = (_hidden(probe, inputs, where) for inputs in (probe.batch.inputs, changed))
    for name, (inputs, outputs) in after.items():
        if name not in before or not outputs or not name:
            continue
        inputs_before, outputs_before = before[name]
        if _differ(outputs_before, outputs, probe.least) and not _differ(inputs_before, inputs, probe.least):
            return name, type(probe.copy.model.get_submodule(name)).__name__
    return "", ""


_Hidden = list[torch.Tensor]
"""Float tensors of a module's inputs or outputs, at some tokens."""


def _hidden(probe: Probe, inputs: Any, where: torch.Tensor) -> dict[str, tuple[_Hidden, _Hidden]]:
    """Return the inputs and outputs of each module at the tokens `where`, in the order in which the modules return."""
    hidden: dict[str, tuple[_Hidden, _Hidden]] = {}

    def at_tokens(values: Any) -> _Hidden:
        floats = (x for x in tensors_of(values) if x.is_floating_point() and x.dim() >= 3)
        return [tensor[where].clone() for tensor in floats if tensor.shape[:2] == where.shape]

    def keep(name: str, _: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if name not in hidden:
            hidden[name] = (at_tokens((args, kwargs)), at_tokens(output))

    with torch.no_grad(), ExitStack() as hooks:
        for name, module in probe.copy.model.named_modules():
            hooks.enter_context(module.register_forward_hook(partial(keep, name), with_kwargs=True))
        probe.run(inputs)
    return hidden


def _differ(before: _Hidden, after: _Hidden, least: float) -> bool:
    """Return whether a value differs by more than `least`, relative to the tensor's largest value."""
    pairs = [(x, y) for x, y in zip(before, after, strict=False) if x.shape == y.shape and x.numel()]
    return any(float((x - y).abs().max()) > least * float(x.abs().max()) for x, y in pairs)


def _neighbours(probe: Probe) -> Leak | None:
    """Change the tokens of one sequence in a packed row, and compare the predictions of the other sequences."""
    batch, learned = probe.batch, probe.learned
    if not batch.packed or probe.of_rows:
        return None
    for sequence in range(min(int(batch.sequences.max()) + 1, _MOST_SEQUENCES)):
        within = batch.sequences == sequence
        guarded = ~within & within.any(-1, keepdim=True) & ~batch.padding
        other = probe.other_tokens(within & probe.meaningless)
        at = guarded[learned.rows, learned.columns]
        leak = _leak(probe, "packed row", batch.but(input_ids=other), at, guarded)
        if leak is not None:
            return replace(leak, without=_cure(probe, other, at))
    return None


def _cure(probe: Probe, other: torch.Tensor, at: torch.Tensor) -> str:
    """Return "attention_mask" if a packed row has no leak when this input is removed; else ""."""
    batch = probe.batch
    has_positions = isinstance(batch.inputs.get("position_ids"), torch.Tensor)
    if not has_positions or "attention_mask" not in batch.inputs or batch.packed_by == "attention_mask":
        return ""
    base = probe.logits(batch.but(attention_mask=None))
    change = probe.changes(batch.but(input_ids=other, attention_mask=None), at, base)
    return "attention_mask" if len(change) and float(change.max()) <= probe.least else ""


def _other_rows(probe: Probe) -> Leak | None:
    """Change the tokens of the first row, and compare the predictions of the other rows."""
    batch, learned = probe.batch, probe.learned
    within = torch.zeros_like(batch.padding)
    within[0] = True
    other = probe.other_tokens(within & probe.meaningless)
    return _leak(probe, "other row", batch.but(input_ids=other), learned.rows != 0, ~within & ~batch.padding)


def _padding(probe: Probe) -> Leak | None:
    """Change the padding tokens, and compare the predictions. Without an attention mask, padding is at the ends of rows."""
    batch, learned = probe.batch, probe.learned
    where = batch.padding if bool(batch.padding.any()) else _unmasked_padding(probe)
    if not where.any():
        return None
    within = where[learned.rows, learned.columns]
    at = torch.ones_like(within) if probe.of_rows else ~within
    leak = _leak(probe, "padding", batch.but(input_ids=probe.other_tokens(where)), at, ~where)
    return None if leak is not None and probe.of_rows and not _embeddings_reach(probe, where) else leak


def _embeddings_reach(probe: Probe, where: torch.Tensor) -> bool:
    """Return whether the logits change if only the embeddings at `where` change, not the token ids.

    A classifier searches a row's ids for padding, so other ids can change the logits even if embeddings cannot.
    """
    table = getattr(probe.copy.model, "get_input_embeddings", lambda: None)()
    if not isinstance(table, nn.Module):
        return True

    def disturb(_: nn.Module, __: Any, output: torch.Tensor) -> torch.Tensor:
        return output + where[..., None] * probe.noise(output) if output.shape[:2] == where.shape else output

    with table.register_forward_hook(disturb):
        change = probe.changes(probe.batch.inputs)
    return bool((change > probe.least).any())


def _unmasked_padding(probe: Probe) -> torch.Tensor:
    """Return a mask `[rows, tokens]` of unlabelled padding at the ends of rows; all False with an attention mask."""
    batch = probe.batch
    config: Any = getattr(probe.copy.model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else None
    ids = (getattr(part, "pad_token_id", None) for part in (config, text))
    pad = next((token for token in ids if isinstance(token, int)), None)
    labels = batch.inputs["labels"]
    if "attention_mask" in batch.inputs or pad is None or labels.shape != batch.ids.shape:
        return torch.zeros_like(batch.padding)
    idle = (batch.ids == pad) & (labels == IGNORED)
    front, back = idle.long().cumprod(-1), idle.flip(-1).long().cumprod(-1).flip(-1)
    runs = (front + back) > 0
    # A single padding token may be the end-of-sequence token.
    padding: torch.Tensor = runs & (runs.sum(-1, keepdim=True) > 1)
    return padding


def _padding_positions(probe: Probe) -> Leak | None:
    """Remove the padding in front of a row, and compare the predictions of the row."""
    batch, learned = probe.batch, probe.learned
    shape = batch.ids.shape
    tensors = {name: value for name, value in batch.inputs.items() if isinstance(value, torch.Tensor)}
    by_token = all(tensor.shape[:2] == shape for tensor in tensors.values())
    if probe.of_rows or "attention_mask" not in tensors or not by_token:
        return None
    front = batch.padding.long().cumprod(-1).sum(-1)
    row = int(front.argmax())
    size = int(front[row])
    at = (learned.rows == row) & (learned.columns >= size)
    if not size or not at.any():
        return None
    alone = {**batch.inputs, **{name: tensor[row : row + 1, size:] for name, tensor in tensors.items()}}
    after = probe.logits(alone)
    if after.shape[1] != shape[1] - size:
        return None
    columns = learned.columns[at]
    change = (after[0, columns - size] - probe.base[row, columns]).abs().amax(-1) / probe.base.abs().max()
    changed = change > 10 * probe.least  # tensors of other shapes are rounded differently
    if not changed.any():
        return None
    first, number = int(columns[changed][0]), int(changed.sum())
    return Leak("padding position", row, first, number, len(change), float(change.max()))


def _later(probe: Probe) -> Leak | None:
    """For a model that predicts the next token: change the tokens from a column on, and compare the earlier predictions."""
    batch, learned = probe.batch, probe.learned
    if probe.shift is None or probe.shift < 1:
        return None
    for cut in spread(int(learned.columns.min()) + 1, int(learned.columns.max()), _CUTS):
        behind = torch.zeros_like(batch.padding)
        behind[:, cut:] = True
        other = probe.other_tokens(behind & probe.meaningless)
        at, guarded = learned.columns < cut, ~behind & ~batch.padding
        leak = _leak(probe, "later token", batch.but(input_ids=other), at, guarded)
        if leak is not None:
            return leak
    return None


def _label(probe: Probe) -> Leak | None:
    """Change the labels from a column on, and compare the predictions of the earlier labels."""
    batch, learned, labels = probe.batch, probe.learned, probe.batch.inputs["labels"]
    if probe.of_rows or labels.dim() != 2 or not batch.labelled:
        return None
    cut = int(learned.columns.median())
    behind = torch.zeros_like(labels, dtype=torch.bool)
    behind[:, cut:] = True
    other = probe.other_tokens(behind & (labels != IGNORED), labels)
    at = learned.columns + max(probe.shift or 0, 0) <= cut
    return _leak(probe, "own label", batch.but(labels=other), at, torch.zeros_like(batch.padding))

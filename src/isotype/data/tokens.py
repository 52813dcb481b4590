"""Rows of token ids: checks of their columns, and labels that are made from masks."""

from collections.abc import Iterator, Sequence
from typing import Any

from isotype.core.errors import Problem
from isotype.core.names import plural
from isotype.data.cells import Row, describe

IGNORED = -100
"""Label of a token for which no loss is computed."""

_MASKS = ("completion_mask", "assistant_masks", "assistant_mask", "loss_mask")
_UNREAD = ("token_type_ids", "position_ids")
TOKEN_COLUMNS = ("labels", *_MASKS, "attention_mask", *_UNREAD)
"""Columns that a row with `input_ids` may have."""
ID_COLUMNS = ("input_ids", "labels", "chosen_ids", "rejected_ids")

_LABEL_FIX = f"write {IGNORED} where no loss is computed, and the token's id elsewhere"
_MASK_FIX = "write 1 for each token that is used, and 0 for all other tokens"
_FIXES = {
    "labels": _LABEL_FIX,
    **dict.fromkeys((*_MASKS, "attention_mask"), _MASK_FIX),
    **dict.fromkeys(_UNREAD, "remove the column; tokens without loss need the label -100"),
}


def with_labels(row: Row, prompts: bool) -> Row | Problem:
    """Return a row of token ids with `labels` instead of masks and without padding, or the problem of the row.

    If `prompts` is True, the loss includes prompt tokens, and `completion_mask` is ignored.
    """
    ids = row["input_ids"]
    if not isinstance(ids, list) or not ids or not any(name in row for name in TOKEN_COLUMNS):
        return row  # the check of the column `input_ids` reports invalid ids
    for name in TOKEN_COLUMNS:
        if name in row and (fault := _fault(name, row[name], len(ids))):
            return Problem(f"column '{name}' {fault[0]}", fault[1], _FIXES[name])
    masks = [name for name in _MASKS if name in row and not (prompts and name == "completion_mask")]
    shown = row.get("attention_mask", [1] * len(ids))
    targets = map(all, zip(shown, *(row[name] for name in masks), strict=True))
    pairs = zip(row.get("labels", ids), targets, strict=True)
    labels = [label if is_target else IGNORED for label, is_target in pairs]
    if set(labels) == {IGNORED}:
        what = f"no token of the row has loss, because each label is {IGNORED} or masked"
        fix = "write a label, or remove the example"
        return Problem(what, "at least one label that is a token's id", fix)
    converted = {name: value for name, value in row.items() if name not in TOKEN_COLUMNS}
    if masks or "labels" in row:
        converted["labels"] = labels
    if not all(shown):
        first, last = _ends(shown)
        names = converted.keys() & {"input_ids", "labels"}
        converted |= {name: converted[name][first:last] for name in names}
    return converted


def _ends(shown: Sequence[int]) -> tuple[int, int]:
    positions = [position for position, value in enumerate(shown) if value]
    return (positions[0], positions[-1] + 1) if positions else (0, 0)


def _fault(name: str, values: Any, count: int) -> tuple[str, str] | None:
    """Return (fault, expected values) if a column is invalid in a row of `count` token ids, else None."""
    mask = name not in ("labels", *_UNREAD)
    kinds = (int, bool) if mask else (int,)
    if not isinstance(values, list):
        return f"is {describe(values)}", "a list of whole numbers"
    if wrong := [value for value in values if type(value) not in kinds][:1]:
        return f"holds {describe(wrong[0])}", "a list of whole numbers"
    if len(values) != count:
        return f"has {plural(len(values), 'value')} for {plural(count, 'token id')}", "a value for each token"
    if mask and not {0, 1}.issuperset(values):
        return f"holds {next(value for value in values if value not in (0, 1))}", "0 and 1"
    if name == "labels" and (below := next((v for v in values if v < 0 and v != IGNORED), None)):
        return f"holds {below}", f"token ids, or {IGNORED} where no loss is computed"
    if name == "attention_mask" and not all(values[slice(*_ends(values))] or [0]):
        return "is 0 for tokens inside of the row", "0 only for padding at the ends of the row"
    usual = {"token_type_ids": [0] * count, "position_ids": list(range(count))}
    if values != usual.get(name, values):
        return "has values that the trainer does not read", "'input_ids' with 'labels' or masks"
    return None


def token_faults(rows: Any, size: int | None) -> Iterator[tuple[int, Problem]]:
    """Yield (row number, problem) for the first unknown id in each column, and for a row with too few or too many
    labels.

    `rows` is a `datasets.Dataset`. `size` is the number of ids that the model has, or None if the number is unknown.
    """
    import pyarrow.compute as pc

    names = [name for name in ID_COLUMNS if name in rows.column_names]
    reported: set[str] = set()
    start = 0
    for table in rows.select_columns(names).with_format("arrow").iter(batch_size=1000) if names else ():
        if {"input_ids", "labels"} <= set(names):
            counts = [pc.list_value_length(table[name]) for name in ("input_ids", "labels")]
            if pc.any(differ := pc.not_equal(*counts)).as_py() and not reported:
                at = pc.index(differ, True).as_py()
                ids, labels = (count[at].as_py() for count in counts)
                what = f"column 'labels' has {plural(labels, 'value')} for {plural(ids, 'token id')}"
                yield start + at, Problem(what, "a value for each token", _LABEL_FIX)
                return
        for name in names:
            column = table[name].combine_chunks()
            values = pc.list_flatten(column)
            bad = pc.less(values, 0)
            if name == "labels":
                bad = pc.and_(bad, pc.not_equal(values, IGNORED))
            if size is not None:
                bad = pc.or_(bad, pc.greater_equal(values, size))
            if name in reported or not pc.any(bad).as_py():
                continue
            reported.add(name)
            at = pc.index(bad, True).as_py()
            what = f"column '{name}' holds {values[at].as_py()}"
            expected = "0 or more" if size is None else f"0 to {size - 1}, the ids that the model has"
            fix = "compute the ids with the tokenizer of this model"
            if name == "labels":
                expected, fix = f"{expected}; or {IGNORED}", _LABEL_FIX
            yield start + pc.list_parent_indices(column)[at].as_py(), Problem(what, expected, fix)
        start += table.num_rows

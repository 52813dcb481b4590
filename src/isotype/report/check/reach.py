"""A chart of which tokens reach which predictions, one square per pair."""

from __future__ import annotations

from isotype.records.reach import Reach

SIDE = 14
"""Pixels between squares."""


def reach_picture(reach: Reach | None) -> dict[str, object] | None:
    """Return the template's data; None without a measurement."""
    matrix = None if reach is None else reach.matrix
    if reach is None or matrix is None:
        return None
    causal = reach.labels is not None and reach.labels.shift == 1
    squares = [
        (
            token * SIDE,
            line * SIDE,
            "seen" if not causal or matrix.meant(column, token) else "wrong",
            f"token {token} reaches the prediction after token {column}",
        )
        for line, (column, tokens) in enumerate(matrix.reached)
        for token in tokens
    ]
    borders = [
        token * SIDE
        for token in range(1, len(matrix.sequences))
        if matrix.sequences[token] != matrix.sequences[token - 1]
    ]
    wrong = sum(css == "wrong" for _, _, css, _ in squares)
    return {
        "squares": squares,
        "borders": borders,
        "lines": [(line * SIDE, f"after {column}") for line, (column, _) in enumerate(matrix.reached)],
        "width": len(matrix.sequences) * SIDE,
        "height": len(matrix.reached) * SIDE,
        "about": f"row {matrix.row} of the batch: {len(matrix.sequences)} tokens from left to right, a line for each prediction",
        "words": f"{len(squares)} squares, {wrong} of them where a token reaches a prediction that must not see it",
        "wrong": wrong,
    }

"""A data set as a training takes it: steps, padding, hours."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from isotype.planning.record import Row, Workload
from isotype.planning.request import PlanRequest


def longest_of_batches(tokens: Sequence[int], rows: int) -> float:
    """Tokens of the longest of `rows` rows that are drawn from these without order, on average.

    The k-th of n sorted lengths is the longest of r rows in C(k - 1, r - 1) of C(n, r) draws.
    """
    ordered, count = sorted(tokens), len(tokens)
    rows = min(rows, count)
    mean, share = 0.0, rows / count  # of draws whose longest is the last
    for at in range(count, rows - 1, -1):
        mean += share * ordered[at - 1]
        if at > rows:
            share *= (at - rows) / (at - 1)
    return mean


def work_of(request: PlanRequest, row: Row, seconds: Callable[[int, int], float | None]) -> Workload | None:
    """What the data set of a request takes by a row; None where it names none.

    Args:
        request: the question.
        row: the settings.
        seconds: of a micro-batch of so many rows of so many tokens; None where they are unknown.
    """
    step = request.step
    if step.data_rows is None:
        return None
    at_once = row.rows * row.accumulation * row.devices
    steps = math.ceil(-(-step.data_rows // at_once) * request.epochs)
    if step.lengths is None:
        whole = None if row.time is None else steps * row.time.seconds
        return Workload(step.data_rows, request.epochs, steps, whole)
    lengths = step.lengths.tokens
    some = [min(tokens, row.length) for tokens in lengths]
    tokens = round(sum(some) * step.data_rows / len(some))
    mean = longest_of_batches(some, row.rows)
    each = seconds(row.rows, max(1, round(mean)))
    full = None if row.time is None else row.time.seconds / row.tokens
    return Workload(
        step.data_rows,
        request.epochs,
        steps,
        None if each is None else steps * row.accumulation * each,
        tokens,
        max(lengths),
        sum(length > row.length for length in lengths) / len(lengths),
        1 - sum(some) / len(some) / mean,
        None if full is None else tokens * request.epochs * full,
    )

"""Steps, padding and hours of a data set, compared with an enumeration of all draws."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest

from isotype.planning.record import Device, Record, Time
from isotype.planning.request import parse_request
from isotype.planning.search import work_of
from isotype.planning.text import facts_of
from isotype.train.rows.lengths import Lengths, longest_of_batches
from tests.planning.rows import row


@pytest.mark.parametrize("rows", range(1, 8))
def test_the_longest_of_a_batch_is_the_mean_over_all_batches(rows: int) -> None:
    tokens = (3, 9, 9, 1, 40, 7)
    batches = list(combinations(tokens, min(rows, len(tokens))))
    assert longest_of_batches(tokens, rows) == pytest.approx(sum(map(max, batches)) / len(batches))


def test_what_a_data_set_takes() -> None:
    request, _ = parse_request(["m", "--device", "t4", "--rows", "2", "--num_train_epochs", "2"])
    step = replace(request.step, data_rows=100, lengths=Lengths((10, 20, 30, 200), 100))
    request = replace(request, step=step)
    some = row(rows=2, length=100, accumulation=3, time=Time(6.0, 3.0, "products", 10))
    work = work_of(request, some, lambda rows, tokens: rows * tokens / 100)
    assert work is not None
    # An epoch has 17 steps of 6 rows. Rows have 10, 20, 30 and (cut) 100 tokens: 40 on average, 63.3 the longer of two.
    assert (work.rows, work.steps, work.tokens, work.longest, work.cut) == (100, 34, 4000, 200, 0.25)
    assert work.seconds == pytest.approx(34 * 3 * 2 * 63 / 100)
    assert work.padding == pytest.approx(1 - 40 / (380 / 6))
    assert work.packed_seconds == pytest.approx(2 * 4000 * 6.0 / 600)


def test_max_steps_ends_before_or_after_the_epochs() -> None:
    request, _ = parse_request(["m", "--device", "t4", "--rows", "2", "--max_steps", "34"])
    step = replace(request.step, data_rows=100, lengths=Lengths((10, 20, 30, 200), 100))
    some = row(rows=2, length=100, accumulation=3, time=Time(6.0, 3.0, "products", 10))
    for packed, steps in ((False, 17), (True, 7)):
        work = work_of(
            replace(request, step=replace(step, packed=packed)), some, lambda rows, tokens: rows * tokens
        )
        assert work is not None
        assert (work.epochs, work.steps) == (34 / steps, 34)


def test_packed_rows_are_counted_as_rows_and_packs() -> None:
    request, _ = parse_request(["m", "--device", "t4", "--rows", "2", "--num_train_epochs", "2"])
    step = replace(request.step, data_rows=100, lengths=Lengths((10, 20, 30, 200), 100), packed=True)
    request = replace(request, step=step)
    some = row(rows=2, length=100, accumulation=3, time=Time(6.0, 3.0, "products", 10))
    work = work_of(request, some, lambda rows, tokens: None)
    assert work is not None
    # 4,000 tokens are 40 packs; a step has 6 packs.
    assert (work.rows, work.packs, work.steps, work.seconds) == (100, 40, 14, 14 * 6.0)
    assert (work.tokens, work.cut, work.padding, work.packed_seconds) == (4000, 0.25, 0, None)
    device = Device("t4", "NVIDIA T4", None, "", "", (), replace(some, work=work))
    label, text = list(facts_of(Record("m", "sft", "", "balanced", (device,)), device))[-1]
    assert label == "data"
    assert text.startswith("100 rows in about 40 packs, 2 epochs: 14 steps, 1 min 24 s of steps; ")


def test_rows_of_unknown_length_count_as_full() -> None:
    request, _ = parse_request(["m", "--device", "t4", "--num_train_epochs", "1"])
    request = replace(request, step=replace(request.step, data_rows=10))
    some = row(rows=4, length=100, accumulation=1, time=Time(2.0, 1.0, "products", 10))
    work = work_of(request, some, lambda rows, tokens: None)
    assert work is not None
    assert (work.steps, work.seconds, work.tokens, work.padding) == (3, 6.0, None, None)


def test_without_a_data_set_nothing_is_said() -> None:
    request, _ = parse_request(["m", "--device", "t4"])
    assert work_of(request, row(), lambda rows, tokens: 1.0) is None

"""The fingerprint of training rows: the rows count, not where they lie nor how they are cut."""

from __future__ import annotations

from pathlib import Path

import datasets
import pytest

from isotype.data import load
from isotype.data.load import fingerprint_of_rows

ROWS = [{"text": f"row {i}", "label": [i, None], "none": None if i % 3 else "x"} for i in range(2500)]


def test_the_same_rows_wherever_they_lie(tmp_path: Path) -> None:
    made = datasets.Dataset.from_list(ROWS)
    found = fingerprint_of_rows(made)
    assert found is not None
    assert found.startswith("2,500 rows, ")
    made.save_to_disk(tmp_path / "saved")
    assert fingerprint_of_rows(datasets.load_from_disk(tmp_path / "saved")) == found
    parts = [made.select(range(at, min(at + 333, 2500))) for at in range(0, 2500, 333)]
    assert fingerprint_of_rows(datasets.concatenate_datasets(parts)) == found
    assert fingerprint_of_rows(made.select([*range(2500)])) == found
    assert fingerprint_of_rows(made.select_columns(["none", "text", "label"])) == found
    wider = datasets.concatenate_datasets([datasets.Dataset.from_list([*ROWS[:7], *ROWS]), made])
    assert fingerprint_of_rows(wider.select(range(7, 2507))) == found


@pytest.mark.parametrize(
    "other",
    [
        ROWS[:-1],
        [*ROWS[1:], ROWS[0]],
        [*ROWS[:-1], {**ROWS[-1], "text": "Row 2499"}],
        [{**row, "more": 1} for row in ROWS],
        [*ROWS[:-1], {**ROWS[-1], "label": [2499, 0]}],
    ],
    ids=["fewer", "order", "one letter", "a column", "none and zero"],
)
def test_other_rows(other: list[dict[str, object]]) -> None:
    assert fingerprint_of_rows(datasets.Dataset.from_list(other)) != fingerprint_of_rows(
        datasets.Dataset.from_list(ROWS)
    )


def test_large_data_is_sampled_over_its_whole_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "_READ_BYTES", 20_000)
    made = datasets.Dataset.from_list(ROWS)
    found = fingerprint_of_rows(made)
    assert found == fingerprint_of_rows(datasets.Dataset.from_list(ROWS))
    assert found != fingerprint_of_rows(datasets.Dataset.from_list(list(reversed(ROWS))))


def test_a_stream_has_none() -> None:
    assert fingerprint_of_rows(datasets.Dataset.from_list(ROWS).to_iterable_dataset()) is None

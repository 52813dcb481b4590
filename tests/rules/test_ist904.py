from __future__ import annotations

import pytest

from isotype.records.reach import Labels
from isotype.rules.ist904_wrong_labels import find
from tests.rules.samples import reached


@pytest.mark.parametrize(
    ("shift", "cause"),
    [
        (2, "the labels are already shifted, and the model shifts them again"),
        (-1, "each prediction is compared with the token before its position"),
    ],
)
def test_labels_of_another_token(shift: int, cause: str) -> None:
    (finding,) = find(reached(labels=Labels(28, shift)))
    assert (finding.severity, finding.cause) == ("error", cause)


def test_labels_at_padding_and_at_pictures() -> None:
    padding, pictures = find(reached(labels=Labels(30, 1, at_padding=5, at_pictures=1)))
    assert (padding.severity, padding.message) == ("warning", "5 tokens of padding count in the loss")
    assert padding.fixes[0].description == "labels.masked_fill(attention_mask == 0, -100)"
    assert pictures.message == "1 token of images counts in the loss"


def test_labels_of_the_next_token_are_silent() -> None:
    assert not list(find(reached(labels=Labels(30, 1))))

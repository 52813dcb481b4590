from __future__ import annotations

from isotype.records.reach import NoReach
from isotype.rules.ist905_reaches_nothing import find
from tests.rules.samples import reached


def test_a_picture_that_reaches_nothing_is_an_error_and_a_mask_a_warning() -> None:
    unused = (NoReach("picture", "pixel_values"), NoReach("input", "attention_mask"))
    picture, mask = find(reached(unused=unused))
    assert (picture.severity, picture.message) == ("error", "pixel_values reaches no prediction")
    assert picture.cause == "with other values of pixel_values, no bit of the logits changes"
    assert (mask.severity, mask.message) == ("warning", "attention_mask reaches no prediction")


def test_weights_are_another_rule() -> None:
    assert not list(find(reached(unused=(NoReach("adapter", "a.lora_A.default.weight"),))))

from __future__ import annotations

from isotype.records.reach import NoReach
from isotype.rules.ist902_padding import find
from tests.rules.samples import leak, reached


def test_padding_without_a_mask() -> None:
    (finding,) = find(reached(leak("padding"), input_ids=(2, 16)))
    assert (finding.severity, finding.message) == ("error", "the model treats padding as text")
    assert finding.cause == "the batch has padding and no attention mask"
    assert finding.fixes[0].description == "pass the attention mask to the model"


def test_padding_behind_a_mask_that_a_module_does_not_heed() -> None:
    given = leak("padding", module="model.conv", kind="Conv1d")
    (finding,) = find(reached(given, input_ids=(2, 16), attention_mask=(2, 16)))
    assert (finding.module, finding.cause) == ("model.conv", "Conv1d ignores the attention mask")


def test_padding_that_moves_the_positions_is_a_warning() -> None:
    (finding,) = find(reached(leak("padding position", module="", kind="")))
    assert (finding.severity, finding.cause) == (
        "warning",
        "positions are counted from the first padding token",
    )


def test_a_mask_that_reaches_nothing_is_another_rule() -> None:
    assert not list(find(reached(leak("padding"), unused=(NoReach("input", "attention_mask"),))))


def test_no_padding_is_silent() -> None:
    assert not list(find(reached(leak("packed row"))))

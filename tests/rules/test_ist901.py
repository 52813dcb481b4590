from __future__ import annotations

from isotype.rules.ist901_packed_rows import find
from tests.rules.samples import leak, reached, trace


def test_a_mask_of_ones_beside_positions_is_named_with_a_verified_fix() -> None:
    (finding,) = find(reached(leak("packed row", without="attention_mask")))
    assert (finding.severity, finding.module) == ("error", "model.layers.0.self_attn")
    assert finding.message == "the sequences of a packed row attend to each other"
    assert (
        finding.cause
        == "the batch has attention_mask as well as position_ids, so LlamaAttention attends to the whole row"
    )
    assert finding.notes == (
        "16 of 16 predictions change, the first at row 0, token 7; the largest change is 1.2 times the largest logit",
        "measured in float64 on a copy of the model, with 2 rows of 16 tokens",
    )
    (fix,) = finding.fixes
    assert (fix.description, fix.verified) == ("remove attention_mask from the batch", True)


def test_a_model_that_reads_no_sequences_is_named() -> None:
    (finding,) = find(reached(leak("packed row", module="backbone.layers.0.mixer", kind="MambaMixer")))
    assert finding.cause == "MambaMixer does not separate the sequences of a row"
    assert not finding.fixes[0].verified


def test_other_leaks_and_no_measurement_are_silent() -> None:
    assert not list(find(reached(leak("padding"))))
    assert not list(find(trace()))

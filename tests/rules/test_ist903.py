from __future__ import annotations

from isotype.records.reach import Labels
from isotype.rules.ist903_seen_before import find
from tests.rules.samples import leak, reached


def test_a_missing_causal_mask() -> None:
    (finding,) = find(reached(leak("later token")))
    assert (finding.severity, finding.message) == (
        "error",
        "predictions depend on the tokens that they predict",
    )
    assert finding.cause == "LlamaAttention lets a token attend to later tokens"


def test_labels_that_a_model_is_fed() -> None:
    (finding,) = find(reached(leak("own label", module="", kind="")))
    assert finding.message == "predictions depend on the labels of the same positions"
    assert finding.cause.startswith("the model uses the labels as an input")


def test_a_loss_that_shifts_nothing() -> None:
    (finding,) = find(reached(labels=Labels(32, shift=0)))
    assert finding.message == "every token predicts itself"


def test_the_next_token_and_other_labels_are_silent() -> None:
    assert not list(find(reached(labels=Labels(30, shift=1))))
    assert not list(find(reached(labels=Labels(2, shift=None))))

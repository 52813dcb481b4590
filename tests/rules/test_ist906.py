from __future__ import annotations

from isotype.records.reach import NoReach
from isotype.rules.ist906_idle_weights import find
from tests.rules.samples import BF16, adapter, reached

A, B = (f"model.layers.0.self_attn.q_proj.lora_{each}.default.weight" for each in "AB")
STARRED = tuple(name.replace(".0.", ".*.") for name in (A, B))


def test_an_adapter_of_scale_0_reaches_nothing() -> None:
    why = "the scaling of the adapter 'default', lora_alpha / r, is 0"
    unused = tuple(NoReach("adapter", name, why) for name in STARRED)
    (finding,) = find(reached(weights=[adapter(BF16, A), adapter(BF16, B)], unused=unused))
    assert (finding.severity, finding.message) == ("error", "the loss depends on no trainable weight")
    assert finding.cause == why
    assert finding.fixes[0].description == "set the scale of the adapter (lora_alpha) above 0"


def test_a_part_of_what_is_trained_is_a_warning() -> None:
    head = "lm_head.lora_A.default.weight"
    (finding,) = find(
        reached(weights=[adapter(BF16, A), adapter(BF16, head)], unused=(NoReach("adapter", head),))
    )
    assert (finding.severity, finding.message) == (
        "warning",
        "1 of 2 groups of trainable weights do not affect the loss",
    )
    assert finding.cause == f"with random values in every weight, the gradient of {head} is exactly zero"


def test_pictures_are_another_rule() -> None:
    assert not list(find(reached(unused=(NoReach("picture", "pixel_values"),))))

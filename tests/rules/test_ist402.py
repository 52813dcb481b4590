from __future__ import annotations

from dataclasses import replace

from isotype.rules.ist402_state_missing import find
from tests.rules.samples import BF16, packed, trace, weight


def test_a_lost_state() -> None:
    (finding,) = find(trace([packed(state=None)]))
    assert finding.severity == "error"
    assert finding.message == "1 quantized weight has lost the quantization state"
    assert finding.fixes[0].actions[0].kind == "advice"


def test_a_head_that_the_checkpoint_lacks() -> None:
    """transformers 5.23 quantizes `score` of a token classifier, and draws its weight as a float parameter."""
    heads = [
        replace(
            packed(state=None),
            dtype=BF16,
            module=f"base_model.model.score.{part}",
            name=f"base_model.model.score.{part}.weight",
        )
        for part in ("original_module", "modules_to_save.default")
    ]
    (finding,) = find(trace(heads))
    assert finding.message == "2 weights are not quantized, but the layer computes with packed codes"
    assert finding.cause == "score.weight is bfloat16: the checkpoint lacks it, or code replaced it"
    assert (
        finding.fixes[0].description
        == "load the model with BitsAndBytesConfig(…, llm_int8_skip_modules=['score'])"
    )


def test_states_at_hand_are_silent() -> None:
    assert not list(find(trace([packed(), weight()])))

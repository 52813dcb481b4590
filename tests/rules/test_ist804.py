from __future__ import annotations

from isotype.rules.ist804_pinned import find
from tests.rules.samples import BF16, FP16, FP32, trace, weight


def test_a_rounded_pin() -> None:
    cast = weight("encoder.block.0.wo.weight", FP16, pinned=True, set_at="cast at train.py:3")
    (finding,) = find(trace([cast], compute=FP16))
    assert finding.cause == "encoder.block.0.wo.weight is float16, cast at train.py:3"
    assert finding.severity == "warning"
    assert finding.message == "1 parameter is float16; the model's author requires float32"
    assert [action.kind for action in finding.fixes[1].actions] == ["parameter", "boundary"]


def test_in_bfloat16_it_is_a_note() -> None:
    (finding,) = find(trace([weight(dtype=BF16, pinned=True)]))
    assert finding.severity == "note"


def test_pins_that_hold_are_silent() -> None:
    assert not list(find(trace([weight(dtype=FP32, pinned=True), weight(dtype=FP16)])))

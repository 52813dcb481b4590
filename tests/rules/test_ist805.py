from __future__ import annotations

from isotype.rules.ist805_reductions import find
from tests.rules.samples import BF16, FP32, call, operand, trace


def test_log_probabilities_in_bfloat16() -> None:
    reduction = call("aten._log_softmax.default", operand(BF16, shape=(2, 16, 512)))
    (finding,) = find(trace(calls=[reduction, reduction]))
    assert finding.severity == "warning"
    assert finding.message == "log_softmax over 512 values returns bfloat16"
    assert finding.fixes[0].description == "cast the input of log_softmax to float32"


def test_float32_and_short_axes_are_silent() -> None:
    wide = call("aten._log_softmax.default", operand(FP32, shape=(2, 16, 512)), result=FP32)
    experts = call("aten._log_softmax.default", operand(BF16, shape=(32, 8)))
    assert not list(find(trace(calls=[wide, experts])))

from __future__ import annotations

import torch

from tests.reality import real_step
from tests.rules.traces import found, traced, verified
from tests.small import ids, line, net, wide_norms

RULE = "ist101_operands"


def test_norms_that_return_float32() -> None:
    (finding,) = verified(wide_norms(3), ids(), "IST101")
    assert finding.severity == "error"
    assert finding.message == "float32 meets bfloat16 in an operator that takes one dtype"
    assert (finding.module, finding.op, finding.phase) == ("layers.0.proj", "aten.addmm.default", "forward")
    assert finding.cause == "layers.0.norm.weight is float32"
    assert len(finding.evidence) == 2
    assert finding.evidence[0] == "layers.0.norm.weight is float32"
    assert finding.evidence[1].startswith("mul with another dtype promotes to float32 at small.py:")
    assert finding.evidence[1].endswith(" in layers.0.norm")
    assert finding.notes == (
        "2 more operators in 3 modules fail for the same cause",
        "the device says: mat1 and mat2 must have the same dtype, but got Float and BFloat16",
    )
    assert finding.places == ("layers.0.proj", "layers.1.proj", "layers.2.proj")
    assert line(finding.source).startswith("small.py:")
    assert [(fix.description, fix.safety, fix.verified) for fix in finding.fixes] == [
        ("return each ScaledNorm's output in bfloat16", "safe", True),
        ("cast layers.*.norm.weight to bfloat16", "unsafe", True),
        ("return the outputs of layers.*.norm in bfloat16", "safe", True),
    ]


def test_the_device_is_quoted_word_for_word() -> None:
    (finding,) = found(RULE, traced(wide_norms(), ids()))
    outcome = real_step(wide_norms(), ids())
    assert (outcome.phase, outcome.module) == (finding.phase, finding.module)
    assert f"the device says: {outcome.error}" in finding.notes


def test_one_dtype_throughout() -> None:
    assert found(RULE, traced(net(), ids())) == []


def test_autocast_hides_it() -> None:
    assert found(RULE, traced(wide_norms(), ids(), autocast=torch.bfloat16)) == []

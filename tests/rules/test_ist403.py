from __future__ import annotations

import pytest
import torch

from isotype.rules.ist403_packed_raw import find
from isotype.trace.record import Failure
from tests.rules.samples import BF16, FP16, call, operand, packed, trace, weight


def test_a_dense_tensor_where_codes_belong() -> None:
    (finding,) = find(trace([packed(packed=BF16)]))
    assert finding.message == "1 quantized weights hold bfloat16 values where packed codes belong"


def test_a_product_with_codes() -> None:
    product = call("aten.mm.default", operand(FP16), operand(torch.int8, "parameter", "q_proj.weight"))
    (finding,) = find(trace([packed()], [product, product]))
    assert finding.severity == "error"
    assert finding.message == "float16 activations are multiplied with packed int8 codes"
    assert finding.cause == "q_proj.weight holds int8 codes"
    assert finding.notes == ("1 more such products",)


def test_a_plain_layer_around_codes() -> None:
    (finding,) = find(trace([weight(dtype=torch.uint8, shape=(2048, 1))]))
    assert finding.message == "1 plain Linear layers hold packed uint8 codes"


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (
            "RuntimeError: a and b must have same reduction dim, but got [32, 64] X [1, 1024].",
            "holds packed codes",
        ),
        ("RuntimeError: mat1 and mat2 shapes cannot be multiplied (32x64 and 1x2048)", "holds packed codes"),
        (
            "TypeError: nn.Module.to only accepts floating point or complex dtypes, but got desired dtype=torch.uint8",
            "a module is cast to uint8, the dtype of packed codes",
        ),
    ],
)
def test_failures_that_codes_explain(error: str, cause: str) -> None:
    failure = Failure("forward", "model.layers.0.self_attn", "model.py:1", error)
    (finding,) = find(trace([packed()], failure=failure))
    assert cause in finding.cause


@pytest.mark.parametrize(
    "error",
    ["RuntimeError: mat1 and mat2 shapes cannot be multiplied (32x64 and 32x64)", "KeyError: 'labels'"],
)
def test_other_failures_are_silent(error: str) -> None:
    assert not list(find(trace([packed()], failure=Failure("forward", "", "", error))))


def test_a_quantized_layer_is_silent() -> None:
    assert not list(find(trace([packed(), packed(packed=BF16, storage=BF16)])))

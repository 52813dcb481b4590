from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from isotype.rules.ist801_lost_updates import find
from isotype.rules.weight_sets import spacing
from tests.rules.samples import BF16, FP16, FP32, adapter, norm, trace, weight


def test_adapters_that_stand_still() -> None:
    (finding,) = find(trace([adapter(BF16, typical=0.06)], learning_rate=1e-5))
    assert finding.severity == "warning"
    assert finding.message == "updates of 1e-05 are lost in 1 of 1 trainable parameters"
    assert finding.notes == (
        "model.layers.0.self_attn.q_proj.lora_A.default.weight: values near 0.06, where bfloat16 has steps of 2.4e-04",
    )


def test_norms_alone_get_a_border() -> None:
    weights = [norm(BF16, trainable=True, typical=1.0), weight(trainable=True, typical=1e-3)]
    (finding,) = find(trace(weights, learning_rate=1e-4))
    assert [action.kind for action in finding.fixes[0].actions] == ["parameter", "boundary"]


@pytest.mark.parametrize(
    ("given", "rate"),
    [(adapter(FP32, typical=1.0), 1e-6), (adapter(BF16, typical=0.06), 1e-3), (adapter(BF16), 1e-6)],
)
def test_masters_and_larger_rates_are_silent(given: object, rate: float) -> None:
    assert not list(find(trace([given], learning_rate=rate)))  # type: ignore[list-item]


def test_unknown_rates_and_other_optimizers_are_silent() -> None:
    lost = adapter(BF16, typical=1.0)
    assert not list(find(trace([lost])))
    assert not list(find(trace([lost], learning_rate=1e-6, optimizer="sgd")))


@given(st.floats(2**-14, 2**15), st.sampled_from([BF16, FP16]))
def test_spacing_is_the_distance_to_the_next_number(value: float, dtype: torch.dtype) -> None:
    held = torch.tensor(value, dtype=dtype)
    following = torch.nextafter(held, torch.tensor(float("inf"), dtype=dtype))
    assert spacing(float(held), dtype) == float(following) - float(held)

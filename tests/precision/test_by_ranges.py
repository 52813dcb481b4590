from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from isotype.core.tables import table
from isotype.precision import by_ranges
from isotype.precision.by_ranges import LIMIT, decide_by_ranges, known_ranges, number
from isotype.precision.devices.profile import device_profile
from isotype.precision.facts import ModelFacts
from isotype.precision.policy import PrecisionPolicy
from isotype.precision.ranges import ModuleRange, OperatorRange, Ranges

T4 = device_profile("t4")
LAYER = "model.layers.0"
FACTS = ModelFacts("a checkpoint", model_type="llama", trained_dtype=torch.bfloat16)


def measured(**largest: float) -> Ranges:
    """A model of one block; `largest` are magnitudes by module: `down_in`, `down_out`, `block`, `product`, `weight`…"""
    get = largest.get
    return Ranges(
        source="a model",
        key="",
        when="2026-01-01T00:00:00+00:00",
        dtype="float32",
        text="the batch given",
        tokens=64,
        batches=4,
        spread=1.1,
        modules=(
            ModuleRange(
                "model.embed_tokens",
                "embedding",
                0.0,
                3.0,
                weight=get("embedding", 1.0),
                median_weight=get("median_embedding", 0.05),
            ),
            ModuleRange(LAYER, "other", 3.0, get("block", 10.0), gradient=get("gradient", 0.01)),
            ModuleRange(f"{LAYER}.input_layernorm", "norm", 3.0, 5.0, weight=2.0),
            ModuleRange(f"{LAYER}.self_attn", "other", 5.0, 2.0),
            ModuleRange(f"{LAYER}.mlp", "other", 5.0, get("down_out", 7.0)),
            ModuleRange(
                f"{LAYER}.mlp.down_proj",
                "linear",
                get("down_in", 8.0),
                get("down_out", 7.0),
                gradient=get("down_gradient", 1e-3),
                weight=get("weight", 0.5),
                median_weight=get("median", 0.05),
            ),
        ),
        operators=(
            OperatorRange(f"{LAYER}.input_layernorm", "aten.pow.Tensor_Scalar", 0, "forward", (3.0,), 1e6),
            OperatorRange(
                f"{LAYER}.self_attn", "aten.bmm.default", 0, "forward", (5.0, 5.0), get("scores", 9.0)
            ),
            OperatorRange(f"{LAYER}.self_attn", "aten.add.Tensor", 0, "forward", (9.0, 3.4e38), 3.4e38),
            OperatorRange(f"{LAYER}.mlp", "aten.mul.Tensor", 0, "forward", (4.0, 2.0), get("down_in", 8.0)),
            OperatorRange(LAYER, "aten.add.Tensor", 0, "forward", (3.0, 7.0), get("block", 10.0)),
        ),
        stream=("model.embed_tokens", LAYER),
    )


def decided(ranges: Ranges | None, storage: str = "float16", facts: ModelFacts = FACTS, device: str = "t4"):  # type: ignore[no-untyped-def]
    return decide_by_ranges(facts, device_profile(device), torch.float16, storage, ranges)


def how(ranges: Ranges, storage: str = "float16", device: str = "t4") -> dict[str, tuple[str, int]]:
    exceptions = decided(ranges, storage, device=device).exceptions
    return {each.module.removeprefix(f"{LAYER}."): (each.how, each.exponent) for each in exceptions}


def test_headroom_of_two_is_enough() -> None:
    decision = decided(measured(block=LIMIT))
    assert (decision.wide, decision.exceptions) == (False, ())
    assert decision.reasons["residual"] == (
        "as the weights: values reach 32,800 (model.layers.0, measured 2026-01-01), headroom 2"
    )


def test_masks_and_what_norms_compute_inside_are_no_values_of_float16() -> None:
    assert not decided(measured()).wide


def test_a_stream_beyond_the_limit_is_float32_and_nothing_else() -> None:
    decision = decided(measured(block=104_000))
    assert (decision.wide, decision.exceptions) == (True, ())
    assert decision.reasons["residual"].startswith(
        "values reach 104,000 (model.layers.0, measured 2026-01-01)"
    )


def test_a_gated_product_is_scaled_and_multiplied_in_float32() -> None:
    ranges = measured(down_in=200_000)
    assert how(ranges) == {"mlp": ("float32", 0), "mlp.down_proj": ("scale", 3)}
    assert 200_000 / 2**3 <= LIMIT < 200_000 / 2**2


def test_where_float16_is_no_faster_the_layer_is_float32() -> None:
    assert how(measured(down_in=200_000), device="cpu-avx2")["mlp.down_proj"] == ("float32", 0)


@pytest.mark.parametrize("storage", ["nf4", "fp4", "int8"])
def test_quantized_layers_are_scaled_everywhere(storage: str) -> None:
    assert how(measured(down_in=200_000), storage, device="cpu-avx2")["mlp.down_proj"] == ("scale", 3)


def test_attention_scores_beyond_the_limit_are_computed_in_float32() -> None:
    assert how(measured(scores=1e6)) == {"self_attn": ("float32", 0)}


@pytest.mark.parametrize(
    ("weight", "median", "storage", "expected"),
    [
        (1e5, 0.05, "float16", ("float32", 0)),
        (1e-4, 2.0**-18, "float16", ("float32", 0)),
        (1e-4, 2.0**-18, "nf4", ("float32", 0)),
        (1e-4, 2.0**-18, "int8", None),
    ],
)
def test_weights_that_float16_cannot_hold(
    weight: float, median: float, storage: str, expected: tuple[str, int] | None
) -> None:
    ranges = measured(block=1e6, weight=weight, median=median)
    assert how(ranges, storage).get("mlp.down_proj") == expected


@pytest.mark.parametrize(
    ("storage", "unquantized", "wide"),
    [("float16", (), True), ("nf4", (), True), ("int8", (), False), ("int8", ("model.layers",), True)],
)
def test_tiny_weights_are_float32_if_no_value_is_large(
    storage: str, unquantized: tuple[str, ...], wide: bool
) -> None:
    ranges = measured(weight=1e-9, median=3e-10)
    decision = decided(ranges, storage, replace(FACTS, dense=unquantized))
    assert decision.wide is wide
    assert [exception.module for exception in decision.exceptions] == [f"{LAYER}.mlp.down_proj"] * wide
    reason = "mlp.down_proj is in float32: its weights are near 3e-10, where float16 has few digits"
    assert (reason in decision.reasons["residual"]) is wide


def test_autocast_rounds_no_embedding_that_is_stored_in_float32() -> None:
    ranges = measured(median_embedding=3e-10)
    assert how(ranges) == {"model.embed_tokens": ("float32", 0)}
    assert how(ranges, "float32") == {}


def test_adapters_whose_gradients_overflow_at_the_loss_scale() -> None:
    ranges = measured(down_in=30_000, down_gradient=0.01)
    decision = decided(ranges)
    assert not decision.wide
    assert decision.loss_scale * 0.01 * 30_000 > 65504
    assert how(ranges) == {"mlp.down_proj": ("adapters", 0)}


@pytest.mark.parametrize(("gradient", "scale"), [(0.01, 2.0**18), (1e-9, 2.0**24), (4.0, 2.0**9), (1e9, 1.0)])
def test_the_first_loss_scale_keeps_gradients_in_range(gradient: float, scale: float) -> None:
    assert decided(measured(gradient=gradient, down_gradient=0.0)).loss_scale == scale


@pytest.mark.parametrize(
    ("facts", "wide", "reason"),
    [
        (FACTS, True, "the ranges are unknown, and the checkpoint was trained in bfloat16"),
        (replace(FACTS, trained_dtype=None), True, "the checkpoint's training dtype is unknown"),
        (
            replace(FACTS, trained_dtype=torch.float16),
            False,
            "the ranges are unknown, but the checkpoint was trained",
        ),
        (replace(FACTS, model_type="gemma3_text"), True, "activations of this family reach about 800,000"),
    ],
)
def test_without_a_measurement(facts: ModelFacts, wide: bool, reason: str) -> None:
    decision = decided(None, facts=facts)
    assert decision.wide is wide
    assert reason in decision.reasons["residual"]


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
def test_other_dtypes_need_nothing(compute: torch.dtype) -> None:
    decision = decide_by_ranges(FACTS, T4, compute, "nf4", measured(block=1e9))
    assert (decision.wide, decision.exceptions) == (False, ())


def test_known_families_name_their_source() -> None:
    families = table(by_ranges.__file__, "families.json")
    assert families
    for name, entry in families.items():
        assert set(entry) == {"reaches", "source"}
        assert known_ranges(name).endswith(f" ({entry['source']})")
        assert entry["source"].startswith("https://")
    assert known_ranges(None) == known_ranges("a family without a publication") == ""


def test_a_policy_with_exceptions_survives_its_file(tmp_path) -> None:  # type: ignore[no-untyped-def]
    decision = decided(measured(down_in=200_000))
    policy = PrecisionPolicy(
        torch.float16,
        "float16",
        wide_residual=decision.wide,
        exceptions=decision.exceptions,
        loss_scale=512.0,
    )
    policy.save(tmp_path)
    assert PrecisionPolicy.read(tmp_path) == policy
    assert policy.residual == torch.float32
    assert sorted(policy.exception_lines()) == [
        "model.layers.*.mlp in float32: the operands of mul reach 200,000",
        "model.layers.*.mlp.down_proj scaled by powers of two (3): its inputs reach 200,000",
    ]


def test_numbers_as_messages_write_them() -> None:
    assert [number(x) for x in (104_321.0, 3.2, 4e-9, math.inf)] == ["104,000", "3.2", "4e-09", "infinity"]


def test_the_reason_says_what_was_not_measured() -> None:
    note = "tokens reached 6 of 8 experts: the values of the other experts are unknown"
    for block in (LIMIT, 4 * LIMIT):
        assert (
            decided(replace(measured(block=block), notes=(note,))).reasons["residual"].endswith(f"; {note}")
        )

"""The dtype map: which parts it shows, what it folds, and where it puts a finding."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isotype.core.names import plain_name
from isotype.records.trace import Weight
from isotype.report.check.map import Row, dtype_map, layer_counts, split_layer
from tests.report.check_samples import (
    BF16,
    CRASH,
    F16,
    F32,
    LINEARS,
    SAMPLES,
    llama_calls,
    llama_weights,
    plain,
    setup,
    trace,
)


def of_part(rows: tuple[Row, ...], part: str) -> list[Row]:
    return [row for row in rows if row.part == part]


@pytest.mark.parametrize("folded", [False, True])
def test_equal_layers_are_one_row_whether_folded_before_or_not(folded: bool) -> None:
    seen = trace(llama_weights(folded=folded), llama_calls(folded=folded), setup())
    (row,) = of_part(dtype_map(seen, ()), "mlp.up_proj")
    assert (row.name, row.stack, row.layers) == ("model.layers.0–29.mlp.up_proj", "model.layers", 30)
    assert (row.stored, row.adapters) == (("nf4",), ("float32",))
    total = 30 * sum(
        w.bytes for w in llama_weights(layers=1) if w.name.startswith("model.layers.0.mlp.up_proj")
    )
    assert row.bytes == total


def test_parts_come_in_the_order_they_run() -> None:
    rows = dtype_map(SAMPLES["clean"]().trace, ())
    assert list(dict.fromkeys(row.stack or row.part for row in rows)) == [
        "model.embed_tokens", "model.layers", "model.norm", "model.rotary_emb", "lm_head",
    ]  # fmt: skip
    parts = [row.part for row in rows if row.stack]
    assert parts[:2] == ["input_layernorm", "self_attn.q_proj"]
    assert parts.index("self_attn") == parts.index("self_attn.o_proj") - 1
    assert set(LINEARS) < set(parts)


def test_layers_that_differ_are_rows_of_their_own() -> None:
    report = SAMPLES["mixed_layers"]()
    rows = dtype_map(report.trace, report.findings)
    norms, queries = of_part(rows, "input_layernorm"), of_part(rows, "self_attn.q_proj")
    spans = [(0, 2, 3), (3, 3, 1), (4, 16, 13), (17, 17, 1), (18, 29, 12)]
    assert [(row.first, row.last, row.layers) for row in queries] == spans
    assert norms[1].runs == ("float32",)
    assert [row.findings for row in queries] == [(), (0,), (), (0,), ()]


def test_layers_after_the_end_of_the_trace_are_told_from_those_before() -> None:
    rows = of_part(dtype_map(SAMPLES["not_traced"]().trace, ()), "mlp.up_proj")
    assert [(row.first, row.last) for row in rows] == [(0, 2), (3, 29)]
    assert rows[1].runs == ()


def test_a_finding_in_an_adapter_marks_its_layer() -> None:
    finding = replace(CRASH, module="model.layers.0.mlp.up_proj.lora_A.default", places=())
    rows = of_part(dtype_map(SAMPLES["clean"]().trace, (finding,)), "mlp.up_proj")
    assert [(row.name, row.findings) for row in rows if row.findings] == [
        ("model.layers.0.mlp.up_proj", (0,))
    ]


def test_a_finding_that_fits_no_part_has_a_row() -> None:
    finding = replace(CRASH, module="model.layers.0", places=())
    rows = dtype_map(SAMPLES["clean"]().trace, (finding,))
    assert [(row.name, row.stored) for row in rows if row.findings] == [("model.layers.0", ())]


def test_experts_are_one_column_with_all_their_dtypes() -> None:
    weights = [
        plain(f"model.layers.{layer}.mlp.experts.{expert}.up", "linear", BF16 if expert else F32, (4, 4))
        for layer in range(2)
        for expert in range(8)
    ]
    (row,) = dtype_map(trace(weights, (), setup()), ())
    assert (row.name, row.count) == ("model.layers.0–1.mlp.experts.*.up", 8)
    assert row.stored == ("bfloat16", "float32")


def test_parts_of_layers_of_different_kinds() -> None:
    parts = (("a", "b", "d"), ("a", "c", "d"))
    weights = [
        plain(f"layers.{layer}.{part}", "linear", F16, (4, 4))
        for layer, some in enumerate(parts)
        for part in some
    ]
    rows = dtype_map(trace(weights, (), setup()), ())
    assert [row.name for row in rows] == ["layers.0–1.a", "layers.0.b", "layers.0–1.d", "layers.1.c"]


def test_trained_copies_belong_to_the_module_they_copy() -> None:
    original = plain("score.original_module", "linear", F16, (2, 4))
    copy = Weight(
        "score.modules_to_save.default.weight", F32, (2, 4), trainable=True, adapter=True,
        module="score.modules_to_save.default", module_class="Linear",
    )  # fmt: skip
    (row,) = dtype_map(trace((original, copy), (), setup()), ())
    assert (row.name, row.stored, row.adapters) == ("score", ("float16",), ("float32",))


def test_a_model_that_is_one_module_is_one_part() -> None:
    weight = Weight("weight", F32, (4, 4), trainable=True, module="", module_class="Linear", kind="linear")
    (row,) = dtype_map(trace((weight,), (), setup()), ())
    assert (row.name, row.stored, row.trainable) == ("", ("float32",), True)


@pytest.mark.parametrize(
    ("name", "plainly"),
    [
        ("base_model.model.model.layers.0.q_proj.base_layer", "model.layers.0.q_proj"),
        ("module._orig_mod.fc", "fc"),
        ("model.layers.0", "model.layers.0"),
        ("", ""),
    ],
)
def test_names_of_wrappers_are_left_out(name: str, plainly: str) -> None:
    assert plain_name(name) == plainly


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("model.layers.3.mlp.up", ("model.layers", 3, "mlp.up")),
        ("0.fc", ("", 0, "fc")),
        ("model.layers.3", None),
        ("lm_head", None),
        ("model.layer4.conv1", None),
        ("encoder.block.0.layer.1.wi", ("encoder.block", 0, "layer.1.wi")),
    ],
)
def test_split_layer(name: str, split: tuple[str, int, str] | None) -> None:
    assert split_layer(name) == split


def test_layers_count_as_the_model_they_stand_for() -> None:
    counts = layer_counts(SAMPLES["clean"]().trace)
    assert counts == {("model.layers", 0): 1, ("model.layers", 29): 29}


@given(st.lists(st.lists(st.sampled_from([F16, BF16, F32]), min_size=3, max_size=3), min_size=1, max_size=12))
def test_rows_lose_no_layer_and_no_byte(layers: list[list[object]]) -> None:
    weights = [
        plain(f"m.{number}.{part}", "linear", dtype, (4, 4))  # type: ignore[arg-type]
        for number, dtypes in enumerate(layers)
        for part, dtype in zip("abc", dtypes, strict=True)
    ]
    rows = dtype_map(trace(weights, (), setup()), ())
    for part in "abc":
        some = of_part(rows, part)
        assert [row.first for row in some] == [0, *((row.last or 0) + 1 for row in some[:-1])]
        assert (some[-1].last, sum(row.layers for row in some)) == (len(layers) - 1, len(layers))
    assert sum(row.bytes for row in rows) == sum(w.bytes for w in weights)

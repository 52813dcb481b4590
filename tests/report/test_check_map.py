"""The dtype map: which parts it shows, what it folds, and where it puts a finding."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isotype.core.names import plain_name
from isotype.records.trace import Weight
from isotype.report.check.map import Cell, Stack, dtype_map, layer_counts, split_layer
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


def stack_of(blocks: tuple[Stack | Cell, ...]) -> Stack:
    (found,) = [block for block in blocks if isinstance(block, Stack)]
    return found


@pytest.mark.parametrize("folded", [False, True])
def test_equal_layers_are_one_row_whether_folded_before_or_not(folded: bool) -> None:
    seen = trace(llama_weights(folded=folded), llama_calls(folded=folded), setup())
    stack = stack_of(dtype_map(seen, ()))
    (row,) = stack.rows
    assert (stack.name, stack.layers, row.first, row.last) == ("model.layers", 30, 0, 29)
    assert row.cells["mlp.up_proj"].stored == ("nf4",)
    assert row.cells["mlp.up_proj"].adapters == ("float32",)
    total = 30 * sum(
        w.bytes for w in llama_weights(layers=1) if w.name.startswith("model.layers.0.mlp.up_proj")
    )
    assert row.cells["mlp.up_proj"].bytes == total


def test_parts_come_in_the_order_they_run() -> None:
    blocks = dtype_map(SAMPLES["clean"]().trace, ())
    assert [block.name for block in blocks] == [
        "model.embed_tokens", "model.layers", "model.norm", "model.rotary_emb", "lm_head",
    ]  # fmt: skip
    columns = stack_of(blocks).columns
    assert columns[:2] == ("input_layernorm", "self_attn.q_proj")
    assert columns.index("self_attn") == columns.index("self_attn.o_proj") - 1
    assert set(LINEARS) < set(columns)


def test_layers_that_differ_are_rows_of_their_own() -> None:
    report = SAMPLES["mixed_layers"]()
    rows = stack_of(dtype_map(report.trace, report.findings)).rows
    assert [(row.first, row.last, row.layers) for row in rows] == [
        (0, 2, 3), (3, 3, 1), (4, 16, 13), (17, 17, 1), (18, 29, 12),
    ]  # fmt: skip
    assert rows[1].cells["input_layernorm"].runs == ("float32",)
    assert rows[1].cells["self_attn.q_proj"].findings == (0,)
    assert rows[0].cells["self_attn.q_proj"].findings == ()


def test_layers_after_the_end_of_the_trace_are_told_from_those_before() -> None:
    rows = stack_of(dtype_map(SAMPLES["not_traced"]().trace, ())).rows
    assert [(row.first, row.last) for row in rows] == [(0, 2), (3, 29)]
    assert rows[1].cells["mlp.up_proj"].runs == ()


def test_a_finding_in_an_adapter_marks_its_layer() -> None:
    finding = replace(CRASH, module="model.layers.0.mlp.up_proj.lora_A.default", places=())
    rows = stack_of(dtype_map(SAMPLES["clean"]().trace, (finding,))).rows
    assert rows[0].cells["mlp.up_proj"].findings == (0,)


def test_a_finding_that_fits_no_part_marks_the_row() -> None:
    finding = replace(CRASH, module="model.layers.0", places=())
    rows = stack_of(dtype_map(SAMPLES["clean"]().trace, (finding,))).rows
    assert rows[0].findings == (0,)
    assert all(cell.findings == () for cell in rows[0].cells.values())


def test_experts_are_one_column_with_all_their_dtypes() -> None:
    weights = [
        plain(f"model.layers.{layer}.mlp.experts.{expert}.up", "linear", BF16 if expert else F32, (4, 4))
        for layer in range(2)
        for expert in range(8)
    ]
    stack = stack_of(dtype_map(trace(weights, (), setup()), ()))
    assert stack.columns == ("mlp.experts.*.up",)
    (row,) = stack.rows
    assert row.cells["mlp.experts.*.up"].stored == ("bfloat16", "float32")
    assert row.cells["mlp.experts.*.up"].count == 8


def test_columns_of_layers_of_different_kinds_keep_their_order() -> None:
    parts = (("a", "b", "d"), ("a", "c", "d"))
    weights = [
        plain(f"layers.{layer}.{part}", "linear", F16, (4, 4))
        for layer, some in enumerate(parts)
        for part in some
    ]
    stack = stack_of(dtype_map(trace(weights, (), setup()), ()))
    assert stack.columns == ("a", "c", "b", "d")  # what only a later layer has goes behind its left neighbour
    assert [sorted(row.cells) for row in stack.rows] == [["a", "b", "d"], ["a", "c", "d"]]


def test_trained_copies_belong_to_the_module_they_copy() -> None:
    original = plain("score.original_module", "linear", F16, (2, 4))
    copy = Weight(
        "score.modules_to_save.default.weight", F32, (2, 4), trainable=True, adapter=True,
        module="score.modules_to_save.default", module_class="Linear",
    )  # fmt: skip
    (cell,) = dtype_map(trace((original, copy), (), setup()), ())
    assert isinstance(cell, Cell)
    assert (cell.name, cell.stored, cell.adapters) == ("score", ("float16",), ("float32",))


def test_a_model_that_is_one_module_is_one_part() -> None:
    weight = Weight("weight", F32, (4, 4), trainable=True, module="", module_class="Linear", kind="linear")
    (cell,) = dtype_map(trace((weight,), (), setup()), ())
    assert isinstance(cell, Cell)
    assert (cell.name, cell.stored, cell.trainable) == ("", ("float32",), True)


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
    rows = stack_of(dtype_map(trace(weights, (), setup()), ())).rows
    covered = [number for row in rows for number in range(row.first, row.last + 1)]
    assert covered == list(range(len(layers)))
    assert sum(cell.bytes for row in rows for cell in row.cells.values()) == sum(w.bytes for w in weights)

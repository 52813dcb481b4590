"""`isotype inspect` on every format: groups, totals, quantization and mismatched tensors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from isotype.checkpoint.formats.tensor import TensorHeader
from isotype.checkpoint.inspect import Total, _natural_order, inspect_checkpoint
from isotype.checkpoint.load import load
from isotype.checkpoint.mapping.stored import stored_tensors
from isotype.checkpoint.resolve import resolve_precision
from isotype.cli.main import main
from isotype.core.names import starred
from isotype.report.inspect import inspection_json, mismatch_lines


def group(inspection, name):
    (found,) = [group for group in inspection.groups if group.name == name]
    return found


@pytest.fixture
def mixed_checkpoint(tmp_path) -> Path:
    tensors = {"model.norm.weight": torch.ones(8, dtype=torch.float32)}
    for layer in range(12):
        dtype = torch.float16 if layer in (2, 10) else torch.bfloat16
        tensors[f"model.layers.{layer}.mlp.up_proj.weight"] = torch.zeros(16, 8, dtype=dtype)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "not-a-model", "dtype": "float16"}))
    return tmp_path


def test_groups_totals_and_what_is_mismatched(mixed_checkpoint):
    inspection = inspect_checkpoint(mixed_checkpoint)
    layers = group(inspection, "model.layers.*.mlp.up_proj.weight")
    assert (layers.count, layers.dtype, layers.shapes, layers.bytes) == (12, "bfloat16", ((16, 8),), 12 * 256)
    assert [(total.dtype, total.tensors, total.bytes) for total in inspection.totals] == [
        ("bfloat16", 10, 2560),
        ("float16", 2, 512),
        ("float32", 1, 32),
    ]
    assert inspection.whole == Total("all", 13, 1544, 3104)
    assert mismatch_lines(inspection) == [
        "mismatched: model.layers.2.mlp.up_proj.weight, model.layers.10.mlp.up_proj.weight are float16, the other 10 "
        "bfloat16",
        "mismatched: model.norm.weight is float32 in a bfloat16 checkpoint",
        "note: config.json names float16, but most unquantized weights are bfloat16",
    ]


def test_shards_are_one_checkpoint(saved, tmp_path):
    from tests.models import save_tiny

    whole = inspect_checkpoint(saved("llama", torch.bfloat16))
    sharded = inspect_checkpoint(save_tiny("llama", tmp_path, torch.bfloat16, max_shard_size="40kB"))
    assert (tmp_path / "model.safetensors.index.json").is_file()
    assert (sharded.groups, sharded.totals) == (whole.groups, whole.totals)
    assert mismatch_lines(whole) == []


@pytest.mark.parametrize(("quantization", "double"), [("nf4", True), ("fp4", None), ("int8", None)])
def test_bitsandbytes_constants_belong_to_their_weight(saved, tmp_path, quantization, double):
    policy = resolve_precision(
        saved("llama", torch.bfloat16), "bfloat16", quantization, "cpu", double_quant=double
    )
    load(saved("llama", torch.bfloat16), policy).save_pretrained(tmp_path)
    inspection = inspect_checkpoint(tmp_path)
    layers = group(inspection, "model.layers.*.mlp.up_proj.weight")
    assert (layers.count, layers.dtype, layers.values) == (2, quantization, 2 * 96 * 64)
    assert {total.dtype for total in inspection.totals} == {quantization, "bfloat16"}
    assert inspection.quantization.startswith("bitsandbytes ")
    file = tmp_path / "model.safetensors"
    header = int.from_bytes(file.read_bytes()[:8], "little")
    assert inspection.whole.bytes == file.stat().st_size - 8 - header


def test_mxfp4_blocks_and_scales_are_one_weight():
    tensors = [
        TensorHeader("e.gate_up_proj_blocks", "U8", (4, 8, 2, 16), 1024, Path("f")),
        TensorHeader("e.gate_up_proj_scales", "U8", (4, 8, 2), 64, Path("f")),
        TensorHeader("e.gate_up_proj_bias", "BF16", (4, 8), 64, Path("f")),
    ]
    found = {tensor.name: (tensor.form, tensor.values, tensor.bytes) for tensor in stored_tensors(tensors)}
    assert found == {
        "e.gate_up_proj": ("mxfp4", 2048, 1088),
        "e.gate_up_proj_bias": ("bfloat16", 32, 64),
    }


def test_fp8_scales_belong_to_their_weight():
    tensors = [
        TensorHeader("q.weight", "F8_E4M3", (128, 128), 128 * 128, Path("f")),
        TensorHeader("q.weight_scale_inv", "F32", (1, 1), 4, Path("f")),
    ]
    (found,) = stored_tensors(tensors)
    assert (found.form, found.bytes) == ("float8_e4m3fn", 128 * 128 + 4)


def test_gguf_types(tmp_path):
    gguf = pytest.importorskip("gguf")
    import numpy

    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    rows = numpy.zeros((4, 64), dtype=numpy.float32)
    for layer in range(2):
        quantized = gguf.quants.quantize(rows, gguf.GGMLQuantizationType.Q8_0)
        writer.add_tensor(f"blk.{layer}.attn_q.weight", quantized, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("output_norm.weight", rows[0])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    inspection = inspect_checkpoint(path)
    found = {group.name: (group.count, group.dtype, group.values) for group in inspection.groups}
    assert found == {"blk.*.attn_q.weight": (2, "Q8_0", 512), "output_norm.weight": (1, "float32", 64)}
    assert (inspection.format, inspection.quantization) == ("gguf", "Q8_0")


def test_the_command_prints_a_table_and_json(mixed_checkpoint, capsys):
    assert main(["inspect", str(mixed_checkpoint)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["tensors", "count", "dtype", "shape", "bytes", "share"]
    assert lines[2].split()[:4] == ["model.layers.*.mlp.up_proj.weight", "12", "bfloat16", "!"]
    assert main(["inspect", str(mixed_checkpoint), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(
        json.dumps(inspection_json(inspect_checkpoint(mixed_checkpoint)))
    )


def test_a_model_type_that_is_no_name_is_a_model_that_transformers_does_not_know(mixed_checkpoint, capsys):
    (mixed_checkpoint / "config.json").write_text('{"model_type": ["llama"]}')
    assert main(["inspect", str(mixed_checkpoint)]) == 0
    assert "error" not in capsys.readouterr().out


def test_no_checkpoint_is_an_error(tmp_path, capsys):
    assert main(["inspect", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("error: not a checkpoint\n")
    (tmp_path / "model.safetensors").write_bytes(b"short")
    assert main(["inspect", str(tmp_path)]) == 2
    assert "cannot read" in capsys.readouterr().err


@given(st.lists(st.integers(0, 200), min_size=1, max_size=8, unique=True))
def test_layers_sort_by_number_and_fold_to_one_name(numbers):
    names = [f"model.layers.{number}.w1.weight" for number in numbers]
    assert sorted(names, key=_natural_order) == [
        f"model.layers.{number}.w1.weight" for number in sorted(numbers)
    ]
    assert {starred(name) for name in names} == {"model.layers.*.w1.weight"}

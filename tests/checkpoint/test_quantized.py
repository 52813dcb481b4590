"""Quantized checkpoints: each value equals the library's code x scale, here in float64, or the load is refused by name.

`benchmarks/quantized_readers.py` compares with compressed-tensors, modelopt and transformers themselves.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

import isotype
from isotype.checkpoint.checkpoint import open_checkpoint
from isotype.checkpoint.formats.headers import read_headers
from isotype.checkpoint.formats.mapped import MappedFiles
from isotype.checkpoint.load import load_module
from isotype.checkpoint.mapping.stored import StoredTensor, stored_tensors
from isotype.checkpoint.stored_weights import StoredWeights, blank_model
from isotype.checkpoint.values import dense
from isotype.cli.main import main
from isotype.core.errors import CheckpointError
from isotype.model.quantize import quantize_int8
from tests.models import save_tiny
from tests.pairwise import few, pairwise
from tests.refusals import commands_on, refused

SHAPES = ((64, 96), (33, 37), (130, 320), (7, 32), (1, 64))
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
FP8 = torch.float8_e4m3fn


def words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Return signed codes as int32 words, from one long number per row: code i begins at bit i x bits, offset by half its range."""
    rows = []
    for row in codes.tolist():
        number = sum((code + (1 << (bits - 1))) << (at * bits) for at, code in enumerate(row))
        count = -(-len(row) * bits // 32)
        rows.append([(number >> (32 * at)) & 0xFFFFFFFF for at in range(count)])
    held = torch.tensor(rows, dtype=torch.int64)
    return torch.where(held >= 1 << 31, held - (1 << 32), held).to(torch.int32)


def spread(scales: torch.Tensor, shape: tuple[int, int], block: tuple[int, int]) -> torch.Tensor:
    """Return a scale for each value, in float64."""
    rows, columns = (torch.arange(size) // side for size, side in zip(shape, block, strict=True))
    return scales.double()[rows][:, columns]


def group(**weights: Any) -> dict[str, Any]:
    """Return a compressed-tensors config with one group for all linear layers."""
    form = weights.pop("format", "pack-quantized")
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups}


def stored(directory: Path, tensors: Mapping[str, torch.Tensor], config: Any) -> StoredTensor:
    named = {f"model.layers.0.mlp.up_proj.{name}": value.contiguous() for name, value in tensors.items()}
    save_file(named, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({"quantization_config": config}))
    headers = read_headers(directory)
    (weight, *_) = stored_tensors(headers.tensors, headers.quantization)
    return weight


def read(directory: Path, tensors: Mapping[str, torch.Tensor], config: Any) -> torch.Tensor:
    weight = stored(directory, tensors, config)
    assert weight.problem is None, weight.problem
    return dense(weight, MappedFiles().tensor, torch.float32)


def agrees(values: torch.Tensor, wanted: torch.Tensor) -> None:
    """Return products of float32 numbers, with one rounding for each factor."""
    assert values.shape == wanted.shape
    assert ((values.double() - wanted).abs() <= 2.0**-22 * wanted.abs()).all()


@pairwise("shape, bits, strategy", SHAPES, range(1, 9), ["tensor", "channel", "group"])
def test_packed_integers(tmp_path: Path, shape: tuple[int, int], bits: int, strategy: str) -> None:
    rows, columns = shape
    half, size = 1 << (bits - 1), 32 if strategy == "group" else None
    block = {"tensor": shape, "channel": (1, columns), "group": (1, 32)}[strategy]
    codes = torch.randint(-half, half, shape)
    scales = torch.rand(-(-rows // block[0]), -(-columns // block[1])) + 0.1
    zeros = torch.randint(-half, half, scales.shape)
    tensors = {
        "weight_packed": words(codes, bits),
        "weight_scale": scales,
        "weight_shape": torch.tensor(shape),
    }
    config = group(num_bits=bits, type="int", strategy=strategy, group_size=size)
    agrees(read(tmp_path, tensors, config), codes * spread(scales, shape, block))
    # Zero points are packed along the rows; the zero point of a whole tensor is not packed.
    held = zeros.to(torch.int8) if strategy == "tensor" else words(zeros.T, bits).T
    config = group(num_bits=bits, type="int", strategy=strategy, group_size=size, symmetric=False)
    wanted = (codes - spread(zeros, shape, block)) * spread(scales, shape, block)
    agrees(read(tmp_path, tensors | {"weight_zero_point": held}, config), wanted)


@pairwise("shape, numeric, strategy", SHAPES, ["int", "float"], ["tensor", "channel", "group", "block"])
def test_codes_of_eight_bits(tmp_path: Path, shape: tuple[int, int], numeric: str, strategy: str) -> None:
    block = {"tensor": shape, "channel": (1, shape[1]), "group": (1, 16), "block": (24, 40)}[strategy]
    more = {"group": {"group_size": 16}, "block": {"block_structure": [24, 40]}}.get(strategy, {})
    codes = torch.randint(-127, 128, shape).to(torch.int8 if numeric == "int" else FP8)
    scales = torch.rand(*(-(-size // side) for size, side in zip(shape, block, strict=True)))
    form = f"{numeric}-quantized"
    config = group(format=form, num_bits=8, type=numeric, strategy=strategy, **more)
    tensors = {"weight": codes, "weight_scale": scales, "input_scale": torch.ones(1)}
    agrees(read(tmp_path, tensors, config), codes.double() * spread(scales, shape, block))
    if numeric == "int":
        zeros = torch.randint(-127, 128, scales.shape).to(torch.int8)
        config["config_groups"]["group_0"]["weights"]["symmetric"] = False
        wanted = (codes.double() - spread(zeros, shape, block)) * spread(scales, shape, block)
        agrees(read(tmp_path, tensors | {"weight_zero_point": zeros}, config), wanted)
        assert "no zero points, although config.json declares them" in str(
            stored(tmp_path, tensors, config).problem
        )


@pytest.mark.parametrize("shape", [(64, 96), (33, 64), (1, 32)])
def test_pairs_of_four_bit_numbers(tmp_path: Path, shape: tuple[int, int]) -> None:
    rows, columns = shape
    codes = torch.randint(0, 16, shape)
    packed = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)
    values = torch.tensor(E2M1, dtype=torch.float64)[codes]
    exponents = torch.randint(100, 130, (rows, columns // 32), dtype=torch.uint8)
    factors = spread(torch.exp2(exponents.double() - 127), shape, (1, 32))
    config = group(format="mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32)
    agrees(read(tmp_path, {"weight_packed": packed, "weight_scale": exponents}, config), values * factors)
    experts = {"quant_method": "fp8", "expert_dtype": "fp4"}
    agrees(read(tmp_path, {"weight": packed.view(torch.int8), "scale": exponents}, experts), values * factors)
    scales = (torch.rand(rows, columns // 16) * 400 + 1).to(FP8)
    factors = spread(scales, shape, (1, 16))
    config = group(
        format="nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16
    )
    tensors = {"weight_packed": packed, "weight_scale": scales, "weight_global_scale": torch.tensor([700.0])}
    # compressed-tensors divides by its global scale, modelopt multiplies by its second scale.
    agrees(read(tmp_path, tensors, config), values * factors / 700)
    config = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}
    tensors = {"weight": packed, "weight_scale": scales, "weight_scale_2": torch.tensor(0.25)}
    agrees(read(tmp_path, tensors, config), values * factors * 0.25)


@pairwise(
    "name, shape",
    ["weight_scale_inv", "weight_scale", "scale", "qscale_weight"],
    [(200, 300), (128, 256), (33, 37)],
    strength=1,
)
def test_fp8_by_every_name_that_transformers_reads(tmp_path: Path, name: str, shape: tuple[int, int]) -> None:
    codes = torch.randint(-127, 128, shape).to(FP8)
    for said, block in (
        ({}, (128, 128)),
        ({"weight_block_size": [48, 80]}, (48, 80)),
        ({"weight_block_size": None}, shape),
    ):
        scales = torch.rand(*(-(-size // side) for size, side in zip(shape, block, strict=True)))
        wanted = codes.double() * spread(scales, shape, block)
        agrees(read(tmp_path, {"weight": codes, name: scales}, {"quant_method": "fp8", **said}), wanted)
        exponents = torch.randint(110, 130, scales.shape, dtype=torch.uint8)
        wanted = codes.double() * spread(torch.exp2(exponents.double() - 127), shape, block)
        agrees(read(tmp_path, {"weight": codes, name: exponents}, {"quant_method": "fp8", **said}), wanted)


def awq(outputs: int, inputs: int, size: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return random tensors packed like AutoAWQ's version gemm, and their values: (code - zero point) x scale."""

    def packed(codes: torch.Tensor) -> torch.Tensor:
        order = [0, 2, 4, 6, 1, 3, 5, 7]  # columns in a word, from the lowest bits
        return words(codes.unflatten(1, (-1, 8))[..., order].flatten(1) - 8, 4)

    codes, zeros = torch.randint(0, 16, (inputs, outputs)), torch.randint(0, 16, (inputs // size, outputs))
    scales = (torch.rand(zeros.shape) + 0.1).half()
    wanted = torch.empty(outputs, inputs, dtype=torch.float64)
    for column in range(inputs):
        group = column // size
        wanted[:, column] = (codes[column] - zeros[group]) * scales[group].double()
    return {"qweight": packed(codes), "qzeros": packed(zeros), "scales": scales}, wanted


@pairwise(
    ["outputs, inputs", "size"], [(64, 256), (8, 128), (136, 384), (16, 5632)], [32, 64, 128, -1], strength=1
)
def test_awq(tmp_path: Path, outputs: int, inputs: int, size: int) -> None:
    tensors, wanted = awq(outputs, inputs, inputs if size < 0 else size)
    config = {"quant_method": "awq", "bits": 4, "group_size": size, "version": "GEMM", "zero_point": True}
    values = read(tmp_path, tensors, config)
    # 5 bits x 11 bits: exact in float32.
    assert torch.equal(values.double(), wanted)
    assert values.is_contiguous()
    older = {"quant_method": "awq", "w_bit": 4, "q_group_size": size}
    assert torch.equal(read(tmp_path, tensors, older).double(), wanted)


def test_a_word_of_awq(tmp_path: Path) -> None:
    """Column 1 is fifth from the lowest bits, column 7 is in the highest."""
    tensors = {
        "qweight": torch.tensor([[0x75316420], [-1]], dtype=torch.int32),
        "qzeros": torch.zeros(1, 1, dtype=torch.int32),
        "scales": torch.ones(1, 8).half(),
    }
    values = read(tmp_path, tensors, {"quant_method": "awq", "group_size": -1})
    assert values.tolist() == [[float(column), 15.0] for column in range(8)]


def test_what_a_library_writes_beside_config_json(tmp_path: Path) -> None:
    """modelopt writes a separate file, which transformers does not read."""
    codes = torch.randint(-127, 128, (8, 16)).to(FP8)
    tensors = {"weight": codes, "weight_scale": torch.tensor(0.5), "input_scale": torch.tensor(2.0)}
    written = {
        "producer": {"name": "modelopt"},
        "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": None},
    }
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(written))
    agrees(read(tmp_path, tensors, None), codes.double() * 0.5)
    written["quantization"] = {"quant_algo": "W4A8_AWQ"}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(written))
    assert "quantized by modelopt as W4A8_AWQ" in str(stored(tmp_path, tensors, None).problem)


# Whole checkpoints

NAMES = ("self_attn.q_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.down_proj")
Change = Callable[[dict[str, torch.Tensor]], None]


def checkpoint(
    directory: Path, change: Change, config: Mapping[str, Any] | None = None, model: str = "llama"
) -> Path:
    save_tiny(model, directory, torch.bfloat16)
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(
        {name: value.contiguous() for name, value in tensors.items()},
        directory / "model.safetensors",
        metadata={"format": "pt"},
    )
    content = json.loads((directory / "config.json").read_text()) | (
        {"quantization_config": config} if config else {}
    )
    (directory / "config.json").write_text(json.dumps(content))
    return directory


MIXED: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "mixed-precision",
    "ignore": ["lm_head", "re:.*o_proj", "re:.*k_proj", "re:.*up_proj"],
    "config_groups": {
        "group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "group_size": 32, "strategy": "group"}, "format": "pack-quantized"},
        "group_1": {"targets": ["re:.*v_proj"], "weights": {"num_bits": 3, "type": "int", "strategy": "channel", "symmetric": False}, "format": "pack-quantized"},
        "group_2": {"targets": ["re:.*gate_proj"], "weights": {"num_bits": 8, "type": "float", "strategy": "tensor"}, "format": "float-quantized"},
        "group_3": {"targets": ["re:.*layers.1.*down_proj"], "weights": {"num_bits": 8, "type": "int", "strategy": "channel"}, "format": "int-quantized"},
    },
}  # fmt: skip


def mixed(wanted: dict[str, torch.Tensor]) -> Change:
    """Quantize a model in four groups with different numbers of bits, group sizes and symmetry."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for layer, name in itertools.product(range(2), NAMES):
            key = f"model.layers.{layer}.{name}.weight"
            rows, columns = shape = tuple(tensors[key].shape)
            if name == "mlp.gate_proj":
                tensors[key] = torch.randint(-127, 128, shape).to(FP8)
                tensors[f"{key}_scale"], tensors[f"{key[:-6]}input_scale"] = (
                    torch.tensor([0.01]),
                    torch.ones(1),
                )
                wanted[key] = tensors[key].double() * torch.tensor([0.01]).double()
                continue
            if (layer, name) == (1, "mlp.down_proj"):
                tensors[key] = torch.randint(-127, 128, shape).to(torch.int8)
                tensors[f"{key}_scale"] = torch.rand(rows, 1)
                wanted[key] = tensors[key].double() * tensors[f"{key}_scale"].double()
                continue
            bits, side = (3, columns) if name == "self_attn.v_proj" else (4, 32)
            codes = torch.randint(-(1 << (bits - 1)), 1 << (bits - 1), shape)
            scales = torch.rand(rows, columns // side)
            del tensors[key]
            tensors |= {
                f"{key}_packed": words(codes, bits),
                f"{key}_scale": scales,
                f"{key}_shape": torch.tensor(shape),
            }
            zeros = torch.zeros(scales.shape, dtype=torch.int64)
            if bits == 3:
                zeros = torch.randint(-4, 4, scales.shape)
                tensors[f"{key}_zero_point"] = words(zeros.T, bits).T
            wanted[key] = (codes - spread(zeros, shape, (1, side))) * spread(scales, shape, (1, side))

    return change


def test_each_layer_is_read_by_its_own_group(tmp_path: Path) -> None:
    wanted: dict[str, torch.Tensor] = {}
    path = checkpoint(tmp_path, mixed(wanted), MIXED)
    model = isotype.load(path, isotype.resolve_precision(path, "float32", device="cpu"))
    assert len(wanted) == 8
    for name, value in wanted.items():
        agrees(model.get_parameter(name).detach(), value)
    assert main(["inspect", str(path)]) == 0


def test_its_int8_layers_are_not_those_of_bitsandbytes(tmp_path: Path) -> None:
    wanted: dict[str, torch.Tensor] = {}
    path = checkpoint(tmp_path, mixed(wanted), MIXED)
    model = isotype.load(path, isotype.resolve_precision(path, "float32", "int8", device="cpu"))
    layer: Any = model.get_submodule("model.layers.1.mlp.down_proj")
    codes, scales = quantize_int8(wanted["model.layers.1.mlp.down_proj.weight"].float())
    assert torch.equal(layer.weight, codes)
    assert torch.equal(layer.state.SCB, scales)


def in_awq(size: int, wanted: dict[str, torch.Tensor], leave: tuple[str, ...] = ()) -> Change:
    """Pack all linear layers of the language model like AutoAWQ, without the tensors `leave`."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("proj.weight")]:
            parts, wanted[name] = awq(*tensors.pop(name).shape, size)
            stem = name.removesuffix("weight")
            tensors |= {f"{stem}{leaf}": value for leaf, value in parts.items() if leaf not in leave}

    return change


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_an_awq_base_is_loaded_in_the_dtype_of_the_policy(tmp_path: Path, dtype: str) -> None:
    wanted: dict[str, torch.Tensor] = {}
    path = checkpoint(tmp_path, in_awq(32, wanted), AWQ)
    policy = isotype.resolve_precision(path, dtype, device="a100")
    assert policy.reasons["storage"].startswith("awq-4bit weights are dequantized once at load")
    model = isotype.load(path, policy)
    assert len(wanted) == 14
    for name, value in wanted.items():
        assert torch.equal(model.get_parameter(name), value.to(policy.plain))
    assert not hasattr(model.config, "quantization_config")


def test_an_awq_base_is_quantized_again(tmp_path: Path) -> None:
    wanted: dict[str, torch.Tensor] = {}
    path = checkpoint(tmp_path, in_awq(32, wanted), AWQ)
    model = isotype.load(path, isotype.resolve_precision(path, "float32", "int8", device="cpu"))
    for name, value in wanted.items():
        layer: Any = model.get_submodule(name.removesuffix(".weight"))
        codes, scales = quantize_int8(value.float())
        assert torch.equal(layer.weight, codes)
        assert torch.equal(layer.state.SCB, scales)
    assert main(["inspect", str(path), "--plan", "--quantization", "nf4", "--device", "cpu"]) == 0
    assert main(["check", str(path), "--quantization", "nf4", "--device", "cpu"]) == 0


def refused_with_and_without_weights(path: Path, text: str, capsys: Any) -> None:
    for _ in range(2):
        assert main(["check", str(path), "--quantization", "nf4", "--device", "cpu"]) == 2
        assert f": {text}\n" in capsys.readouterr().err
        (path / "model.safetensors").unlink(missing_ok=True)


@pytest.mark.parametrize("said", [{"bits": 3}, {"version": "GEMV"}, {"backend": "llm-awq"}])
def test_awq_that_is_not_read_is_refused_without_weights(
    tmp_path: Path, said: Mapping[str, Any], capsys: Any
) -> None:
    path = checkpoint(tmp_path, in_awq(32, {}), AWQ | said)
    version = said.get("version", said.get("backend", "gemm")).lower()
    text = f"quantized by awq of {said.get('bits', 4)} bits in version {version}: isotype reads 4 bits in version gemm"
    refused_with_and_without_weights(path, text, capsys)


def test_experts_in_awq_are_stacked(tmp_path: Path) -> None:
    wanted: dict[str, torch.Tensor] = {}
    path = checkpoint(tmp_path, in_awq(32, wanted), AWQ, "qwen3-moe")
    model = isotype.load(path, isotype.resolve_precision(path, "float32", device="cpu"))
    down = model.get_parameter("model.layers.0.mlp.experts.down_proj")
    for at, held in enumerate(down):
        assert torch.equal(held, wanted[f"model.layers.0.mlp.experts.{at}.down_proj.weight"].float())


def test_rows_of_an_awq_weight_are_columns_of_its_file(tmp_path: Path) -> None:
    """This also holds if all tensors have as many rows as the weight: a square weight in groups of one."""
    wanted: dict[str, torch.Tensor] = {}
    path = checkpoint(tmp_path, in_awq(1, wanted), AWQ | {"group_size": 1})
    model = blank_model(AutoConfig.from_pretrained(path))
    weights = StoredWeights(model, read_headers(path))
    name = "model.layers.0.self_attn.q_proj.weight"
    assert wanted[name].shape == (64, 64)
    assert torch.equal(weights.read_rows(name, 8, 24).double(), wanted[name][8:24])


def fp8(*scales: tuple[str, Any], dtype: torch.dtype = FP8) -> Change:
    """Store all linear layers in one byte per weight, with these tensors beside them."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("proj.weight")]:
            tensors[name] = tensors[name].to(dtype)
            tensors |= {f"{name.removesuffix('weight')}{leaf}": value.clone() for leaf, value in scales}

    return change


ONE, ROWS = torch.ones(1), torch.ones(3, 1)
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
COMPRESSED = group(format="float-quantized", num_bits=8, type="float", strategy="tensor")
REFUSED: dict[str, tuple[Change, dict[str, Any] | None, str]] = {
    "no scale": (fp8(), BLOCKS, "float8_e4m3fn codes without a scale"),
    "no scale, no config": (fp8(), None, "float8_e4m3fn codes without a scale"),
    **{
        name: (fp8((name, ONE)), BLOCKS, f"float8_e4m3fn codes without a scale; its module also has {name} [1]")
        for name in ("scales", "weight_scales", "scale_inv", "scale_weight", "descale", "weight_amax")
    },
    "a plain name without a config": (fp8(("scale", ONE)), None, "codes without a scale; its module also has scale [1]"),
    "two scales": (fp8(("weight_scale", ONE), ("weight_scale_inv", ONE)), BLOCKS, "weight_scale, weight_scale_inv: one scale is expected"),
    "another shape": (fp8(("weight_scale", ROWS)), BLOCKS, "weight_scale of shape [3, 1] for a weight of shape [64, 96]; by config.json, the weight has one scale per block 128x128 or row or tensor"),
    "blocks of no config": (fp8(("weight_scale_inv", torch.ones(4, 4))), None, "weight_scale_inv of shape [4, 4] for a weight of shape [64, 96]; by config.json, the weight has one scale per row or tensor"),
    "a scale of int8": (fp8(("weight_scale", torch.ones(1, dtype=torch.int8))), BLOCKS, "weight_scale of I8, which is not a dtype of scales for floats"),
    "zero points of FP8": (fp8(("weight_scale", ONE), ("weight_zero_point", ONE)), COMPRESSED, "weight_zero_point of shape [1] F32 for scales [1]"),
    "an order of columns": (fp8(("weight_scale", ONE), ("weight_g_idx", ONE)), COMPRESSED, "weight_g_idx, which is not used to read floats"),
    "a global scale": (fp8(("weight_scale", ONE), ("weight_global_scale", ONE)), COMPRESSED, "weight_global_scale, which is not used to read floats"),
    "an input scale alone": (fp8(("input_scale", ONE), dtype=torch.bfloat16), BLOCKS, "stored in BF16, where config.json has floats of 8 bits"),
    "a scale of a dense weight": (fp8(("weight_scale", ONE), dtype=torch.bfloat16), COMPRESSED, "stored in BF16, where config.json has floats of 8 bits"),
    "int8 without a scale": (fp8(dtype=torch.int8), None, "int8 codes without a scale"),
    "int8 without a config": (fp8(("weight_scale", ONE), dtype=torch.int8), None, "stored in I8, where config.json has floats of 8 bits"),
    "no group": (fp8(("weight_scale", ONE)), COMPRESSED | {"ignore": ["re:.*"]}, "no group covers this weight in the config_groups Linear"),
    "no regular expression": (fp8(("weight_scale", ONE)), COMPRESSED | {"ignore": ["re:("]}, "target re:( is not a regular expression"),
    "order of activations": (fp8(("weight_scale", ONE)), group(num_bits=8, type="float", actorder="group", format="float-quantized"), "columns in the order of activations (actorder: group)"),
    "another type": (fp8(("weight_scale", ONE)), group(num_bits=8, type="int", format="int-quantized"), "stored in F8_E4M3, where config.json has integers of 8 bits"),
    "another format": (fp8(("weight_scale", ONE)), COMPRESSED | {"format": "pack-quantized"}, "stored in F8_E4M3, where config.json has nothing of 8 bits"),
    **{
        form: (fp8(("weight_scale", ONE)), COMPRESSED | {"format": form}, f"stored in compressed-tensors' format {form}")
        for form in ("marlin-24", "sparse-24-bitmask", "sparse-bitmask", "mxfp6-pack-quantized", "dense")
    },
    "sparse": (fp8(("weight_scale", ONE)), COMPRESSED | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config with format sparse-24-bitmask"),
    "turned": (fp8(("weight_scale", ONE)), COMPRESSED | {"transform_config": {"config_groups": {"R1": {}}}}, "transform_config with config_groups {'R1': {}}"),
    "bits that are none": (fp8(("weight_scale", ONE)), group(num_bits="8", format="float-quantized"), "num_bits '8' in config.json"),
    "groups that are none": (fp8(("weight_scale", ONE)), COMPRESSED | {"config_groups": {"W8A8": ["Linear"]}}, "config_groups.W8A8 without targets"),
    "no groups": (fp8(("weight_scale", ONE)), {"quant_method": "compressed-tensors"}, "config_groups None in config.json"),
    "bitsandbytes without a config": (fp8(("SCB", ONE), dtype=torch.int8), None, "int8 with SCB, while config.json does not name bitsandbytes"),
    "bitsandbytes of another kind": (fp8(("weight.absmax", ONE), ("weight.quant_map", ONE), ("weight.quant_state.bitsandbytes__nf4", ONE), dtype=torch.uint8), {"quant_method": "bitsandbytes", "load_in_4bit": True}, "where config.json has fp4"),
    "bitsandbytes, not complete": (fp8(("weight.absmax", ONE), ("weight.quant_state.bitsandbytes__nf4", ONE), dtype=torch.uint8), {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "nf4 without quant_map"),
    "awq of 3 bits": (in_awq(32, {}), AWQ | {"bits": 3}, "quantized by awq of 3 bits in version gemm: isotype reads 4 bits in version gemm"),
    **{
        f"awq, {version}": (in_awq(32, {}), AWQ | {"version": version}, f"quantized by awq of 4 bits in version {version}: isotype reads 4 bits")
        for version in ("gemv", "gemv_fast", "marlin")
    },
    "awq of llm-awq": (in_awq(32, {}), AWQ | {"backend": "llm-awq"}, "quantized by awq of 4 bits in version llm-awq"),
    "awq without zero points": (in_awq(32, {}, ("qzeros",)), AWQ, "I32 with scales: a matrix of I32 with scales and qzeros is expected"),
    "awq in other groups": (in_awq(32, {}), AWQ | {"group_size": 16}, "scales of shape [2, 64] F16 for int32 words of shape [64, 8]; [4, 64]"),
    "awq in bits that are none": (in_awq(32, {}), AWQ | {"bits": "4"}, "awq of '4' bits in version gemm"),
    "awq with other tensors": (fp8(("weight_scale", ONE)), AWQ, "F8_E4M3 with weight_scale: a matrix of I32 with scales and qzeros is expected"),
    "awq of activations": (lambda tensors: (in_awq(32, {})(tensors), tensors.update({"model.layers.0.mlp.act_fn.scales": ONE}))[1], AWQ, "act_fn.scales of shape [1] in model.safetensors, which LlamaForCausalLM does not use"),
    "a scale before quantization": (fp8(("weight_scale", ONE), ("pre_quant_scale", ONE)), {"quant_method": "modelopt", "quant_algo": "FP8"}, "pre_quant_scale (2 tensors) of shape [1]"),
}  # fmt: skip


# Names beside others of their kind, which are looked up in the same table.
_NAMED_ALIKE = ("weight_scales", "scale_inv", "scale_weight", "descale", "awq, gemv", "awq, gemv_fast")


@few("case", list(REFUSED), *(case for case in REFUSED if case not in _NAMED_ALIKE))
def test_what_is_not_read_is_refused_before_it_is_loaded(tmp_path: Path, case: str, capsys: Any) -> None:
    change, config, text = REFUSED[case]
    path = checkpoint(tmp_path, change, config)
    assert text in refused(CheckpointError, open_checkpoint, path)
    assert main(["inspect", str(path)]) == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quantized by modelopt as W4A8_AWQ"),
        (COMPRESSED | {"format": "marlin-24"}, "stored in compressed-tensors' format marlin-24"),
        (BLOCKS | {"weight_block_size": 128}, "blocks of 128 in config.json"),
    ],
)
def test_a_config_alone_is_refused_as_its_weights_are(
    tmp_path: Path, config: dict[str, Any], text: str, capsys: Any
) -> None:
    path = checkpoint(tmp_path, fp8(("weight_scale", ONE)), config)
    refused_with_and_without_weights(path, text, capsys)


def test_a_config_alone_is_read_where_one_group_is(tmp_path: Path) -> None:
    """Only the headers show which layers belong to a group."""
    path = checkpoint(tmp_path, lambda tensors: None, MIXED)
    (path / "model.safetensors").unlink()
    groups = MIXED["config_groups"] | {"other": {"targets": ["none"], "format": "marlin-24"}}
    (path / "config.json").write_text(
        (path / "config.json").read_text().replace(json.dumps(MIXED["config_groups"]), json.dumps(groups))
    )
    assert '"marlin-24"' in (path / "config.json").read_text()
    assert main(["check", str(path), "--device", "cpu"]) == 0


def test_weights_that_are_plain_are_read_whatever_the_config_says(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, lambda tensors: None, {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"})
    assert main(["inspect", str(path), "--plan", "--device", "cpu"]) == 0


@pytest.mark.parametrize(
    "method", ["gptq", "quanto", "hqq", "torchao", "fbgemm_fp8", "aqlm", "eetq", "vptq", "spqr"]
)
def test_other_libraries_formats_are_refused_by_name(tmp_path: Path, method: str, capsys: Any) -> None:
    path = checkpoint(tmp_path, fp8(("weight_scale", ONE)), {"quant_method": method, "bits": 4})
    assert main(["inspect", str(path)]) == main(["check", str(path), "--device", "cpu"]) == 2
    assert capsys.readouterr().err.count(f"is quantized with {method}-4bit") == 2
    for quantization in (None, "nf4"):
        with pytest.raises(isotype.PrecisionError, match=f"is quantized with {method}-4bit"):
            isotype.resolve_precision(path, quantization=quantization, device="cpu")


@pytest.mark.parametrize("config", ["fp8", ["fp8"], 8])
def test_a_quantization_config_that_is_no_object(tmp_path: Path, config: Any) -> None:
    path = checkpoint(tmp_path, lambda tensors: None, config)
    text = f"quantization_config is {config!r}\n    expected  an object that has a quant_method"
    assert text in refused(CheckpointError, open_checkpoint, path)
    assert main(["inspect", str(path)]) == main(["check", str(path)]) == 2


def test_every_command_refuses_it(tmp_path: Path, capsys: Any) -> None:
    path = checkpoint(tmp_path / "model", fp8(("scale_weight", ONE)), BLOCKS)
    for command in commands_on(path, tmp_path):
        assert main(command) == 2
        assert (
            "float8_e4m3fn codes without a scale; its module also has scale_weight [1]"
            in capsys.readouterr().err
        )
    assert not (tmp_path / "out").exists()


def test_a_model_that_was_cast_as_a_whole_is_its_codes(tmp_path: Path) -> None:
    """As in transformers, float8 weights are the values if config.json names float8 as dtype."""
    path = checkpoint(
        tmp_path, lambda tensors: tensors.update({name: value.to(FP8) for name, value in tensors.items()})
    )
    config = json.loads((path / "config.json").read_text()) | {"dtype": "float8_e4m3fn"}
    (path / "config.json").write_text(json.dumps(config))
    model = isotype.load(path, isotype.resolve_precision(path, "float32", device="cpu"))
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(model.get_parameter(name), load_file(path / "model.safetensors")[name].float())


def test_transformers_own_way_of_loading_does_not_take_codes_for_numbers(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, fp8(("weight_scale", ONE)), BLOCKS)
    policy = isotype.resolve_precision(path, "float32", device="cpu")
    with pytest.raises(
        isotype.PrecisionError, match="a quantized checkpoint cannot be loaded with these arguments"
    ):
        isotype.load(path, policy, ignore_mismatched_sizes=True)


def test_any_module_takes_them_by_its_own_names_or_through_an_adapter(tmp_path: Path) -> None:
    codes = torch.randint(-127, 128, (16, 32)).to(FP8)
    save_file({"0.weight": codes, "0.weight_scale": torch.rand(16, 1)}, tmp_path / "model.safetensors")
    scales = load_file(tmp_path / "model.safetensors")["0.weight_scale"]

    class Turned:
        def from_hf(self, state: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
            return {"0.weight": state["0.weight"].T}

        def to_hf(self, state: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
            return {"0.weight": state["0.weight"].T}

    policy = isotype.PrecisionPolicy(torch.float32, "float32")
    for adapter, sizes in ((None, (32, 16)), (Turned(), (16, 32))):
        module = torch.nn.Sequential(torch.nn.Linear(*sizes, bias=False))
        load_module(module, tmp_path, policy, adapter=adapter)
        weight = module[0].weight.detach()
        agrees(weight.T if adapter else weight, codes.double() * scales.double())

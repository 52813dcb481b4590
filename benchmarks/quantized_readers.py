"""Values of quantized weights against the libraries that write them: compressed-tensors, modelopt, AutoAWQ and transformers.

Run: python benchmarks/quantized_readers.py. Each library compresses random weights of even and odd shapes in each of its
schemes, and decompresses them again; isotype reads the same tensors from a file with the config that belongs to them. Prints
for each scheme how many weights agree, how many are refused, and the largest difference in units of the weight's largest value.
A library that is not installed is left out: pip install --no-deps compressed-tensors loguru nvidia-modelopt autoawq.
"""

from __future__ import annotations

import itertools
import json
import random
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from isotype.checkpoint.formats.headers import read_headers
from isotype.checkpoint.formats.mapped import MappedFiles
from isotype.checkpoint.mapping.stored import stored_tensors
from isotype.checkpoint.values import dense

SHAPES = ((64, 96), (65, 192), (130, 320), (7, 32), (1, 64), (200, 35), (33, 37))
Case = tuple[str, Mapping[str, torch.Tensor], Mapping[str, Any], torch.Tensor, float]
"""Scheme, the tensors of a layer, quantization_config, what the library reads, and the tolerance of its own arithmetic."""


def ours(tensors: Mapping[str, torch.Tensor], quantization: Mapping[str, Any]) -> torch.Tensor | str:
    """The weight as isotype reads it, in float32; or why it does not."""
    with tempfile.TemporaryDirectory() as folder:
        named = {f"model.layers.0.mlp.up_proj.{name}": value.contiguous() for name, value in tensors.items()}
        save_file(named, f"{folder}/model.safetensors")
        Path(folder, "config.json").write_text(json.dumps({"quantization_config": quantization}))
        headers = read_headers(folder)
        stored = stored_tensors(headers.tensors, headers.quantization)
        (weight,) = [each for each in stored if each.name.endswith(".weight")]
        if weight.problem is not None or len(stored) > 1:
            return weight.problem.given if weight.problem else f"{len(stored)} tensors"
        return dense(weight, MappedFiles().tensor, torch.float32).clone()


def compressed_tensors() -> Iterator[Case]:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    def case(
        form: str, settings: dict[str, Any], shape: tuple[int, int], scale: torch.Tensor, **more: Any
    ) -> Case:
        args = {"dynamic": False, **settings}
        scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**args))
        library = BaseCompressor.get_value_from_registry(form)
        state = library.compress({"weight": torch.randn(shape), "weight_scale": scale, **more}, scheme)
        wanted = library.decompress(state, scheme)["weight"].float()
        config = {
            "quant_method": "compressed-tensors",
            "format": form,
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": args}},
        }
        name = f"{form} {settings['num_bits']} bits {settings['strategy']} {'' if settings.get('symmetric', True) else 'a'}symmetric"
        return name, state, config, wanted, 2**-8 if "fp4" in form else 0.0

    for shape, strategy, symmetric in itertools.product(
        SHAPES, ("tensor", "channel", "group", "block"), (True, False)
    ):
        rows, columns = shape
        size = {
            "tensor": (1, 1),
            "channel": (rows, 1),
            "group": (rows, columns // 32),
            "block": (-(-rows // 24), -(-columns // 40)),
        }
        sizes: dict[str, dict[str, Any]] = {
            "group": {"group_size": 32},
            "block": {"block_structure": [24, 40]},
        }
        more = sizes.get(strategy, {})
        if strategy == "group" and columns % 32:
            continue  # the library refuses it
        for form, bits in [
            *(("pack-quantized", bits) for bits in range(2, 9) if strategy != "block"),
            *((form, 8) for form in ("int-quantized", "naive-quantized")),
            *(("naive-quantized", bits) for bits in (4, 6)),
            ("float-quantized", 8),
        ]:
            if (
                strategy == "block"
                and (rows % 24 or columns % 40)
                and form != "naive-quantized"
                and form != "float-quantized"
            ):
                continue
            numeric = "float" if form == "float-quantized" else "int"
            if numeric == "float" and not symmetric:
                continue
            half = 1 << (bits - 1)
            scale = torch.rand(size[strategy]) * (0.01 if numeric == "float" else 3 / half) + 1e-3
            zeros = torch.randint(-half, half, scale.shape, dtype=torch.int8)
            settings: dict[str, Any] = {
                "num_bits": bits,
                "type": numeric,
                "strategy": strategy,
                "symmetric": symmetric,
                **more,
            }
            if not symmetric and form == "pack-quantized" and (rows == 1 or scale.shape == (1, 1)):
                continue  # the library cannot view what it has packed (0.20), or does not pack it
            yield case(form, settings, shape, scale, **({} if symmetric else {"weight_zero_point": zeros}))
        if strategy == "group" and symmetric:
            mx = {"type": "float", "symmetric": True, "strategy": "group", "group_size": 32}
            powers = torch.exp2(torch.randint(-9, 2, size["group"]).float())
            yield case("mxfp4-pack-quantized", mx | {"num_bits": 4}, shape, powers)
            yield case("mxfp8-quantized", mx | {"num_bits": 8}, shape, powers / 256)
            nv = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
            scale = (torch.rand(rows, columns // 16) * 300 + 2).to(torch.float8_e4m3fn).float()
            yield case("nvfp4-pack-quantized", nv, shape, scale, weight_global_scale=torch.tensor([700.0]))


def modelopt() -> Iterator[Case]:
    from modelopt.torch.export.quant_utils import from_quantized_weight, to_quantized_weight
    from modelopt.torch.quantization.qtensor import MXFP8QTensor, NVFP4QTensor

    for shape in SHAPES:
        weight = torch.randn(shape)
        scale = weight.abs().amax() / 448
        codes = to_quantized_weight(weight, scale, "fp8")
        wanted = from_quantized_weight(codes, scale, "fp8", torch.float32)
        yield (
            "FP8",
            {"weight": codes, "weight_scale": scale, "input_scale": torch.ones(())},
            {"quant_method": "modelopt", "quant_algo": "FP8"},
            wanted,
            0.0,
        )
        rows = weight.abs().amax(1) / 448
        codes = to_quantized_weight(weight, rows, "fp8_pc_pt")
        wanted = from_quantized_weight(codes, rows[:, None], "fp8", torch.float32)
        yield (
            "FP8 by rows",
            {"weight": codes, "weight_scale": rows},
            {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
            wanted,
            0.0,
        )
        if shape[1] % 16 == 0:
            packed, scale, double = NVFP4QTensor.quantize(weight, 16)
            wanted = packed.dequantize(torch.float32, scale=scale, double_scale=double, block_sizes={-1: 16})
            tensors = {"weight": packed._quantized_data, "weight_scale": scale, "weight_scale_2": double}
            yield (
                "NVFP4",
                tensors,
                {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16},
                wanted,
                1e-6,
            )
        if shape[1] % 32 == 0:
            packed, scale = MXFP8QTensor.quantize(weight)
            wanted = packed.dequantize(torch.float32, scale=scale)
            yield (
                "MXFP8",
                {"weight": packed._quantized_data, "weight_scale": scale},
                {"quant_method": "modelopt", "quant_algo": "MXFP8"},
                wanted,
                0.0,
            )


def autoawq() -> Iterator[Case]:
    from awq.utils.packing_utils import dequantize_gemm

    for (outputs, inputs), size in itertools.product(((64, 96), (8, 128), (136, 320)), (32, -1)):
        groups = inputs // size if size > 0 else 1
        words, zeros = (
            torch.randint(-(2**31), 2**31, (rows, outputs // 8)).to(torch.int32) for rows in (inputs, groups)
        )
        scales = torch.rand(groups, outputs) + 0.1
        yield (
            "gemm " + ("in groups of 32" if size > 0 else "by channel"),
            {"qweight": words, "qzeros": zeros, "scales": scales},
            {"quant_method": "awq", "bits": 4, "group_size": size, "version": "gemm"},
            dequantize_gemm(words, zeros, scales, 4, inputs // groups).T,
            0.0,
        )


def transformers_fp8() -> Iterator[Case]:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    read = Fp8Dequantize(None)._dequantize_one
    for (rows, columns), name in itertools.product(SHAPES, ("weight_scale_inv", "scale", "qscale_weight")):
        codes = torch.randn(rows, columns).mul(100).to(torch.float8_e4m3fn)
        for grid in {
            (1, 1),
            (rows, 1),
            *(
                (rows // a, columns // b)
                for a, b in ((5, 32), (13, 40), (65, 64))
                if not (rows % a or columns % b)
            ),
        }:
            block = [rows // grid[0], columns // grid[1]]
            config = {"quant_method": "fp8", "weight_block_size": block}
            scale = torch.rand(grid)
            yield (
                f"fp8 {name}",
                {"weight": codes, name: scale},
                config,
                read(codes, scale, torch.float32),
                0.0,
            )
            exponents = torch.randint(110, 130, grid, dtype=torch.uint8)
            tensors = {"weight": codes, name: exponents}
            yield (
                f"fp8 {name} e8m0",
                tensors,
                config | {"scale_fmt": "ue8m0"},
                read(codes, exponents, torch.float32),
                0.0,
            )
        if columns % 32 == 0:
            pairs = torch.randint(-128, 128, (rows, columns // 2), dtype=torch.int8)
            exponents = torch.randint(110, 130, (rows, columns // 32), dtype=torch.uint8)
            yield (
                "fp8 experts in fp4",
                {"weight": pairs, "scale": exponents},
                {"quant_method": "fp8", "expert_dtype": "fp4"},
                read(pairs, exponents, torch.float32),
                0.0,
            )


def groups() -> tuple[int, int]:
    """Random config_groups over a tiny model: (modules, those for which compressed-tensors and isotype choose another group)."""
    from compressed_tensors.utils.match import match_named_modules, match_targets
    from transformers import AutoModelForCausalLM, LlamaConfig

    from isotype.checkpoint.mapping.schemes import UnreadableError, group_of

    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(LlamaConfig(num_hidden_layers=2))
    pool = [
        "Linear",
        "Embedding",
        "Module",
        "re:.*mlp.*",
        "re:.*q_proj",
        r"re:model\.layers\.1.*",
        "model.layers.0.self_attn.q_proj",
        "lm_head",
        "re:.*[kv]_proj$",
        "LlamaMLP",
    ]
    different = count = 0
    for _ in range(200):
        chosen = random.sample(pool, random.randint(1, 5))
        config: dict[str, Any] = {"config_groups": {}, "ignore": random.sample(pool, random.randint(0, 2))}
        for at, target in enumerate(chosen):
            group = config["config_groups"].setdefault(
                f"group_{at % 3}", {"targets": [], "weights": {"num_bits": 2 + at % 3}}
            )
            group["targets"].append(target)
        by_target = {
            target: group for group in config["config_groups"].values() for target in group["targets"]
        }
        theirs = {
            name: by_target[match_targets(name, module, by_target)[0]]
            for name, module in match_named_modules(model, by_target, config["ignore"])
        }
        for name, module in model.named_modules():
            if isinstance(module, (torch.nn.Linear, torch.nn.Embedding)):
                try:
                    chosen_group = group_of(config, [name], [each.__name__ for each in type(module).__mro__])
                except UnreadableError:
                    chosen_group = None
                count += 1
                different += chosen_group != theirs.get(name)
    return count, different


def main() -> None:
    """Compare and print."""
    torch.manual_seed(0)
    random.seed(0)
    for library in (compressed_tensors, modelopt, autoawq, transformers_fp8):
        totals: dict[str, list[Any]] = defaultdict(lambda: [0, 0, 0.0, ""])
        try:
            for name, tensors, config, wanted, tolerance in library():
                total, values = totals[name], ours(tensors, config)
                total[0] += 1
                if isinstance(values, str):
                    total[3] = values
                    continue
                far = (
                    float((values - wanted).abs().max() / wanted.abs().max())
                    if values.shape == wanted.shape
                    else float("inf")
                )
                total[1] += far <= tolerance
                total[2] = max(total[2], far)
        except ImportError as error:
            print(f"{library.__name__}: left out ({error})")
            continue
        for name, (count, agree, far, refused) in totals.items():
            print(f"{library.__name__:20} {name:45} {agree}/{count} agree, {far:.1e} apart {refused}")
    try:
        print(
            "config_groups: {} modules, {} in another group than compressed-tensors chooses".format(*groups())
        )
    except ImportError as error:
        print(f"config_groups: left out ({error})")


if __name__ == "__main__":
    main()

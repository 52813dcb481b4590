"""Values of quantized weights against the libraries that write them: AutoAWQ and transformers.

Run: python benchmarks/quantized_readers.py. Each library compresses random weights of even and odd shapes in each of its
schemes, and decompresses them again; isotype reads the same tensors from a file with the config that belongs to them. Prints
for each scheme how many weights agree, how many are refused, and the largest difference in units of the weight's largest value.
A library that is not installed is left out: pip install --no-deps autoawq.
"""

from __future__ import annotations

import itertools
import json
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


def main() -> None:
    """Compare and print."""
    torch.manual_seed(0)
    for library in (autoawq, transformers_fp8):
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


if __name__ == "__main__":
    main()

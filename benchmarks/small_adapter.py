"""How much of a LoRA adapter's output arrives in the dtype of the base, while it is small: PEFT against isotype.

An adapter begins at zero. Where its output is added to the base's, which is rounded already, what is less than half of the base's
last digit is lost; where both are one sum, rounded once, it is not. *arrives* is the share of the adapter's output that is found
in the layer's: the slope of (output - exact base) on the exact adapter over all values, 1 where nothing is lost. *size* is the
norm of the adapter's output over that of the base's. *by torch* is isotype without compiled loops.

Run: python benchmarks/small_adapter.py [--dtype bfloat16] [--tokens 1024] [--width 576] [--device cpu] [--record]
Prints a table and one line of JSON.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from unittest import mock

import peft
import torch
from torch import nn

import isotype
import results
from isotype.core.dtypes import parse_dtype
from isotype.lora import modules

SIZES = (-14, -13, -12, -11, -10, -8, -6)


def layer(width: int, dtype: torch.dtype) -> peft.PeftModel:
    """A linear layer with LoRA of rank 16."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, width, bias=False)).to(dtype)
    return peft.get_peft_model(model, peft.LoraConfig(r=16, lora_alpha=16, target_modules=["0"]))


def arrives(output: torch.Tensor, base: torch.Tensor, adapter: torch.Tensor) -> float:
    """The slope of what the output has beside the base on the adapter's exact output."""
    return float(((output.double() - base) * adapter).sum() / adapter.square().sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--width", type=int, default=576)
    parser.add_argument("--device", default="cpu")
    asked = results.parsed(parser, "tokens", "width")
    dtype = parse_dtype(asked.dtype)
    model = layer(asked.width, dtype).to(asked.device)
    lora = model.base_model.model[0]
    down, up = lora.lora_A["default"].weight.data, lora.lora_B["default"].weight.data
    x = torch.randn(asked.tokens, asked.width).to(asked.device, dtype)
    base = x.double() @ lora.base_layer.weight.double().t()

    def by(compiled: bool) -> torch.Tensor:
        with mock.patch.object(modules, "is_used", return_value=compiled):
            isotype.fuse(model)
            made: torch.Tensor = model(x)
            isotype.unfuse(model)
        return made

    ways: dict[str, Callable[[], torch.Tensor]] = {
        "PEFT": lambda: model(x),
        "isotype by torch": lambda: by(False),
    }
    if asked.device == "cpu":
        ways["isotype"] = lambda: by(True)
    print(f"{'size':>8}  " + "  ".join(f"{name:>16}" for name in ways) + "   arrives")
    rows = []
    with torch.no_grad():
        for size in SIZES:
            torch.manual_seed(1)
            up.copy_((torch.randn(up.shape) * 2.0**size).to(dtype))
            adapter = (x.double() @ down.to(dtype).double().t()) @ up.double().t()
            share = {name: arrives(way(), base, adapter) for name, way in ways.items()}
            rows.append({"size": float(adapter.norm() / base.norm()), **share})
            print(f"{rows[-1]['size']:8.5f}  " + "  ".join(f"{value:16.3f}" for value in share.values()))
            if asked.record:
                for name, value in share.items():
                    results.append(
                        f"small-adapter/{asked.dtype}, {asked.device}, 2^{size}",
                        {"size": results.Measure(rows[-1]["size"]), "arrives": results.Measure(value)},
                        name,
                    )
    print(json.dumps({"device": asked.device, "dtype": asked.dtype, "rows": rows}))


if __name__ == "__main__":
    main()

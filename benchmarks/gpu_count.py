"""Kernels and bytes of one layer of Llama-3-8B's shape on a GPU that is not there: isotype's fused step beside plain PEFT's.

Both run on fake tensors of a device without a CPU's branches (`tests/fake_gpu.py`): every operator that would be launched is counted once,
with the bytes that it reads and writes. A layer is the difference between a model of two layers and one of one layer. Attention is one
operator forward and one backward; dequantization counts the bytes that it writes.

Run: python benchmarks/gpu_count.py [--storage none nf4] [--tokens 2048] [--dropout 0.1] [--record]
Prints a table and one line of JSON. No GPU and no Triton is needed: nothing is computed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import results  # noqa: E402

SIZES = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}


@dataclass(frozen=True)
class Row:
    """What one layer launches in a step.

    Attributes:
        storage: of the base weights.
        path: `isotype` or `PEFT`.
        checkpointing: whether its forward runs twice.
        kernels: how many are launched.
        elementwise, products: bytes a token of operators between the products, and of products, their weights included.
        dequantized: bytes, whatever the number of tokens.
    """

    storage: str
    path: str
    checkpointing: bool
    kernels: int
    elementwise: float
    products: float
    dequantized: int


def rows(storage: str, path: str, tokens: int, dropout: float) -> list[Row]:
    """The rows of one storage and path, in this process."""
    from tests import fake_gpu

    fake_gpu.one_attention()
    models = [
        fake_gpu.adapted(
            storage, {"lora_dropout": dropout}, sizes=SIZES, layers=layers, fused=path == "isotype"
        )
        for layers in (1, 2)
    ]
    fake_gpu.start()
    found = []
    for checkpointing in (False, True):
        one, two = (fake_gpu.step(model, tokens, checkpointing=checkpointing) for model in models)
        kernels = sum(two.kernels.values()) - sum(one.kernels.values())
        elementwise, products = two.elementwise - one.elementwise, two.products - one.products
        dequantized = two.dequantized - one.dequantized
        found.append(
            Row(storage, path, checkpointing, kernels, elementwise / tokens, products / tokens, dequantized)
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--storage", nargs="+", default=["none", "nf4"], choices=["none", "nf4", "int8"])
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--dropout", type=float, default=0.0, help="of the adapters")
    parser.add_argument("--part", nargs=2, help=argparse.SUPPRESS)
    options = results.parsed(parser)
    if options.part:
        warnings.simplefilter("ignore")
        storage, path = options.part
        print(json.dumps([vars(row) for row in rows(storage, path, options.tokens, options.dropout)]))
        return
    table: list[Row] = []
    print(
        f"{'storage':<8}{'path':<9}{'checkpointing':<15}{'kernels':>8}{'between kB':>12}{'products kB':>13}{'dequantized MB':>16}"
    )
    for storage in options.storage:
        for path in ("PEFT", "isotype"):
            # A process each: the fake device replaces the machine's own.
            command = [sys.executable, __file__, "--part", storage, path, "--tokens", str(options.tokens)]
            command += ["--dropout", str(options.dropout)]
            ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
            if ended.returncode:
                sys.exit(ended.stderr[-2000:])
            for row in (Row(**each) for each in json.loads(ended.stdout.splitlines()[-1])):
                table.append(row)
                print(
                    f"{row.storage:<8}{row.path:<9}{'on' if row.checkpointing else 'off':<15}{row.kernels:>8}"
                    f"{row.elementwise / 1e3:>12,.0f}{row.products / 1e3:>13,.0f}{row.dequantized / 1e6:>16,.0f}",
                    flush=True,
                )
    if options.record:
        for row in table:
            keep(row, options)
    print(json.dumps([vars(row) for row in table]))


def keep(row: Row, options: argparse.Namespace) -> None:
    """Add a row to the file of results."""
    base = "bfloat16" if row.storage == "none" else row.storage
    dropout = f", dropout {options.dropout}" if options.dropout else ""
    results.append(
        f"gpu-layer/{base}, {'on' if row.checkpointing else 'off'}, {options.tokens} tokens{dropout}",
        {
            "kernels": results.Measure(row.kernels, "kernels"),
            "between": results.Measure(row.elementwise / 1e3, "kB a token"),
            "products": results.Measure(row.products / 1e3, "kB a token"),
            "dequantized": results.Measure(row.dequantized / 1e6, "MB"),
        },
        row.path,
    )


if __name__ == "__main__":
    main()

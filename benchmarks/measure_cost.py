"""What `isotype.measure_ranges` costs: seconds and memory of a checkpoint on disk, against reading it and computing.

Run: python benchmarks/measure_cost.py [MODEL] [--text] [--record]; --text: how much more a longer text shows. MODEL is a checkpoint, by default SmolLM2 from its package; a checkpoint
with the blocks of an 8B Llama (random bfloat16 weights, 416 MiB a block, a vocabulary of 4096) is made in a temporary
folder, once with one block and once with three.

*plain* is transformers' own: the checkpoint read into float32 as a whole, then a forward and a backward of the same 256
tokens with frozen weights, by which gradients reach the embedding. *memory* is the peak of resident memory over what is
resident after a warm-up, which holds every import, as is the time. Each row is a process of its own. *ratio* is that of
processor time: seconds on the wall say little where other processes keep the cores busy.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import results
from dense_folder import dense_folder

_BLOCK = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
_SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 2}
_TOKENS = 256
_MIB = 1 << 20


def make(directory: Path, blocks: int, sizes: dict[str, int]) -> Path:
    """A Llama checkpoint of random bfloat16 weights, one file."""
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(vocab_size=4096, num_hidden_layers=blocks, tie_word_embeddings=True, **sizes)
    config.architectures, config.dtype = ["LlamaForCausalLM"], torch.bfloat16
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    values = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0))

    def drawn(parameter: torch.Tensor) -> torch.Tensor:
        scale = 1.0 if parameter.ndim == 1 else parameter.shape[-1] ** -0.5
        count = parameter.numel()
        return (
            (values.repeat(-(-count // len(values)))[:count] * scale).to(torch.bfloat16).view(parameter.shape)
        )

    directory.mkdir()
    config.save_pretrained(directory)
    weights = {name: drawn(parameter) for name, parameter in model.named_parameters()}
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    return directory


def resident(field: str) -> float:
    """MiB of this process: `VmRSS` now, `VmHWM` at the worst moment."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:")) / 1024


def plain(path: str) -> None:
    """Read it all, forward, backward."""
    from transformers import AutoModelForCausalLM

    from isotype.checkpoint.tokenizer import tokenizer_of
    from isotype.ranges.measure import Batches

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).requires_grad_(False)
    model.enable_input_require_grads()
    run = Batches.for_model(model, tokenizer_of(Path(path)), _TOKENS)
    model(**run.batches[0], use_cache=False).loss.backward()


def measure(path: str) -> None:
    """What is compared with it."""
    import isotype

    isotype.measure_ranges(path, tokens=_TOKENS, progress=False)


WAYS: dict[str, Callable[[str], None]] = {"plain": plain, "measure": measure}


def one(way: str, path: str, small: str) -> dict[str, float]:
    """Seconds and MiB of one way, after the same on a small model; this process does nothing else."""
    run = WAYS[way]
    run(small)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # VmHWM begins again
    before = resident("VmRSS")
    started, processor = time.perf_counter(), time.process_time()
    run(path)
    return {
        "seconds": time.perf_counter() - started,
        "processor": time.process_time() - processor,
        "MiB": resident("VmHWM") - before,
    }


def largest_part(source: str | Path) -> int:
    """Weights of the largest part of a checkpoint that has to be in memory at one time."""
    from isotype.checkpoint.checkpoint import open_model
    from isotype.checkpoint.stored_weights import blank_model
    from isotype.ranges.measure import parts

    return max(parts(blank_model(open_model(source).model_config)), default=0)


def rows(model: str, folder: Path) -> Iterator[tuple[str, Path, float]]:
    """(name, checkpoint, MiB of the largest block in float32) of what is measured."""
    yield model, (source := _checkpoint(model)), largest_part(source) * 4 / _MIB
    for blocks in (1, 3):
        source = make(folder / f"blocks-{blocks}", blocks, _BLOCK)
        yield (
            f"Llama 8B, {blocks} blocks" if blocks > 1 else "Llama 8B, 1 block",
            source,
            largest_part(source) * 4 / _MIB,
        )


def text(model: str, record: bool) -> None:
    """What fewer tokens miss: how much larger a value is in the longest text, over all modules or matrix products."""
    import isotype

    counts = (16, 64, 128, 256, 512, 768)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["ISOTYPE_CACHE"] = folder
        source = _checkpoint(model)
        found = {count: isotype.measure_ranges(source, tokens=count) for count in counts}
    longest = found[counts[-1]]
    print(f"larger in {counts[-1]} tokens than in fewer: median, 95 %, most")
    for count, ranges in found.items():
        outputs = [
            each.output / ranges.by_module[each.name].output for each in longest.modules if each.output
        ]
        pairs = zip(longest.operators, ranges.operators, strict=True)
        magnitudes = (
            (max(one.output, *one.inputs), max(other.output, *other.inputs))
            for one, other in pairs
            if one.matmul
        )
        products = [larger / smaller for larger, smaller in magnitudes if smaller]
        cells: list[str] = []
        measures: dict[str, results.Measure] = {}
        for what, ratios in (("outputs", outputs), ("products", products)):
            middle, *_, high = statistics.quantiles(ratios, n=20)[9:]
            cells.append(f"{middle:5.2f} {high:5.2f} {max(ratios):5.2f}")
            parts = (("median", middle), ("nearly_all", high), ("most", max(ratios)))
            measures |= {f"{what}_{name}": results.Measure(each, "×") for name, each in parts}
        residual = ranges.residual.output if ranges.residual else 0.0
        print(f"{count:5} tokens: outputs {cells[0]}, products {cells[1]}; residual stream {residual:,.0f}")
        if record:
            results.append(f"measure-text/{count}", {**measures, "residual": results.Measure(residual)})


def _checkpoint(model: str) -> Path:
    return dense_folder(model) if model.startswith("embedded:") else Path(model)


def main(model: str, record: bool) -> None:
    """Every row, printed as it comes, then one line of JSON."""
    found: dict[str, Any] = {}
    print(
        f"{'':32} {'plain':>18} {'measured':>18} {'ratio':>6} {'largest part':>13} {'memory':>10} {'ratio':>6}"
    )
    with tempfile.TemporaryDirectory() as folder:
        small = make(Path(folder) / "small", 2, _SMALL)
        environment = os.environ | {"ISOTYPE_CACHE": str(Path(folder) / "cache"), "HF_HUB_OFFLINE": "1"}
        for name, path, part in rows(model, Path(folder)):
            costs = {}
            for way in WAYS:
                command = [sys.executable, __file__, "--one", way, str(path), str(small)]
                answer = subprocess.run(
                    command, env=environment, stdout=subprocess.PIPE, text=True, check=True
                )
                costs[way] = json.loads(answer.stdout.splitlines()[-1])
            found[name] = costs | {"largest part": part}
            bare, mine = costs["plain"], costs["measure"]
            print(
                f"{name[-32:]:32} {bare['seconds']:7.1f} s {bare['processor']:5.1f} cpu"
                f" {mine['seconds']:7.1f} s {mine['processor']:5.1f} cpu {mine['processor'] / bare['processor']:6.2f}"
                f" {part:9.0f} MiB {mine['MiB']:6.0f} MiB {mine['MiB'] / part:6.2f}",
                flush=True,
            )
            if record:
                ways = {
                    f"{way}_{what}": costs[way][what] for way in WAYS for what in ("seconds", "processor")
                }
                row = {**ways, "part": part, "memory": mine["MiB"], "of_part": mine["MiB"] / part}
                row["ratio"] = mine["processor"] / bare["processor"]
                units = {
                    **dict.fromkeys(ways, "s"),
                    "part": "MiB",
                    "memory": "MiB",
                    "of_part": "×",
                    "ratio": "×",
                }
                results.append(f"measure/{name}", results.measured(row, **units))
    one_block, three = found["Llama 8B, 1 block"], found["Llama 8B, 3 blocks"]
    for way in WAYS:
        each = (three[way]["processor"] - one_block[way]["processor"]) / 2
        more = (three[way]["MiB"] - one_block[way]["MiB"]) / 2
        print(f"each further block of 8B, {way}: {each:.1f} s of processor time, {more:+.0f} MiB")
        if record:
            block = {"processor": results.Measure(each, "s"), "memory": results.Measure(more, "MiB")}
            results.append("measure-block/Llama 8B", block, way)
    print(json.dumps(found))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(one(*sys.argv[2:])))
    else:
        parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
        parser.add_argument("model", nargs="?", default="embedded:smollm2")
        parser.add_argument("--text", action="store_true", help="what fewer tokens miss")
        asked = results.parsed(parser)
        (text if asked.text else main)(asked.model, asked.record)

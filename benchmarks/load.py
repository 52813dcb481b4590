"""Loading a checkpoint: isotype.load beside transformers' from_pretrained.

Each load runs in a process of its own, after its imports and once the files are in the page cache; the two sides take
turns. *Seconds* and *CPU* (user and system time of all threads) are those of the load call alone. *Peak* is the largest
resident memory during the call beyond what was resident before it, pages of mapped files included; *model* is what the
loaded parameters and quantization constants take.

Checkpoints are synthetic: a Llama of 1.1 billion parameters in bfloat16 (22 layers of width 2048), a gpt-oss of 16
experts in mxfp4 (4 layers of width 1024), a Qwen3-MoE of 64 experts in 4 layers of width 1024 (0.6 GB in bfloat16; transformers leaves
experts in bfloat16; the case that names 4 GB takes one of 128 experts in 7 layers of width 2048, if it is asked for), and `embedded:smollm2`, a GGUF file of 135 million parameters, where it is
installed. `--small` takes a Llama of 0.1 billion.

Run: python benchmarks/load.py [CASE …] [--rounds 3] [--small] [--keep DIR] [--record]. Prints a table and one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import results as kept

SIDES = ("isotype", "transformers")


@dataclass(frozen=True)
class Case:
    """One load: which checkpoint, and the dtype and quantization that its weights take."""

    checkpoint: str
    dtype: str
    quantization: str | None = None


CASES = {
    "bf16 -> nf4, double quantization": Case("llama", "bfloat16", "nf4"),
    "bf16 -> int8": Case("llama", "bfloat16", "int8"),
    "bf16 -> bf16": Case("llama", "bfloat16"),
    "bf16 -> fp16": Case("llama", "float16"),
    "mxfp4 -> bf16": Case("gpt-oss", "bfloat16"),
    "GGUF -> bf16": Case("gguf", "bfloat16"),
    "experts, bf16 -> nf4": Case("qwen3-moe", "bfloat16", "nf4"),
    "experts of 4 GB, bf16 -> nf4": Case("qwen3-moe-large", "bfloat16", "nf4"),
}
USUAL = tuple(name for name, case in CASES.items() if not case.checkpoint.endswith("-large"))


def write_llama(directory: Path, small: bool) -> None:
    """A bfloat16 Llama with random weights."""
    import torch
    import transformers
    from safetensors.torch import save_file

    config = transformers.LlamaConfig(
        hidden_size=768 if small else 2048,
        intermediate_size=2048 if small else 5632,
        num_hidden_layers=8 if small else 22,
        num_attention_heads=12 if small else 32,
        num_key_value_heads=4,
        vocab_size=32000,
        dtype=torch.bfloat16,
        architectures=["LlamaForCausalLM"],
    )
    with torch.device("meta"):
        shapes = {
            name: value.shape for name, value in transformers.LlamaForCausalLM(config).state_dict().items()
        }
    random = torch.Generator().manual_seed(0)
    weights = {
        name: (0.02 * torch.randn(shape, generator=random)).to(torch.bfloat16)
        for name, shape in shapes.items()
    }
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(directory)


def write_gpt_oss(directory: Path, small: bool) -> None:
    """A gpt-oss whose experts are in mxfp4, everything else in bfloat16."""
    import torch
    import transformers
    from safetensors.torch import save_file

    config = transformers.GptOssConfig(
        hidden_size=256 if small else 1024,
        intermediate_size=256 if small else 1024,
        num_hidden_layers=2 if small else 4,
        num_local_experts=16,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=64,
        vocab_size=32000,
        dtype=torch.bfloat16,
        architectures=["GptOssForCausalLM"],
    )
    with torch.device("meta"):
        model = transformers.GptOssForCausalLM(config)
    random = torch.Generator().manual_seed(0)
    weights: dict[str, Any] = {}
    for name, value in model.state_dict().items():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, inputs, outputs = value.shape
            shape = (experts, outputs, inputs // 32)
            weights[f"{name}_blocks"] = torch.randint(
                0, 256, (*shape, 16), generator=random, dtype=torch.uint8
            )
            weights[f"{name}_scales"] = torch.randint(118, 123, shape, generator=random, dtype=torch.uint8)
        else:
            weights[name] = (0.02 * torch.randn(value.shape, generator=random)).to(torch.bfloat16)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(directory)
    path = directory / "config.json"
    written = json.loads(path.read_text(encoding="utf-8"))
    skipped = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    written["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": skipped}
    path.write_text(json.dumps(written), encoding="utf-8")


def write_qwen3_moe(directory: Path, small: bool, large: bool = False) -> None:
    """A bfloat16 Qwen3-MoE as it is published: a tensor for each layer of each expert."""
    import torch
    import transformers
    from safetensors.torch import save_file

    config = transformers.Qwen3MoeConfig(
        hidden_size=2048 if large else 512 if small else 1024,
        moe_intermediate_size=256 if small else 384,
        num_experts=128 if large else 32 if small else 64,
        num_hidden_layers=7 if large else 2 if small else 4,
        num_attention_heads=8,
        num_key_value_heads=2,
        vocab_size=8192,
        dtype=torch.bfloat16,
        architectures=["Qwen3MoeForCausalLM"],
    )
    with torch.device("meta"):
        state = transformers.Qwen3MoeForCausalLM(config).state_dict()
    random = torch.Generator().manual_seed(0)
    weights: dict[str, Any] = {}
    for name, value in state.items():
        if value.ndim != 3:
            weights[name] = (0.02 * torch.randn(value.shape, generator=random)).to(torch.bfloat16)
            continue
        owner, _, own = name.rpartition(".")
        for expert in range(len(value)):
            for part in ("gate_proj", "up_proj") if own == "gate_up_proj" else (own,):
                shape = (value.shape[1] // (2 if own == "gate_up_proj" else 1), value.shape[2])
                drawn = 0.02 * torch.randn(shape, generator=random)
                weights[f"{owner}.{expert}.{part}.weight"] = drawn.to(torch.bfloat16)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(directory)


WRITERS: dict[str, Callable[[Path, bool], None]] = {
    "llama": write_llama,
    "gpt-oss": write_gpt_oss,
    "qwen3-moe": write_qwen3_moe,
    "qwen3-moe-large": partial(write_qwen3_moe, large=True),
}


def loader(case: Case, side: str, path: str) -> Callable[[], Any]:
    """The call to measure; everything that it imports is imported already."""
    import bitsandbytes
    import torch
    import transformers
    from transformers.models.gpt_oss import modeling_gpt_oss
    from transformers.models.llama import modeling_llama
    from transformers.models.qwen3_moe import modeling_qwen3_moe

    assert all((bitsandbytes, modeling_llama, modeling_gpt_oss, modeling_qwen3_moe))
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    dtype = getattr(torch, case.dtype)
    if side == "isotype":
        import isotype

        policy = isotype.resolve_precision(
            path, case.dtype, case.quantization, "cpu", double_quant=case.quantization == "nf4" or None
        )
        load = isotype.load  # which imports it
        return lambda: load(path, policy)
    settings: dict[str, Any] = {"dtype": dtype}
    if case.quantization == "nf4":
        settings["quantization_config"] = transformers.BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
        )
    elif case.quantization == "int8":
        settings["quantization_config"] = transformers.BitsAndBytesConfig(load_in_8bit=True)
    elif case.checkpoint == "gpt-oss":
        settings["quantization_config"] = transformers.Mxfp4Config(dequantize=True)
    elif case.checkpoint == "gguf":
        from isotype.checkpoint.checkpoint import embedded_file

        file = embedded_file(path.removeprefix("embedded:"))
        path = str(file.parent)
        settings |= {"gguf_file": file.name, "quantization_config": transformers.GgufConfig(dequantize=True)}
    return lambda: transformers.AutoModelForCausalLM.from_pretrained(path, **settings)


def resident(field: str) -> int:
    """Bytes of memory, from /proc: `VmRSS` now or `VmHWM` at most."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return 1024 * int(status.split(f"{field}:")[1].split()[0])


def held(model: Any) -> int:
    """Bytes of a model's parameters, buffers and quantization constants."""
    import torch

    found: dict[int, int] = {}
    for value in (*model.parameters(), *model.buffers()):
        state = getattr(value, "quant_state", None)
        nested = [state.absmax, *((state.state2.absmax,) if state.nested else ())] if state else []
        for each in (value, *nested, getattr(value, "SCB", None)):
            if isinstance(each, torch.Tensor):
                found[each.data_ptr()] = each.nbytes
    return sum(found.values())


def measure(case: Case, side: str, path: str) -> dict[str, float]:
    """Seconds, CPU seconds and bytes of one load in this process."""
    load = loader(case, side, path)
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the peak starts anew
    wall, cpu = time.perf_counter(), time.process_time()
    model = load()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return {"seconds": wall, "cpu": cpu, "peak": resident("VmHWM") - before, "model": held(model)}


def child(name: str, side: str, path: str) -> dict[str, float]:
    """`measure` in a process of its own."""
    command = [sys.executable, __file__, "--child", name, side, path]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def warm(directory: str) -> None:
    """Bring the files into the page cache."""
    for file in Path(directory).glob("*.safetensors"):
        with file.open("rb") as opened:
            while opened.read(1 << 24):
                pass


def compare(name: str, path: str, rounds: int) -> dict[str, Any]:
    """Loads of both sides by turns."""
    warm(path)
    runs: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    for turn in range(rounds):
        for side in SIDES if turn % 2 == 0 else reversed(SIDES):
            runs[side].append(child(name, side, path))
    return {
        side: {
            key: [
                statistics.median(run[key] for run in each),
                min(run[key] for run in each),
                max(run[key] for run in each),
            ]
            for key in each[0]
        }
        for side, each in runs.items()
    }


def main() -> None:
    """Run the cases asked for and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--keep", type=Path, help="where the checkpoints are, or are written to")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = kept.parsed(parser)
    if options.child:
        name, side, path = options.child
        print(json.dumps(measure(CASES[name], side, path)))
        return
    results: dict[str, Any] = {}
    print(f"{'case':<34} {'side':<13} {'seconds':>22} {'CPU':>7} {'peak':>9} {'model':>9}")
    with tempfile.TemporaryDirectory() as scratch:
        for name in options.cases or USUAL:
            path = prepared(CASES[name].checkpoint, options.keep or Path(scratch), options.small)
            results[name] = compare(name, path, options.rounds)
            for side, found in results[name].items():
                median, least, most = found["seconds"]
                print(
                    f"{name:<34} {side:<13} {median:>6.2f} ({least:.2f} to {most:.2f}) {found['cpu'][0]:>7.2f} "
                    f"{found['peak'][0] / 1e9:>6.2f} GB {found['model'][0] / 1e9:>6.2f} GB",
                    flush=True,
                )
            ours, theirs = (results[name][side]["seconds"][0] for side in SIDES)
            print(f"{'':<34} {ours / theirs:.2f} of transformers' time")
            if options.record:
                keep(f"load{'-small' if options.small else ''}/{name}", results[name])
    print(json.dumps(results))


def keep(figure: str, sides: dict[str, dict[str, list[float]]]) -> None:
    """Add a case to the file of results; the share is isotype's time over the other's."""
    for side, found in sides.items():
        median, *spread = found["seconds"]
        kept.append(
            figure,
            {
                "seconds": kept.Measure(median, "s", (spread[0], spread[1])),
                "cpu": kept.Measure(found["cpu"][0], "s"),
                "peak": kept.Measure(found["peak"][0] / 1e9, "GB"),
                "model": kept.Measure(found["model"][0] / 1e9, "GB"),
                "share": kept.Measure(sides["isotype"]["seconds"][0] / median),
            },
            side,
            "isotype",
        )


def prepared(checkpoint: str, root: Path, small: bool) -> str:
    """The checkpoint, written unless it is there."""
    if checkpoint == "gguf":
        return "embedded:smollm2"
    directory = root / f"{checkpoint}{'-small' if small else ''}"
    if not (directory / "config.json").is_file():
        directory.mkdir(parents=True, exist_ok=True)
        WRITERS[checkpoint](directory, small)
    return str(directory)


if __name__ == "__main__":
    main()
